"""What a number of the cache becomes: 8 or 4 bits, and a scale for each token and KV head.

    codes, scales = INT8.quantize(k)             # k: [T, Hkv, D]
    k_again = INT8.dequantize(codes, scales)     # [T, Hkv, D], in the dtype of scales

A row is the K (or V) of one token and KV head: D numbers, which share a scale. So a row is finished
when its token is written, and no later token changes it. Paging, prefix caching, chunks of prompts,
copies on write and the rewind of a rejected draft rely on that. kivi.py has scales that many tokens
share, and shows what becomes of these then.

A row with a NaN or an infinity gets a scale of NaN or infinity, so the whole row comes back as NaN
and the fault stays visible. Integers have no NaN: such a code is 0.

The scale is stored in the model's dtype, and codes are made with the scale as it was stored, so
that rounding the scale costs no accuracy. Names: vLLM calls these formats fp8_per_token_head,
int8_per_token_head and int4_per_token_head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.toolbox.model.config import ModelConfig

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Float8:
    """E4M3: code = x / scale rounded to a number of 8 bits; the row's largest becomes 448."""

    name: str = "fp8"
    bits: int = 8
    scales_per_row: int = 1

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., D] -> codes: [..., D] uint8, the bits of E4M3 numbers, and scales: [..., 1] in
        x's dtype.
        """
        scales = nonzero(divided(wide(x).abs().amax(-1, keepdim=True), E4M3_MAX).to(x.dtype))
        # Clamped, because a cast beyond 448 gives NaN: the format has no infinity to saturate to.
        ratio = (wide(x) / wide(scales)).clamp(-E4M3_MAX, E4M3_MAX)
        return ratio.float().to(torch.float8_e4m3fn).view(torch.uint8), scales

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The inverse, up to rounding: [..., D] in the dtype of scales."""
        values = codes.view(torch.float8_e4m3fn).to(wide(scales).dtype)
        return (values * wide(scales)).to(scales.dtype)


@dataclass(frozen=True)
class Int8:
    """Whole numbers from −127 to 127: code = round(x / scale); the row's largest becomes 127."""

    name: str = "int8"
    bits: int = 8
    scales_per_row: int = 1

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., D] -> codes: [..., D] uint8, the bits of int8 numbers, and scales: [..., 1] in
        x's dtype.
        """
        scales = nonzero(divided(wide(x).abs().amax(-1, keepdim=True), 127).to(x.dtype))
        codes = (wide(x) / wide(scales)).round().clamp(-127, 127).nan_to_num()
        return codes.to(torch.int8).view(torch.uint8), scales

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The inverse, up to rounding: [..., D] in the dtype of scales."""
        return (codes.view(torch.int8) * wide(scales)).to(scales.dtype)


@dataclass(frozen=True)
class Int4:
    """Whole numbers from 0 to 15: code = round((x − low) / scale), where low is the row's smallest
    number. With 16 codes none may be wasted, so the row's own range is cut, not one around 0.

    A byte holds two neighbours of the row: the first in its low half, the second in its high half.
    """

    name: str = "int4"
    bits: int = 4
    scales_per_row: int = 2

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., D], D even -> codes: [..., D / 2] uint8 and scales: [..., 2], scale and low, in
        x's dtype.
        """
        low = x.amin(-1, keepdim=True)
        scale = nonzero(divided(wide(x.amax(-1, keepdim=True)) - wide(low), 15).to(x.dtype))
        whole = ((wide(x) - wide(low)) / wide(scale)).round().clamp(0, 15).nan_to_num()
        codes = whole.to(torch.uint8)
        return codes[..., 0::2] | codes[..., 1::2] << 4, torch.cat([scale, low], dim=-1)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The inverse, up to rounding: [..., D] in the dtype of scales."""
        numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        scale, low = wide(scales).split(1, dim=-1)
        return (numbers * scale + low).to(scales.dtype)


RowFormat = Float8 | Int8 | Int4
FORMATS: dict[str, RowFormat] = {format.name: format for format in (Float8(), Int8(), Int4())}


def wide(x: Tensor) -> Tensor:
    """x: [...] in float32, or as it is in float64: what scales and codes are computed in."""
    return x if x.dtype == torch.float64 else x.float()


def divided(x: Tensor, by: float) -> Tensor:
    """x: [...] / by, rounded once. By a tensor, because on a GPU PyTorch multiplies by 1 / by where
    `by` is a Python number, and that rounds twice.
    """
    return x / x.new_full((), by)


def nonzero(scales: Tensor) -> Tensor:
    """scales: [...], with 1 for 0: a row of equal numbers then has codes that mean them."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def row_bytes(format: RowFormat, width: int, scale_itemsize: int) -> int:
    """Bytes of a row of `width` numbers. scale_itemsize: bytes of a number in the model's dtype."""
    return width * format.bits // 8 + format.scales_per_row * scale_itemsize


def kv_bytes_per_token(config: ModelConfig, format: RowFormat, itemsize: int) -> int:
    """K and V of one token in all layers, scales and all; itemsize: of the model's dtype."""
    rows = [(1, config.mla.latent_dim)] if config.mla else None
    if rows is None:
        rows = [(config.num_key_value_heads, d) for d in (config.head_dim, config.v_head_dim)]
    each = sum(heads * row_bytes(format, width, itemsize) for heads, width in rows)
    return config.num_kv_layers * each
