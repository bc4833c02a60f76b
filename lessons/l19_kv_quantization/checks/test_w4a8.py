"""Proves products of codes of 8 bits with weights of 4 bits in groups."""

from dataclasses import replace

import pytest
import torch

from lessons.l09_flash_attention.tiles import has_e4m3
from lessons.l12_paged_kv.lab.testing import DEVICE
from lessons.l18_weight_quantization.naive import round_to_nearest
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.l19_kv_quantization.activations import w4a8
from lessons.l19_kv_quantization.activations.w4a8 import (
    grouped_product,
    step_of,
    w4a8_by_numbers,
    w4a8_kernel,
    w4a8_matmul,
)
from lessons.l19_kv_quantization.activations.w8a8 import quantize_tokens
from lessons.l19_kv_quantization.lab.testing import skip_where
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.inputs import apart
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug

SMALL = dict(BLOCK_M=16, BLOCK_N=32)
# inputs, group size (None: one a row), symmetric: whole steps, a tail in each group, zero points
SHAPES = {
    "groups of 128": (256, 128, True),
    "zero points": (256, 128, False),
    "groups of 64": (192, 64, True),
    "a tail in each group": (192, 96, False),
    "one scale a row": (160, None, True),
}


def operands(name, shape, tokens=21, outputs=35):
    """Codes and scales of tokens, a weight and a bias, matrices `apart`. No size is a multiple of a
    tile.
    """
    inputs, group, symmetric = SHAPES[shape]
    x = torch.randn(tokens, inputs, device=DEVICE)
    x[3] = 0
    matrix = torch.randn(outputs, inputs, device=DEVICE)
    weight = round_to_nearest(matrix, 4, group, symmetric, torch.float32)
    codes, scales = quantize_tokens(x, name)
    zeros = [] if weight.zeros is None else [weight.zeros]
    of_weight, codes, of_groups, *zeros = apart(weight.codes, codes, weight.scales, *zeros)
    weight = replace(weight, codes=of_weight, scales=of_groups, zeros=zeros[0] if zeros else None)
    return codes, scales, weight, torch.randn(outputs, device=DEVICE)


def by_hand(codes, scales, weight, bias):
    """The definition in whatever the scales are: the oracle's float64, or float32."""
    numbers = codes.to(scales.dtype) * scales
    return numbers @ weight.dequantize().to(scales.dtype).T + bias.to(scales.dtype)


def proved(module, codes, scales, weight, bias):
    """The report of a kernel, or of a wrong one, beside the definition."""

    def fast(scales, bias):
        return module.grouped_product(codes, scales, weight, bias, torch.float32, SMALL)

    def plain(scales, bias):
        return by_hand(codes, scales, weight, bias)

    with in_bounds():
        return prove(fast, plain, (scales, bias))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_multiplies_codes(name, shape, seed, proof):
    skip_where(name, has_e4m3)
    proof.record(w4a8_kernel, proved(w4a8, *operands(name, shape)))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_every_way_to_the_product(name, seed):
    """Naive and what a CPU takes: with and without a bias, with each kind of token scale, and with
    columns in another order.
    """
    x = torch.randn(17, 128, device=DEVICE)
    weight = round_to_nearest(torch.randn(24, 128, device=DEVICE), 4, 64, True)
    ordered = replace(weight, order=torch.randperm(128, device=DEVICE))
    found = torch.tensor([0.01], device=DEVICE)
    for matrix in (weight, ordered):
        for bias, x_scale in ((None, None), (torch.randn(24, device=DEVICE), found)):
            how = dict(name=name, x_scale=x_scale)
            want = w4a8_by_numbers(x, matrix, bias, **how)
            got = w4a8_matmul(x, matrix, bias, **how)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
            codes, scales = quantize_tokens(x, **how)
            if name == "int8" or has_e4m3(x.device):
                got = grouped_product(codes, scales, matrix, bias, x.dtype, SMALL)
                torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    exact = x @ weight.dequantize().T
    assert 1e-4 < (w4a8_by_numbers(x, weight, None, name) - exact).norm() / exact.norm() < 0.04


def test_by_hand():
    """Two tokens, one output, one group of two inputs: codes 127 and −64, 3 − 8 and 12 − 8."""
    weight = GroupedInt(
        torch.tensor([[3 | 12 << 4]], dtype=torch.uint8), torch.ones(1, 1), None, 4, 2
    )
    x = torch.tensor([[12.7, -6.4], [0.0, 25.4]])
    want = torch.tensor([[12.7 * -5 - 6.4 * 4], [25.4 * 4]])
    torch.testing.assert_close(w4a8_by_numbers(x, weight), want)
    # a scale of 0.1 for all tokens holds numbers up to 12.7
    want = torch.tensor([[12.7 * -5 - 6.4 * 4], [12.7 * 4]])
    torch.testing.assert_close(w4a8_by_numbers(x, weight, x_scale=torch.tensor([0.1])), want)


def test_steps():
    assert [step_of(size // 2) for size in (32, 64, 96, 128, 4096)] == [None, 32, 32, 64, 64]


WHOLE, TAIL = "groups of 128", "a tail in each group"
BUGS = [
    (WHOLE, "part.to(tl.float32) * scale[None, :]", "part.to(tl.float32)"),
    (WHOLE, "column * stride_sn + group * stride_sg", "column * stride_sn"),
    (WHOLE, "tl.join(packed & 15, packed >> 4)", "tl.join(packed >> 4, packed & 15)"),
    (
        WHOLE,
        "tl.permute(tl.join(packed & 15, packed >> 4), (0, 2, 1))",
        "tl.join(packed & 15, packed >> 4)",
    ),
    (WHOLE, "acc *= tl.load(x_scale_ptr + row,", "acc *= tl.load(x_scale_ptr + 0 * row,"),
    ("zero points", "[:, None].to(tl.int16)", "[:, None].to(tl.int16) * 0 + 8"),
    ("zero points", "group * stride_zg", "0 * stride_zg"),
    (TAIL, "(start + both % BLOCK_BYTES < GROUP_BYTES)", "(both >= 0)"),
    (
        TAIL,
        "both // BLOCK_BYTES * GROUP_BYTES + start",
        "both // BLOCK_BYTES * BLOCK_BYTES + start",
    ),
]


@pytest.mark.parametrize("shape, old, new", BUGS)
def test_a_wrong_product_is_found(shape, old, new, seed, tmp_path):
    """A group's scale left out, the first group's for all, halves swapped, neighbours in a byte,
    one scale for all tokens, zero points left out or the first group's, a tail of the next group,
    high halves that meet the inputs after the low ones.
    """
    buggy = with_bug(w4a8, tmp_path, old, new)
    with pytest.raises(NotEquivalent):
        proved(buggy, *operands("int8", shape))


def test_bad_input():
    weight = round_to_nearest(torch.randn(8, 64, device=DEVICE), 4, 32, True)
    codes, scales = quantize_tokens(torch.randn(3, 64, device=DEVICE), "int8")
    with pytest.raises(ValueError, match="group_size: got 32; accepted: 64 or more"):
        grouped_product(codes, scales, weight, None, torch.float32)
    with pytest.raises(ValueError, match="codes, weight: got '64 inputs, 8 bits'"):
        eight = round_to_nearest(torch.randn(8, 64, device=DEVICE), 8, 64, True)
        grouped_product(codes, scales, eight, None, torch.float32)
