"""Layers of random experts in FP8, for the tests."""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import TILE
from lessons.l23_experts.lab.moe_cases import DEVICE
from lessons.l23_experts.more import naive_fp8
from lessons.l23_experts.more.fp8 import Stack
from lessons.toolbox.proof.numerics import draw


def stack(num_experts, rows, columns, seed, parts=1):
    """E4M3 numbers and scales of tiles, which differ by up to 3 times."""
    generator = torch.Generator().manual_seed(seed)
    values = draw("normal", (num_experts, parts * rows, columns), seed=seed) * 90
    tiles = num_experts, parts * -(-rows // TILE), -(-columns // TILE)
    scales = (torch.rand(tiles, generator=generator) + 0.5) * columns**-0.5 / 90
    values = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    return Stack(values.to(DEVICE), scales.to(DEVICE))


def problem(given, num_experts, size=200, inner=144, dtype=torch.bfloat16, seed=0, kind="normal"):
    """x, weights, chosen, gate_up, down. Experts that no token chose have scales of NaN."""
    weights, chosen = given
    x = draw(kind, (len(chosen), size), dtype=dtype, seed=seed + 8, device=DEVICE)
    stacks = stack(num_experts, inner, size, seed, 2), stack(num_experts, size, inner, seed + 1)
    for expert in set(range(num_experts)) - set(chosen.flatten().tolist()):
        for each in stacks:
            each.scales[expert] = float("nan")
    return x, weights, chosen, *stacks


def decoded(values, scales, dtype):
    """What codes mean: [M, K]."""
    spread = scales.to(dtype).repeat_interleave(TILE, 1)[:, : values.shape[1]]
    return values.to(dtype) * spread


def assert_rounded(found: tuple[Tensor, Tensor], x: Tensor) -> None:
    """Codes [M, K] and scales of x: [M, K] as the definition says, bit for bit; a code of NaN is
    any.
    """
    names = ("codes", "scales")
    for name, got, wanted in zip(names, found, naive_fp8.quantize_groups(x)):
        got, wanted = got.float(), wanted.float()
        assert torch.equal(got.isnan(), wanted.isnan()), f"bits of NaN in {name}"
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), f"bits of {name}"
