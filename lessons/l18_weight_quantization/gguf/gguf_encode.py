"""Numbers into llama.cpp's blocks.

    weight = to_gguf(linear.weight, "Q4_K")        [N, K] -> GgufWeight

The formats with blocks of 32 take their one scale from the largest value. In a super-block of 256
gguf_search.py finds a scale for each sub-block. These scales are then rounded themselves, to 4, 6
or 8 bits, and the codes are chosen a last time for the scales as they are stored.

Source: ggml-quants.c of llama.cpp (quantize_row_q4_0_ref, quantize_row_q4_K_ref, …).
"""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.gguf.gguf_blocks import (
    FORMATS,
    GgufWeight,
    half_bytes,
    halves,
    pack_runs,
    pack_scales,
)
from lessons.l18_weight_quantization.gguf.gguf_search import (
    NOTHING,
    Fit,
    fit_one_by_one,
    fit_symmetric,
    fit_with_minimum,
    half_flat,
    ratio,
)
from lessons.toolbox.model.arguments import refuse

CHUNK = 2**20  # values that are quantized at a time, because a search keeps several copies


# ---------------------------------------------------------------- one scale, no search


def encode_q8_0(values: Tensor) -> Tensor:
    """values: [..., 32] float32 -> [..., 34] uint8. The largest magnitude becomes 127."""
    d = values.abs().amax(-1, keepdim=True) / 127
    scaled = (values * _inverse(d)).abs()
    # half away from zero, as C's roundf; not floor(x + 0.5), which turns 0.49999997 into 1
    whole = scaled.floor()
    codes = (whole + (2 * (scaled - whole)).floor()).copysign(values).to(torch.int8)
    return torch.cat([half_bytes(d), codes.view(torch.uint8)], dim=-1)


def encode_q4_0(values: Tensor) -> Tensor:
    """[..., 32] -> [..., 18]."""
    d, codes = _largest_to_lowest(values, 8)
    return torch.cat([half_bytes(d), pack_runs(codes, 16, 4)], dim=-1)


def encode_q5_0(values: Tensor) -> Tensor:
    """[..., 32] -> [..., 22]."""
    d, codes = _largest_to_lowest(values, 16)
    return torch.cat([half_bytes(d), *_five_bits(codes)], dim=-1)


def encode_q4_1(values: Tensor) -> Tensor:
    """[..., 32] -> [..., 20]."""
    d, low, codes = _from_lowest(values, 15)
    return torch.cat([half_bytes(d), half_bytes(low), pack_runs(codes, 16, 4)], dim=-1)


def encode_q5_1(values: Tensor) -> Tensor:
    """[..., 32] -> [..., 24]."""
    d, low, codes = _from_lowest(values, 31)
    return torch.cat([half_bytes(d), half_bytes(low), *_five_bits(codes)], dim=-1)


