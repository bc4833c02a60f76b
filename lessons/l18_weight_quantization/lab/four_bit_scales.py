"""E2M1 codes with scales of three kinds, for blocks of 16 and of 32: what each choice of MXFP4 and
NVFP4 is worth. Computed on the matrix of the pictures; MORE.md has the table.

    python -m lessons.l18_weight_quantization.lab.four_bit_scales
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lessons.l18_weight_quantization.lab.examples import weight_with_an_outlier
from lessons.l18_weight_quantization.methods.nvfp4 import (
    LARGEST_CODE,
    SMALLEST_SCALE,
    tensor_scale_of,
)
from lessons.l18_weight_quantization.naive import grouped, nonzero, saturate, to_e2m1
from lessons.l18_weight_quantization.weights import e2m1_numbers, neighbours_packed

README = Path(__file__).parents[1] / "MORE.md"
KINDS = ("powers of two", "E4M3 and one for the matrix", "float32, not rounded")
SCALE_BITS = dict(zip(KINDS, (8, 8, 32)))
BLOCKS = (32, 16)


@dataclass(frozen=True)
class Row:
    """One kind of scales. error: ‖Ŵ − W‖ / ‖W‖."""

    scales: str
    block: int
    bits: float
    error: float


def scales_of(blocks: Tensor, kind: str) -> Tensor:
    """blocks: [N, groups, size] -> [N, groups] float32, one of KINDS."""
    largest = blocks.abs().amax(-1)
    if kind == "powers of two":  # to_mxfp4's rule
        return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - 2)
    wanted = largest / LARGEST_CODE
    if kind == "float32, not rounded":
        return nonzero(wanted)
    whole = tensor_scale_of(blocks)
    stored = saturate((wanted / whole).clamp(min=SMALLEST_SCALE), torch.float8_e4m3fn)
    return stored.float() * whole


def table(weight: Tensor) -> list[Row]:
    """weight: [N, K] float32 -> a row for each kind and each block."""
    rows = []
    for block in BLOCKS:
        blocks = grouped(weight, block)
        for kind in KINDS:
            scales = scales_of(blocks, kind)[..., None]
            codes = neighbours_packed(to_e2m1(blocks / scales).flatten(1))
            values = e2m1_numbers(codes).view_as(blocks) * scales
            error = float((values - blocks).norm() / blocks.norm())
            rows.append(Row(kind, block, 4 + SCALE_BITS[kind] / block, error))
    return rows


def line(row: Row) -> str:
    """The row as MORE.md has it."""
    names = {(32, KINDS[0]): " (MXFP4)", (16, KINDS[1]): " (NVFP4)"}
    name = row.scales + names.get((row.block, row.scales), "")
    return f"| {row.block} | {name} | {row.bits:.2f} | {row.error:.1%} |"


if __name__ == "__main__":
    for found in table(weight_with_an_outlier()):
        print(line(found))
