"""Naive: every number gets the nearest code of its format, every group its own scale, and wrong
versions show.
"""

import math

import pytest
import torch

from lessons.l18_weight_quantization import naive
from lessons.l18_weight_quantization.lab.cases import numbers
from lessons.l18_weight_quantization.weights import DYNAMIC_VALUES, E2M1_VALUES, NF4_VALUES
from lessons.toolbox.proof.planted import with_bug

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def check_whole_numbers(naive):
    """Within its range every number gets the nearest of all codes, and each group its own scale."""
    both_signs = numbers(4, 64)
    both_signs[0, 16:18] = torch.tensor([7.5, -7.5])  # with 4 bits both ends lie between two codes
    for matrix in (both_signs, both_signs.abs() + 1):
        for bits in (4, 8):
            for symmetric in (True, False):
                check_whole_number(naive, matrix.unflatten(1, (-1, 16)), bits, symmetric)


def check_whole_number(naive, groups, bits, symmetric):
    found = naive.round_to_nearest(groups.flatten(1), bits, 16, symmetric)
    zeros = 2 ** (bits - 1) if symmetric else found.zeros[..., None].double()
    scales = found.scales.double()
    levels = (torch.arange(2**bits)[:, None, None, None] - zeros) * scales[..., None]
    best = (levels - groups).abs().amin(0)  # levels: [codes, N, groups, 1]
    error = (found.dequantize().view_as(groups) - groups).abs()
    assert torch.allclose(error.double(), best, atol=1e-6)
    # the range ends where the largest numbers are, up to half a step and float16's rounding
    assert (best.amax(-1) <= 0.52 * scales).all()
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    width = 2 * groups.abs().amax(-1) if symmetric else high - low
    steps = 2**bits - (2 if symmetric else 1)
    assert torch.allclose(scales, width.double() / steps, rtol=1e-3)


def check_zero_is_zero(naive):
    """0.0 has a code of its own in every scheme, also where all numbers have one sign."""
    positive = numbers(2, 32).abs() + 1
    positive[0, 5] = positive[1, 20] = 0
    for matrix in (positive, -positive):
        for symmetric in (True, False):
            found = naive.round_to_nearest(matrix, 4, 8, symmetric).dequantize()
            assert found[0, 5] == 0 and found[1, 20] == 0
    assert not naive.round_to_nearest(torch.zeros(2, 8), 4, 8).dequantize().any()
    assert not naive.to_nf4(torch.zeros(2, 64)).dequantize().any()
    assert not naive.to_mxfp4(torch.zeros(2, 32)).dequantize().any()
    assert not naive.to_float8(torch.zeros(2, 32)).dequantize().any()
    assert naive.round_to_nearest(torch.full((1, 8), 1e-30), 4, 8).dequantize().isfinite().all()


def float8_values(dtype) -> torch.Tensor:
    """The finite non-negative values of an 8-bit float, from its definition: ascending, by code."""
    mantissa, bias, codes = (3, 7, 127) if dtype == E4M3 else (2, 15, 124)
    values = []
    for code in range(codes):
        exponent, fraction = divmod(code, 2**mantissa)
        one = 0 if exponent == 0 else 1  # exponent 0: subnormal
        values.append((one + fraction / 2**mantissa) * 2.0 ** (max(exponent, 1) - bias))
    return torch.tensor(values)


def check_float8(naive):
    """Every value of the format is kept, subnormals too; ties go to even; too large becomes
    largest.
    """
    for dtype in (E4M3, E5M2):
        values = float8_values(dtype)
        most = float(values[-1])
        assert most == torch.finfo(dtype).max == (448 if dtype == E4M3 else 57344)
        assert torch.equal(naive.saturate(values, dtype).float(), values)
        middles = (values[:-1] + values[1:]) / 2
        even = torch.arange(len(middles)) % 2 == 0  # the lower neighbour's code
        expected = torch.where(even, values[:-1], values[1:])
        assert torch.equal(naive.saturate(middles, dtype).float(), expected)
        beyond = torch.tensor([1.001, 1.2, 100, 1e9, math.inf]) * most
        assert torch.equal(naive.saturate(beyond, dtype).float(), torch.full((5,), most))
        assert torch.equal(naive.saturate(-beyond, dtype).float(), torch.full((5,), -most))


