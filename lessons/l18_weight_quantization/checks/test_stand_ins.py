"""Proves what stands for the kernels on a CPU, and that a wrong reading of a format is rejected."""

from dataclasses import replace

import pytest
import torch

from lessons.l18_weight_quantization.kernels import stand_ins
from lessons.l18_weight_quantization.lab.testing import FORMATS, matrix, numbers, problem
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.optimized import matmul
from lessons.l18_weight_quantization.weights import GroupedInt, unpack
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove
from lessons.toolbox.proof.refusals import assert_message

PACKED = {"int4, groups of 32", "int4, groups of 128", "int4, zeros", "int4, ordered"}
PACKED |= {"int8, a scale a row", "int4, a scale a row"}  # of 256 columns: one group of 256


# PyTorch's products round three times more than the naive one: shifts and scales to bfloat16, 2^-9
# of them at most, and the sum before the bias is added.
FLOORS = {torch.float32: None, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("name", FORMATS)
def test_stand_in_for_every_format(name, seed):
    weight = matrix(name, 48, 256, seed).to("cpu")
    assert (stand_ins.product_for(weight) is not None) == (name in PACKED)
    fast, plain, tensors = problem(weight, stand_ins.matmul)
    for dtype, floor in FLOORS.items():
        bias = draw("normal", (48,), dtype=dtype, seed=seed + 2)
        for rows in (1, 5, stand_ins.MOST_ROWS + 1):
            x = draw("normal", (rows, 256), dtype=dtype, seed=seed + 1)
            prove(fast, plain, (x, tensors, bias), tile_rows=16, floor=floor)


def test_the_packed_copy_goes_with_the_matrix():
    weight = matrix("int4, zeros", 16, 64).to("cpu")
    before = len(stand_ins._packed)
    stand_ins.matmul(torch.zeros(1, 64, dtype=torch.bfloat16), weight)
    assert len(stand_ins._packed) == before + 1
    del weight
    assert len(stand_ins._packed) == before


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_agrees_with_the_definition(name, seed):
    """number by number, in float64; one rounding of a product apart."""
    weight = matrix(name, 5, 256, seed)
    torch.testing.assert_close(weight.dequantize().double(), numbers(weight), rtol=2e-7, atol=0)


# ---------------------------------------------------------------- wrong readings


def misread(weight: GroupedInt, slip: str) -> torch.Tensor:
    """GroupedInt.dequantize with a slip -> [N, K]."""
    codes, zeros, scales = weight.codes, weight.zeros[..., None].float(), weight.scales.float()
    if slip == "nibbles swapped":
        codes = codes << 4 | codes >> 4
    codes = unpack(codes, 4, weight.group_size).float()
    if slip == "neighbours in a byte":
        codes = codes.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    if slip == "zero point off by one":
        zeros = zeros + 1
    if slip == "no zero point":
        zeros = torch.full_like(zeros, 8)
    if slip == "one scale for the row":
        scales = scales.mean(1, keepdim=True).expand_as(scales)
    if slip == "the next group's scale":
        scales = scales.roll(1, dims=1)
    if slip == "scales 1 % off":
        scales = scales * 1.01
    stored = ((codes - zeros) * scales[..., None]).flatten(1)
    if slip == "order ignored":
        return stored
    if slip == "order the other way round":
        return stored[:, weight.order]
    return torch.empty_like(stored).index_copy_(1, weight.order, stored)


SLIPS = [
    "nibbles swapped",
    "neighbours in a byte",
    "zero point off by one",
    "no zero point",
    "one scale for the row",
    "the next group's scale",
    "scales 1 % off",
    "order ignored",
    "order the other way round",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_reading_is_rejected(slip, dtype, seed):
    weight = matrix("int4, ordered", 33, 256, seed).to("cpu")
    x = draw("normal", (9, 256), dtype=dtype, seed=seed)

    def product(with_slip):
        return lambda x, given, bias: x @ misread(given, with_slip).to(x.dtype).T

    for with_slip in ("none", slip):
        fast, plain, tensors = problem(weight, product(with_slip))
        if with_slip == "none":
            prove(fast, plain, (x, tensors, None))
        else:
            with pytest.raises(NotEquivalent):
                prove(fast, plain, (x, tensors, None))


# ---------------------------------------------------------------- bad input

REFUSED = [
    (dict(x=torch.zeros(2, 65)), r"x: got torch.float32 \(2, 65\); accepted: \[M, 64\] in float32"),
    (dict(x=torch.zeros(64)), r"x: got torch.float32 \(64,\); accepted: \[M, 64\]"),
    (dict(x=torch.zeros(2, 64, dtype=torch.int8)), "x: got torch.int8 .*; accepted"),
    (
        dict(bias=torch.zeros(8).half()),
        r"bias: got torch.float16 \(8,\); accepted: None, or torch.f",
    ),
    (dict(bias=torch.zeros(1, 8)), r"bias: got torch.float32 \(1, 8\); accepted"),
    (dict(x=torch.zeros(2, 64, device="meta")), "x, codes, scales.*: got .*; accepted: one device"),
]


@pytest.mark.parametrize("change, message", REFUSED)
@pytest.mark.parametrize("function", [matmul, stand_ins.matmul])
def test_a_product_refuses(function, change, message):
    weight = matrix("int4, zeros", 8, 64).to("cpu")
    assert_message(function, dict(x=torch.zeros(2, 64), weight=weight) | change, message)


def test_no_row_is_no_work():
    weight = matrix("int4, zeros", 8, 64).to("cpu")
    for function in (matmul, stand_ins.matmul, dequantize_matmul):
        assert function(torch.zeros(0, 64), weight).shape == (0, 8)
    assert replace(weight).shape == (8, 64)