def _largest_to_lowest(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """d [..., 1] and codes [..., 32] uint8, 0 to 2 · levels − 1.

    The value with the largest magnitude becomes −levels, whatever its sign, so d may be negative.
    That uses the one code that a symmetric format has more on its negative side.
    """
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    d = extreme / -levels
    codes = (values * _inverse(d) + (levels + 0.5)).trunc().clamp(0, 2 * levels - 1)
    return d, codes.to(torch.uint8)


def _from_lowest(values: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """d and the lowest value [..., 1], and codes [..., 32] uint8, 0 to `top`."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    d = (high - low) / top
    codes = ((values - low) * _inverse(d) + 0.5).trunc().clamp(0, top)
    return d, low, codes.to(torch.uint8)


def _five_bits(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The fifth bits and the low bits of 32 codes, packed: [..., 4] and [..., 16] uint8."""
    return pack_runs(codes >> 4, 1, 1), pack_runs(codes, 16, 4)


def _inverse(d: Tensor) -> Tensor:
    """1 / d, and 0 where d is 0."""
    return torch.where(d == 0, 0, 1 / d)


# ---------------------------------------------------------------- super-blocks


def encode_q4_k(values: Tensor) -> Tensor:
    """[..., 256] -> [..., 144]."""
    parts = values.unflatten(-1, (8, 32))
    fit = fit_with_minimum(parts, half_flat(parts), 15, -1.0, 21, torch.square)
    tops, scales, minima, codes = _stored_with_minimum(parts, fit, 63, 15)
    return torch.cat([tops, pack_scales(scales, minima), pack_runs(codes, 32, 4)], dim=-1)


def encode_q5_k(values: Tensor) -> Tensor:
    """[..., 256] -> [..., 176]."""
    parts = values.unflatten(-1, (8, 32))
    fit = fit_with_minimum(parts, half_flat(parts), 31, -0.5, 16, torch.square)
    tops, scales, minima, codes = _stored_with_minimum(parts, fit, 63, 31)
    high, low = pack_runs(codes >> 4, 32, 1), pack_runs(codes, 32, 4)
    return torch.cat([tops, pack_scales(scales, minima), high, low], dim=-1)


def encode_q2_k(values: Tensor) -> Tensor:
    """[..., 256] -> [..., 84]. Weights and error are absolute values here, not squares."""
    parts = values.unflatten(-1, (16, 16))
    fit = fit_with_minimum(parts, parts.abs(), 3, -0.5, 16, torch.abs)
    tops, scales, minima, codes = _stored_with_minimum(parts, fit, 15, 3)
    return torch.cat([scales | minima << 4, pack_runs(codes, 32, 2), tops], dim=-1)


def encode_q6_k(values: Tensor) -> Tensor:
    """[..., 256] -> [..., 210]."""
    parts = values.unflatten(-1, (16, 16))
    d, scales, codes = _stored_symmetric(parts, fit_symmetric(parts, 32), 128, 32)
    low, high = pack_runs(codes, 64, 4), pack_runs(codes >> 4, 32, 2)
    signed = scales.to(torch.int8).view(torch.uint8)
    blocks = torch.cat([low, high, signed, d], dim=-1)
    is_nothing = values.abs().amax(-1, keepdim=True) < NOTHING
    return torch.where(is_nothing, 0, blocks)


def encode_q3_k(values: Tensor) -> Tensor:
    """[..., 256] -> [..., 110]."""
    parts = values.unflatten(-1, (16, 16))
    fit = fit_one_by_one(parts, 4)
    d, scales, codes = _stored_symmetric(parts, fit, 32, 4)
    # llama.cpp leaves the bytes of a super-block without any scale at 0
    unsigned = torch.where(fit.scale.any(-1, keepdim=True), scales + 32, 0).to(torch.uint8)
    packed = torch.cat([pack_runs(unsigned, 8, 4), pack_runs(unsigned >> 4, 4, 2)], dim=-1)
    return torch.cat([pack_runs(codes >> 2, 32, 1), pack_runs(codes, 32, 2), packed, d], dim=-1)


def _stored_with_minimum(
    parts: Tensor, fit: Fit, top_scale: int, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and minima rounded to 0 … top_scale, and the codes chosen anew for them.

    parts: [..., sub-blocks, n] -> d and dmin as bytes [..., 4], scales and minima [...,
    sub-blocks], codes [..., 256], all uint8.
    """
    largest = torch.stack([fit.scale.amax(-1), fit.minimum.amax(-1)], dim=-1)
    largest = torch.where(largest > 0, largest, 0)  # not clamp, which keeps −0
    inverse = torch.where(largest == 0, 0, ratio(top_scale, largest))
    tops = half_bytes(largest / top_scale)
    scales = (inverse[..., :1] * fit.scale).round().clamp(0, top_scale)
    minima = (inverse[..., 1:] * fit.minimum).round().clamp(0, top_scale)
    d, dmin = halves(tops).split(1, dim=-1)
    minimum = (dmin * minima)[..., None]
    codes = _codes_for(parts + minimum, (d * scales)[..., None], (0, top), fit)
    return tops, scales.to(torch.uint8), minima.to(torch.uint8), codes.to(torch.uint8)


def _stored_symmetric(
    parts: Tensor, fit: Fit, top_scale: int, levels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales rounded to −top_scale … top_scale − 1, and the codes chosen anew for them.

    parts: [..., 16, 16] -> d as bytes [..., 2], scales [..., 16] float32, and codes + levels [...,
    256] uint8. The scale with the largest magnitude becomes −top_scale, as in `_largest_to_lowest`.
    """
    extreme = fit.scale.gather(-1, fit.scale.abs().argmax(-1, keepdim=True))
    inverse = torch.where(extreme == 0, 0, ratio(-top_scale, extreme))
    d = half_bytes(_inverse(inverse))
    scales = (inverse * fit.scale).round().clamp(-top_scale, top_scale - 1)
    scale = (halves(d) * scales)[..., None]
    codes = _codes_for(parts, scale, (-levels, levels - 1), fit) + levels
    return d, scales, codes.to(torch.uint8)


def _codes_for(parts: Tensor, scale: Tensor, limits: tuple[int, int], fit: Fit) -> Tensor:
    """The nearest codes, [..., 256] float32. Where the stored scale is 0 no code means anything,
    and the search's stay, as in llama.cpp.
    """
    codes = (parts / torch.where(scale == 0, 1, scale)).round().clamp(*limits)
    return torch.where(scale == 0, fit.codes, codes).flatten(-2)


# ---------------------------------------------------------------- a matrix


ENCODERS = {
    "F32": lambda values: values.contiguous().view(torch.uint8),
    "F16": half_bytes,
    "BF16": lambda values: values.to(torch.bfloat16).view(torch.uint8),
    "Q8_0": encode_q8_0,
    "Q4_0": encode_q4_0,
    "Q4_1": encode_q4_1,
    "Q5_0": encode_q5_0,
    "Q5_1": encode_q5_1,
    "Q2_K": encode_q2_k,
    "Q3_K": encode_q3_k,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
}


@torch.no_grad()
def to_gguf(weight: Tensor, format: str) -> GgufWeight:
    """A matrix in one of llama.cpp's formats. weight: [N, K] floating; K a multiple of the format's
    block.

    Raises ValueError for another format, for a K that blocks do not fill, for infinity and NaN.
    """
    if format not in ENCODERS:
        refuse("format", format, ", ".join(ENCODERS))
    kind = FORMATS[format]
    if weight.dim() != 2 or weight.shape[1] % kind.values:
        accepted = f"[N, K] with K a multiple of {kind.values}, the block of {format}"
        refuse("weight's shape", list(weight.shape), accepted)
    if not torch.isfinite(weight).all():
        raise ValueError("weight: got infinity or NaN; accepted: finite numbers")
    values = weight.float().reshape(-1, kind.values)
    encode = ENCODERS[format]
    blocks = torch.cat([encode(part) for part in values.split(CHUNK // kind.values)])
    return GgufWeight(blocks.reshape(len(weight), -1), format)