def check_float8_scales(naive):
    """The largest value of each row, tile or matrix becomes the format's largest."""
    matrix = numbers(130, 257)
    matrix[:128, :128] *= 1e-5
    for per, shape in (("tensor", (1, 1)), ("row", (130, 1)), ("block", (2, 3))):
        found = naive.to_float8(matrix, E4M3, per)
        assert found.scales.shape == shape
        for i in (0, 129):
            for j in (0, 128, 256):
                rows, columns = {
                    "tensor": (slice(None), slice(None)),
                    "row": (i, slice(None)),
                    "block": (
                        slice(i // 128 * 128, i // 128 * 128 + 128),
                        slice(j // 128 * 128, j // 128 * 128 + 128),
                    ),
                }[per]
                scale = float(matrix[rows, columns].abs().max()) / 448
                error = abs(float(found.dequantize()[i, j] - matrix[i, j]))
                # half of the last of three bits, or of the smallest subnormal
                assert error <= max(abs(float(matrix[i, j])) / 16, scale / 1024) * 1.0001


def check_nf4(naive):
    matrix = numbers(6, 64)
    found = naive.to_nf4(matrix, double_quantization=False)
    blocks = matrix.view(-1, 64)
    assert torch.equal(found.block_absmax(), blocks.abs().amax(1))
    levels = torch.tensor(NF4_VALUES).double()[:, None, None] * found.absmax[:, None].double()
    best = (levels - blocks).abs().amin(0)
    error = (found.dequantize() - matrix).view(-1, 64).abs()
    assert torch.allclose(error.double(), best, atol=1e-6)


def check_double_quantization(naive):
    """The same codes, and every absmax within half a gap of the nested code book."""
    matrix = numbers(300, 128)  # 600 blocks: the third run of 256 is not full
    once, twice = (naive.to_nf4(matrix, double) for double in (False, True))
    assert torch.equal(once.codes, twice.codes)
    assert twice.absmax.dtype == torch.uint8 and twice.nested_absmax.shape == (3,)
    mean = once.absmax.mean()
    for run in range(3):
        exact, found = (x.block_absmax()[256 * run : 256 * run + 256] for x in (once, twice))
        largest = (exact - mean).abs().max()
        assert (found - exact).abs().max() <= largest * DYNAMIC_VALUES.diff().max() / 2 + 1e-6


def check_mxfp4(naive):
    """The exponent of the specification, and the nearest value; between 6 and 8 there is none."""
    matrix = numbers(3, 64)
    matrix[0, 0], matrix[1, :32], matrix[2, 1] = 7.9, 0.0, -3.0
    found = naive.to_mxfp4(matrix)
    for row, blocks in enumerate(matrix.view(3, 2, 32)):
        for block, values in enumerate(blocks):
            largest = float(values.abs().max())
            power = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else None
            got = found.dequantize()[row, 32 * block : 32 * block + 32]
            if power is None:
                assert not got.any()
                continue
            assert int(found.exponents[row, block]) == math.log2(power) + 127
            levels = torch.tensor(E2M1_VALUES)[:, None] * power
            assert torch.equal((got - values).abs(), (levels - values).abs().amin(0))
    assert float(found.dequantize()[0, 0]) == 6 and float(found.dequantize()[2, 1]) == -3
    tiny = naive.to_mxfp4(torch.full((1, 32), 1e-40))
    assert tiny.dequantize().isfinite().all()


CHECKS = (
    *(check_whole_numbers, check_zero_is_zero, check_float8, check_float8_scales),
    *(check_nf4, check_double_quantization, check_mxfp4),
)


@pytest.mark.parametrize("check", CHECKS)
def test_naive(check):
    check(naive)


BUGS = {
    "a scale for the whole row": (
        "stored = stored_scales(scales, ",
        "stored = stored_scales(scales.amax(1, keepdim=True).expand_as(scales), ",
    ),
    "one step too many": ("scales = (high - low) / last", "scales = (high - low) / (last + 1)"),
    "a zero point that is one off": (
        "zeros = torch.round(-low / nonzero(scales))",
        "zeros = torch.round(-low / nonzero(scales)) + 1",
    ),
    "the range without zero": ("low = groups.amin(-1).clamp(max=0)", "low = groups.amin(-1)"),
    "truncated, not rounded": ("steps = torch.round(groups", "steps = torch.trunc(groups"),
    "codes that wrap around": ("(steps + middle).clamp(0, last)", "(steps + middle) % (last + 1)"),
    "infinity for what is too large": ("x.float().clamp(-most, most).to(dtype)", "x.to(dtype)"),
    "tiles that share one scale": (
        "return tiles.amax((1, 3))",
        "return tiles.amax((1, 3)).amax().expand(tiles.shape[::2])",
    ),
    "NF4 as sixteen even steps": (
        "table = torch.tensor(NF4_VALUES",
        "table = torch.tensor([i / 7.5 - 1 for i in range(16)]",
    ),
    "NF4 with swapped nibbles": ("packed = first << 4 | second", "packed = second << 4 | first"),
    "no offset before the second quantization": ("around = largest - offset", "around = largest"),
    "an exponent one too small": (".exponent - 1 - 2", ".exponent - 1 - 3"),
    "MXFP4 without signs": ("| signs << 3", ""),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_versions_are_rejected(name, tmp_path):
    wrong = with_bug(naive, tmp_path, *BUGS[name])
    with pytest.raises(AssertionError):
        for check in CHECKS:
            check(wrong)


# ---------------------------------------------------------------- the rest


def test_one_scale_for_the_matrix_suffers_from_one_weight():
    matrix = numbers(16, 64)
    matrix[0, 0] = 100
    coarse, fine = naive.per_tensor(matrix, 8), naive.round_to_nearest(matrix, 8, None, True)
    assert len(coarse.scales.unique()) == 1 and len(fine.scales.unique()) > 10
    errors = [float((weight.dequantize() - matrix)[1:].norm()) for weight in (coarse, fine)]
    assert errors[0] > 10 * errors[1]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda w: naive.round_to_nearest(w, 3), "bits: got 3; accepted: 4 or 8"),
        (lambda w: naive.round_to_nearest(w, 4, 48), "group_size: got 48; accepted: a divisor of"),
        (
            lambda w: naive.round_to_nearest(w[:, :63], 4, 21),
            "group_size: got 21; accepted: an even",
        ),
        (
            lambda w: naive.round_to_nearest(w[0]),
            r"weight: got \(64,\); accepted: a matrix, \[N, K\]",
        ),
        (
            lambda w: naive.to_float8(w, torch.float16),
            "dtype: got torch.float16; accepted: torch.fl",
        ),
        (
            lambda w: naive.to_float8(w, per="column"),
            'per: got \'column\'; accepted: "tensor", "row"',
        ),
        (lambda w: naive.to_nf4(w[:3, :30]), r"weight: got \(3, 30\); accepted: .* multiple of 64"),
        (
            lambda w: naive.to_mxfp4(w[:, :40]),
            r"weight: got \(4, 40\); accepted: .* multiple of 32",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(numbers(4, 64))
