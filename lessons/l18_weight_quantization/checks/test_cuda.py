"""Proves optimized.cu, on a CPU in the emulator; tests/test_cuda_bugs.py plants bugs in it."""

from dataclasses import replace

import pytest
import torch

from lessons.l18_weight_quantization.kernels.cuda_w4a16 import SOURCE, w4a16_cuda
from lessons.l18_weight_quantization.lab.testing import DEVICE, matrix, problem
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.kernels.compile_check import CHIPS, check_cuda
from lessons.toolbox.proof.numerics import assert_same_bits, draw, prove
from lessons.toolbox.proof.refusals import assert_message

TYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "name, shape",
    [
        ("int4, zeros", (1, 13, 192)),
        ("int4, groups of 32", (2, 4, 32)),
        ("int4, ordered", (1, 3, 4352)),  # longer than the block takes at once, by a part of a warp
    ],
)
def test_cuda_kernel(name, shape, dtype, seed, proof):
    """Outputs that fill no block, with and without zeros and a bias."""
    rows, outputs, columns = shape
    weight = matrix(name, outputs, columns, seed)
    x = draw("normal", (rows, columns), dtype=dtype, seed=seed + 1, device=DEVICE)
    bias = draw("normal", (outputs,), dtype=dtype, seed=seed + 2, device=DEVICE)
    fast, plain, tensors = problem(weight, w4a16_cuda)
    for given in (None, bias):
        proof.record(SOURCE, prove(fast, plain, (x, tensors, given)))


@pytest.mark.cuda_cpp
def test_the_cuda_kernel_reads_and_rounds_every_number_as_pytorch_does(seed):
    """One column at a time is 1 and the others 0, with every code; then results that are subnormal,
    huge, tied or no numbers.
    """
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(2, 1).view(32, 16)
    ones = torch.ones(32, 1, dtype=torch.float16, device=DEVICE)
    weight = GroupedInt(codes, ones, None, 4, 32)
    one_hot = torch.eye(32, device=DEVICE)
    for dtype in TYPES:
        assert torch.equal(w4a16_cuda(one_hot.to(dtype), weight), weight.dequantize().T.to(dtype))
    nine = GroupedInt(codes[:1] * 0 + 0x99, ones[:1], None, 4, 32)  # every number is 1
    generator = torch.Generator().manual_seed(seed)
    edges = [0.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 65519.0, 65520.0, 3e38, 1 / 3]
    edges += [float("inf"), float("-inf"), float("nan"), 1 + 2.0**-9, 1 + 3 * 2.0**-9]
    random = torch.randn(200, generator=generator) * 10.0 ** torch.randint(-8, 5, (200,))
    values = torch.cat([torch.tensor(edges), -torch.tensor(edges), random]).to(DEVICE)
    for dtype in TYPES[:2]:
        # bias is float32 here only in its values: added to a sum of 0, it is what is rounded
        half = values.to(dtype)
        x = torch.zeros(1, 32, dtype=dtype, device=DEVICE)
        many = GroupedInt(nine.codes.expand(len(half), 16).contiguous(), *nine_scales(half), 4, 32)
        out = w4a16_cuda(x, many, half)
        torch.testing.assert_close(out[0], half, atol=0, rtol=0, equal_nan=True)
        # and scale · 1 in float32, rounded to x's type
        scaled = replace(many, scales=values.half()[:, None].contiguous())
        x[0, 0] = 1 / 3
        want = (x[0, 0].float() * values.half().float()).to(dtype)
        torch.testing.assert_close(w4a16_cuda(x, scaled)[0], want, atol=0, rtol=0, equal_nan=True)


def nine_scales(like):
    return torch.ones(len(like), 1, dtype=torch.float16, device=DEVICE), None


@pytest.mark.cuda_cpp
def test_cuda_bits_do_not_depend_on_the_other_rows(seed):
    weight = matrix("int4, zeros", 6, 256, seed)
    x = draw("normal", (3, 256), dtype=torch.bfloat16, seed=seed, device=DEVICE)
    together = w4a16_cuda(x, weight)
    assert_same_bits(together[1:2], w4a16_cuda(x[1:2], weight))


@pytest.mark.compiler
def test_cuda_compiles():
    """Nothing is spilled. Codes are loaded 16 bytes at once; no code is converted by a conversion
    instruction, only the zeros (one for each of the 4 outputs of a lane, in 3 kernels).
    """
    for report in check_cuda(SOURCE.read_text(encoding="utf-8"), CHIPS, "optimized.cu"):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert not report.error and not report.spill_bytes and not report.stack_bytes, report
        assert report.registers <= 128, report  # so that 4 blocks share an SM
        assert report.loads_128bit >= 3 * 4 + 4 + 4 + 8, report  # codes, and x in each type
        conversions = sum(n for name, n in report.census.items() if name.startswith("I2F"))
        assert conversions <= 3 * (4 + 4), report


REFUSED = [
    (dict(weight="int8, zeros"), "weight: got GroupedInt of 8 bits; accepted: GroupedInt of 4"),
    (dict(weight="mxfp4"), "weight: got Mxfp4Weight; accepted: GroupedInt of 4 bits"),
    (
        dict(weight="int4, zeros, groups of 16"),
        "weight: got groups of 16; accepted: multiples of 32",
    ),
    (dict(x=torch.zeros(1, 63)), r"x: got torch.float32 \(1, 63\); accepted: \[M, 64\]"),
    (dict(x=torch.zeros(1, 64).double()), "x: got torch.float64 .*; accepted: .* in float32"),
    (dict(bias=torch.zeros(7)), r"bias: got torch.float32 \(7,\); accepted: None, or .* \[8\]"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_the_cuda_wrapper_refuses(change, message):
    weight = matrix(change.pop("weight", "int4, zeros"), 8, 64).to("cpu")
    assert_message(w4a16_cuda, dict(x=torch.zeros(1, 64), weight=weight) | change, message)


def test_the_cuda_wrapper_refuses_other_scales_and_rows():
    weight, x = matrix("int4, zeros", 8, 64).to("cpu"), torch.zeros(1, 64)
    wide = replace(weight, scales=weight.scales.float())
    assert_message(w4a16_cuda, dict(x=x, weight=wide), "weight: got torch.float32 scales; accepted")
    moved = replace(weight, codes=torch.zeros(8 * 32 + 1, dtype=torch.uint8)[1:].view(8, 32))
    assert_message(w4a16_cuda, dict(x=x, weight=moved), "codes: got rows 32 bytes apart from")
