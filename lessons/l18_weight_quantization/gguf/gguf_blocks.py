"""llama.cpp's block formats: what the bytes of a GGUF tensor mean.

    weight = GgufWeight(blocks, "Q4_K")            blocks: [N, bytes of a row] uint8
    weight.dequantize()                            [N, K] float32, as llama.cpp computes them

A row of a matrix is cut into blocks of 32 values, or super-blocks of 256. Each is a record of its
own: its scales stand beside its codes, so a block's bytes are all that it means.

All these formats pack codes by one rule, `unpack_runs`: the lowest bits of a run of bytes are the
first values, the next bits of the same bytes are the next values. So a mask or a shift of 32 bytes
in a vector register gives 32 neighbouring values. Read it first, then `decode_q4_k`.

Blocks are inside a row. So rows may be taken, reordered or split without decoding anything.
gguf_encode.py goes the other way.

Source: ggml-common.h (block_q4_K, …) and ggml-quants.c (dequantize_row_q4_K, …) of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import QuantizedWeight, table_on

SUPER = 256  # values of a super-block; the formats named _K have them
# IQ4_NL's 16 numbers: close together near zero, where most weights are
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# ---------------------------------------------------------------- packing


def unpack_runs(packed: Tensor, width: int, bits: int) -> Tensor:
    """Codes of `bits` bits out of bytes. packed: [..., bytes] uint8 -> [..., bytes · 8 / bits]
    uint8.

    Each run of `width` bytes holds 8 / bits times as many codes: first the lowest bits of all its
    bytes, then the next. Example: width 2, bits 4, bytes 0x21 0x43 -> 1, 3, 2, 4.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    runs = packed.unflatten(-1, (-1, 1, width)) >> shifts[:, None]  # [..., runs, 8 / bits, width]
    return (runs & 2**bits - 1).flatten(-3)


def pack_runs(codes: Tensor, width: int, bits: int) -> Tensor:
    """The inverse of `unpack_runs`: [..., codes] uint8 -> [..., codes · bits / 8] uint8. Bits above
    the lowest `bits` of a code are ignored.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    runs = codes.unflatten(-1, (-1, 8 // bits, width)) & 2**bits - 1
    # a sum is an "or" here, because the shifted codes have no bit in common
    return (runs << shifts[:, None]).sum(-2, dtype=torch.uint8).flatten(-2)


def unpack_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of 8 sub-blocks of Q4_K and Q5_K. packed: [..., 12] uint8 ->
    [..., 8] uint8 each.

    Bytes 0–3 hold scales 0–3, bytes 4–7 minima 0–3, each with two bits to spare. Scales and minima
    4–7 have their low four bits in bytes 8–11 and their high two in what was spare.
    """
    scales, minima, low = packed.split(4, dim=-1)
    return (
        torch.cat([scales & 63, (low & 15) | (scales >> 6) << 4], dim=-1),
        torch.cat([minima & 63, (low >> 4) | (minima >> 6) << 4], dim=-1),
    )


def pack_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """The inverse of `unpack_scales`. Both: [..., 8] uint8, below 64 -> [..., 12] uint8."""
    first, later = scales.split(4, dim=-1)
    first_min, later_min = minima.split(4, dim=-1)
    spare, spare_min = (later >> 4) << 6, (later_min >> 4) << 6
    low = (later & 15) | (later_min & 15) << 4
    return torch.cat([first | spare, first_min | spare_min, low], dim=-1)


def halves(field: Tensor) -> Tensor:
    """float16 numbers as float32. field: [..., 2 · count] uint8 -> [..., count]."""
    return field.contiguous().view(torch.float16).float()


def half_bytes(numbers: Tensor) -> Tensor:
    """The inverse of `halves`, rounding: [..., count] float32 -> [..., 2 · count] uint8."""
    return numbers.to(torch.float16).contiguous().view(torch.uint8)


# ---------------------------------------------------------------- blocks of 32


def decode_q8_0(blocks: Tensor) -> Tensor:
    """[..., 34] uint8 -> [..., 32]: d · q. Bytes: d (2), q as int8 (32)."""
    d, codes = blocks.split([2, 32], dim=-1)
    return codes.contiguous().view(torch.int8) * halves(d)


