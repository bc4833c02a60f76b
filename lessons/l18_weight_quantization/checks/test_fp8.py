"""Proves the product of FP8 with FP8, and that rows become FP8 as PyTorch rounds them."""

import pytest
import torch

from lessons.l07_kernel_fusion.epilogue import GemmTiles
from lessons.l18_weight_quantization.kernels.fp8 import (
    LARGEST,
    fp8_matmul,
    quantize_rows,
    quantize_rows_kernel,
    scaled_matmul,
    scaled_matmul_kernel,
)
from lessons.l18_weight_quantization.lab.testing import DEVICE, matrix, numbers
from lessons.l18_weight_quantization.optimized import matmul
from lessons.toolbox.measure.device import capability, interpreting
from lessons.toolbox.proof.numerics import draw, poisoned, prove
from lessons.toolbox.proof.refusals import assert_message

SMALL = GemmTiles(16, 32, 128, 4, 2)
# An A100 has no FP8 instruction.
needs_fp8 = pytest.mark.skipif(not interpreting() and capability() < (8, 9), reason="needs sm_89")


def plain_rows(x):
    largest = x.abs().amax(1).float()
    # by a tensor, because on a GPU PyTorch multiplies by 1 / LARGEST where that is a number
    scales = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(scales == 0, 1, scales)
    values = (x.float() / scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.float(), scales


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_become_fp8_as_pytorch_rounds_them(dtype, seed, proof):
    """A row of zeros, a row with one huge number, more columns than a block; nothing becomes
    NaN.
    """
    x = draw("normal", (4, 1100), dtype=dtype, seed=seed, device=DEVICE)
    x[1], x[2, 7] = 0, 30000
    values, scales = quantize_rows(x)
    want, want_scales = plain_rows(x)
    assert torch.equal(values.float(), want) and torch.equal(scales, want_scales)
    proof.record(quantize_rows_kernel)


@needs_fp8
def test_a_nan_in_x_is_a_nan_in_the_product(seed):
    """A clamp that ignores NaN would make it -448, and the row of the product would look right."""
    weight = matrix("e4m3, a scale a row", 8, 64, seed)
    x = draw("normal", (3, 64), dtype=torch.bfloat16, seed=seed, device=DEVICE)
    x[1, 5] = float("nan")
    is_nan = fp8_matmul(x, weight, tiles=SMALL).isnan()
    assert is_nan[1].all() and not is_nan[[0, 2]].any()


@needs_fp8
@pytest.mark.parametrize("name", ["e4m3, a scale a row", "e4m3, one scale", "e4m3, tiles"])
@pytest.mark.parametrize("shape", [(1, 20, 96), (17, 130, 160)])
def test_product_of_fp8_with_fp8(name, shape, seed, proof):
    """Against float64 with the numbers that both factors' codes mean: rounding x is not its error.
    A last step of 32 columns, tiles of the matrix that are not whole.
    """
    rows, outputs, columns = shape
    weight = matrix(name, outputs, columns, seed)
    exact = numbers(weight)
    x = draw("normal", (rows, columns), dtype=torch.bfloat16, seed=seed + 1, device=DEVICE)
    bias = draw("normal", (outputs,), dtype=torch.bfloat16, seed=seed + 2, device=DEVICE)

    def plain(x, bias):
        values, scales = plain_rows(x.bfloat16())
        if x.dtype == torch.float64:
            return values.double() * scales.double()[:, None] @ exact.T + bias
        w = weight.dequantize().to(x.dtype)
        return torch.nn.functional.linear((values * scales[:, None]).to(x.dtype), w, bias)

    def fast(x, bias):
        return fp8_matmul(x, weight, bias, tiles=SMALL)

    # twice the floor: on a GPU a step of 128 columns is added up in fewer bits than float32 has
    proof.record(scaled_matmul_kernel, prove(fast, plain, (x, bias), floor=2e-3))


def test_int8_is_added_up_exactly(seed):
    """Whole numbers, scales of 1: int32 sums, exact where 16 bits and float32 products would be,
    too. What lies behind a row is never read.
    """
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randint(-128, 128, (n, 160), generator=generator).to(torch.int8) for n in (3, 18))
    gap = poisoned((3, 200), torch.int8, DEVICE)
    gap[:, :160] = x.to(DEVICE)
    ones = torch.ones(18, 1, device=DEVICE)
    args = gap[:, :160], ones[:3, 0], w.to(DEVICE), ones, torch.float32
    out = scaled_matmul(*args, tiles=SMALL)
    assert torch.equal(out.cpu().double(), x.double() @ w.double().T)


@needs_fp8
def test_storing_in_fp8_is_more_exact_than_multiplying_in_it(seed):
    """`matmul` rounds the matrix alone, `fp8_matmul` x as well."""
    weight = matrix("e4m3, a scale a row", 32, 256, seed)
    x = draw("normal", (8, 256), dtype=torch.bfloat16, seed=seed, device=DEVICE)
    truth = x.double() @ numbers(weight).T
    stored, multiplied = (
        float((f(x, weight).double() - truth).norm() / truth.norm()) for f in (matmul, fp8_matmul)
    )
    assert stored < 0.01 < multiplied < 0.1


def test_fp8_matmul_refuses():
    weight, x = matrix("e5m2", 8, 64).to("cpu"), torch.zeros(1, 64)
    message = (
        "weight: got Float8Weight in torch.float8_e5m2; accepted: Float8Weight in torch.float8_"
    )
    assert_message(fp8_matmul, dict(x=x, weight=weight), message)
    whole = matrix("int4, zeros", 8, 64).to("cpu")
    assert_message(fp8_matmul, dict(x=x, weight=whole), "weight: got GroupedInt; accepted: Float8")