def decode_q4_0(blocks: Tensor) -> Tensor:
    """[..., 18] uint8 -> [..., 32]: d · (q − 8). Bytes: d (2), q (16)."""
    d, codes = blocks.split([2, 16], dim=-1)
    return halves(d) * (unpack_runs(codes, 16, 4).float() - 8)


def decode_q4_1(blocks: Tensor) -> Tensor:
    """[..., 20] uint8 -> [..., 32]: d · q + m. Bytes: d (2), m (2), q (16)."""
    scale, codes = blocks.split([4, 16], dim=-1)
    d, m = halves(scale).split(1, dim=-1)
    return d * unpack_runs(codes, 16, 4).float() + m


def decode_q5_0(blocks: Tensor) -> Tensor:
    """[..., 22] uint8 -> [..., 32]: d · (q − 16). Bytes: d (2), the fifth bits of q (4), its low
    bits (16).
    """
    d, high, low = blocks.split([2, 4, 16], dim=-1)
    codes = unpack_runs(low, 16, 4) | unpack_runs(high, 1, 1) << 4
    return halves(d) * (codes.float() - 16)


def decode_q5_1(blocks: Tensor) -> Tensor:
    """[..., 24] uint8 -> [..., 32]: d · q + m. Bytes: d (2), m (2), the fifth bits of q (4), its
    low bits (16).
    """
    scale, high, low = blocks.split([4, 4, 16], dim=-1)
    d, m = halves(scale).split(1, dim=-1)
    codes = unpack_runs(low, 16, 4) | unpack_runs(high, 1, 1) << 4
    return d * codes.float() + m


def decode_iq4_nl(blocks: Tensor) -> Tensor:
    """[..., 18] uint8 -> [..., 32]: d · IQ4_NL_VALUES[q]. Bytes: d (2), q (16)."""
    d, codes = blocks.split([2, 16], dim=-1)
    return halves(d) * table_on(IQ4_NL_VALUES, blocks.device)[unpack_runs(codes, 16, 4).long()]


# ---------------------------------------------------------------- super-blocks of 256


def decode_q4_k(blocks: Tensor) -> Tensor:
    """[..., 144] uint8 -> [..., 256]: (d · scale) · q − (dmin · minimum), 8 sub-blocks of 32.
    Bytes: d (2), dmin (2), scales and minima (12), q (128).
    """
    tops, packed, codes = blocks.split([4, 12, 128], dim=-1)
    return _from_minimum(tops, *unpack_scales(packed), unpack_runs(codes, 32, 4))


def decode_q5_k(blocks: Tensor) -> Tensor:
    """[..., 176] uint8 -> [..., 256]: As Q4_K. Bytes: d (2), dmin (2), scales and minima (12), the
    fifth bits of q (32), its low bits (128).
    """
    tops, packed, high, low = blocks.split([4, 12, 32, 128], dim=-1)
    codes = unpack_runs(low, 32, 4) | unpack_runs(high, 32, 1) << 4
    return _from_minimum(tops, *unpack_scales(packed), codes)


def decode_q2_k(blocks: Tensor) -> Tensor:
    """[..., 84] uint8 -> [..., 256]: As Q4_K, but 16 sub-blocks of 16. Bytes: scale and minimum of
    a sub-block (16), q (64), d (2), dmin (2).
    """
    packed, codes, tops = blocks.split([16, 64, 4], dim=-1)
    return _from_minimum(tops, packed & 15, packed >> 4, unpack_runs(codes, 32, 2))


def decode_q6_k(blocks: Tensor) -> Tensor:
    """[..., 210] uint8 -> [..., 256]: (d · scale) · (q − 32), 16 sub-blocks of 16. Bytes: the low
    four bits of q (128), its high two (64), scales as int8 (16), d (2).
    """
    low, high, scales, d = blocks.split([128, 64, 16, 2], dim=-1)
    codes = unpack_runs(low, 64, 4) | unpack_runs(high, 32, 2) << 4
    return _symmetric(halves(d), scales.contiguous().view(torch.int8).float(), codes.float() - 32)


def decode_q3_k(blocks: Tensor) -> Tensor:
    """[..., 110] uint8 -> [..., 256]: (d · (scale − 32)) · (q − 4), 16 sub-blocks of 16. Bytes: the
    third bits of q (32), its low two (64), 6-bit scales (12), d (2).
    """
    high, low, packed, d = blocks.split([32, 64, 12, 2], dim=-1)
    codes = unpack_runs(low, 32, 2) | unpack_runs(high, 32, 1) << 2
    low_scales, high_scales = packed.split([8, 4], dim=-1)
    scales = unpack_runs(low_scales, 8, 4) | unpack_runs(high_scales, 4, 2) << 4
    return _symmetric(halves(d), scales.float() - 32, codes.float() - 4)


def _from_minimum(tops: Tensor, scales: Tensor, minima: Tensor, codes: Tensor) -> Tensor:
    """tops: [..., 4] uint8, d and dmin; scales, minima: [..., sub-blocks]; codes: [..., 256] ->
    [..., 256] float32.
    """
    d, dmin = halves(tops).split(1, dim=-1)
    parts = codes.unflatten(-1, (scales.shape[-1], -1)).float()
    # in llama.cpp's order of products, because others round differently
    return ((d * scales)[..., None] * parts - (dmin * minima)[..., None]).flatten(-2)


def _symmetric(d: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
    """d: [..., 1], scales: [..., 16], codes: [..., 256], all float32 -> [..., 256]."""
    return ((d * scales)[..., None] * codes.unflatten(-1, (16, -1))).flatten(-2)


# ---------------------------------------------------------------- the formats


class BlockFormat(NamedTuple):
    """One type of tensor. number: in a file. decode: [..., bytes] uint8 -> [..., values]."""

    number: int
    values: int
    bytes: int
    decode: Callable[[Tensor], Tensor]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.values


def _decode_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def decode(blocks: Tensor) -> Tensor:
        return blocks.contiguous().view(dtype).float()

    return decode


# unquantized, each value a block of its own
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMATS = {
    "F32": BlockFormat(0, 1, 4, _decode_as(torch.float32)),
    "F16": BlockFormat(1, 1, 2, _decode_as(torch.float16)),
    "BF16": BlockFormat(30, 1, 2, _decode_as(torch.bfloat16)),
    "Q8_0": BlockFormat(8, 32, 34, decode_q8_0),
    "Q4_0": BlockFormat(2, 32, 18, decode_q4_0),
    "Q4_1": BlockFormat(3, 32, 20, decode_q4_1),
    "Q5_0": BlockFormat(6, 32, 22, decode_q5_0),
    "Q5_1": BlockFormat(7, 32, 24, decode_q5_1),
    "IQ4_NL": BlockFormat(20, 32, 18, decode_iq4_nl),
    "Q2_K": BlockFormat(10, SUPER, 84, decode_q2_k),
    "Q3_K": BlockFormat(11, SUPER, 110, decode_q3_k),
    "Q4_K": BlockFormat(12, SUPER, 144, decode_q4_k),
    "Q5_K": BlockFormat(13, SUPER, 176, decode_q5_k),
    "Q6_K": BlockFormat(14, SUPER, 210, decode_q6_k),
}


@dataclass(frozen=True)
class GgufWeight(QuantizedWeight):
    """A matrix in one of llama.cpp's formats, byte by byte as the file holds it.

    blocks: [N, bytes of a row] uint8. format: a key of FORMATS.
    """

    blocks: Tensor
    format: str

    @property
    def shape(self) -> tuple[int, int]:
        kind = FORMATS[self.format]
        return self.blocks.shape[0], self.blocks.shape[1] // kind.bytes * kind.values

    def dequantize(self) -> Tensor:
        kind = FORMATS[self.format]
        return kind.decode(self.blocks.unflatten(1, (-1, kind.bytes))).flatten(1)

    def rows(self, which: Tensor | slice) -> "GgufWeight":
        """Some rows of the matrix. which: their numbers [rows], or a slice. Nothing is decoded."""
        return GgufWeight(self.blocks[which], self.format)
