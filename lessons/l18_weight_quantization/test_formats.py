"""Formats: what the bytes mean, held against plain loops, and every rounding to the nearest code."""

import math

import pytest
import torch

from lessons.l18_weight_quantization import naive, weights
from lessons.l18_weight_quantization.weights import (
    DYNAMIC_VALUES,
    E2M1_VALUES,
    NF4_VALUES,
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    pack,
    unpack,
)
from lessons.toolbox.proof.planted import with_bug

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(rows: int, columns: int) -> torch.Tensor:
    """A matrix with a few large weights. The same in every run, because ties would be rare failures."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix[:, 3] *= 6
    return matrix


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("bits, group_size", [(4, 2), (4, 6), (4, 32), (8, 1), (8, 16)])
def test_pack_and_unpack_are_a_plain_loop_and_its_inverse(bits, group_size):
    codes = torch.randint(2**bits, (3, 5, group_size), dtype=torch.uint8)
    expected = []
    for row in codes.tolist():
        stored = []
        for group in row:
            half = group_size // 2
            stored += group if bits == 8 else [group[i] + 16 * group[i + half] for i in range(half)]
        expected.append(stored)
    packed = pack(codes, bits)
    assert packed.tolist() == expected
    assert torch.equal(unpack(packed, bits, group_size), codes)


@pytest.mark.parametrize("has_zeros", [True, False])
def test_grouped_numbers_are_a_plain_loop(has_zeros):
    rows, groups, size = 3, 2, 4
    codes = torch.randint(16, (rows, groups, size), dtype=torch.uint8)
    scales = torch.rand(rows, groups).half()
    zeros = torch.randint(16, (rows, groups), dtype=torch.uint8) if has_zeros else None
    order = torch.randperm(groups * size)
    weight = GroupedInt(pack(codes, 4), scales, zeros, 4, size, order).dequantize()
    assert weight.dtype == torch.float32
    for n in range(rows):
        for place in range(groups * size):
            group, i = divmod(place, size)
            zero = int(zeros[n, group]) if has_zeros else 8
            expected = (int(codes[n, group, i]) - zero) * float(scales[n, group])
            assert float(weight[n, order[place]]) == expected


def test_neighbours_share_a_byte_as_files_have_it():
    """bitsandbytes puts the first of two values into the high half, gpt-oss into the low half."""
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[0] = 0x1F
    nf4 = Nf4Weight(codes, torch.ones(1), (1, 64)).dequantize()
    assert nf4[0, :2].tolist() == pytest.approx([NF4_VALUES[1], NF4_VALUES[15]], abs=1e-7)
    mxfp4 = Mxfp4Weight(codes[None, :16], torch.full((1, 1), 128, dtype=torch.uint8)).dequantize()
    assert mxfp4[0, :2].tolist() == [2 * E2M1_VALUES[15], 2 * E2M1_VALUES[1]]


BITS = {
    "INT8, row": (lambda w: naive.round_to_nearest(w, 8, None, True), 8 + 16 / 1024),
    "INT4 g128, symmetric": (lambda w: naive.round_to_nearest(w, symmetric=True), 4.125),
    # a zero point takes a byte here; files have it in 4 bits: 4.156
    "INT4 g128": (naive.round_to_nearest, 4 + (16 + 8) / 128),
    "INT4 g32": (lambda w: naive.round_to_nearest(w, group_size=32), 4.75),
    "FP8, row": (naive.to_float8, 8 + 32 / 1024),
    "FP8, tiles": (lambda w: naive.to_float8(w, per="block"), 8 + 32 / 128**2),
    "NF4": (lambda w: naive.to_nf4(w, double_quantization=False), 4.5),
    # 4 + 8 / 64 + 32 / (64 · 256), and one offset of 32 bits for the matrix
    "NF4, double": (naive.to_nf4, 4.126953125 + 32 / (512 * 1024)),
    "MXFP4": (naive.to_mxfp4, 4.25),
}


@pytest.mark.parametrize("name", BITS)
def test_true_bits_a_weight(name):
    quantize, bits = BITS[name]
    weight = quantize(torch.ones(512, 1024))
    assert weight.shape == (512, 1024)
    assert weight.bits_per_weight == bits
    assert torch.allclose(weight.dequantize(), torch.ones(()), atol=0.01)


# ---------------------------------------------------------------- code books


def test_nf4_is_made_of_quantiles_of_the_normal_distribution():
    """Eight positive quantiles and seven negative ones, evenly spread in probability from ½ to 0.9677,
    and 0; all divided by the largest (QLoRA, section 3, in the form of bitsandbytes).
    """
    most = 1 - 0.5 * (1 / 32 + 1 / 30)  # 0.9677083
    probabilities = torch.linspace(0.5, most, 9, dtype=torch.float64)[1:]
    positive = torch.special.ndtri(probabilities)
    negative = -torch.special.ndtri(torch.linspace(0.5, most, 8, dtype=torch.float64)[1:])
    values = torch.cat([negative.flip(0), torch.zeros(1, dtype=torch.float64), positive])
    assert torch.allclose(values / values.max(), torch.tensor(NF4_VALUES).double(), atol=2e-7)


def test_the_nested_code_book_is_finer_near_zero():
    assert DYNAMIC_VALUES.shape == (256,)
    assert (DYNAMIC_VALUES.diff() > 0).all()
    assert float(DYNAMIC_VALUES[127]) == 0 and float(DYNAMIC_VALUES[-1]) == 1
    assert float(DYNAMIC_VALUES[128]) == pytest.approx(0.55e-6)
    # a decade is cut into twice as many pieces as the one below: 64 in the last
    assert torch.allclose(DYNAMIC_VALUES[-65:-1].diff(), torch.tensor(0.9 / 64), rtol=1e-4)


# ---------------------------------------------------------------- to the nearest


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
    """Every value of the format is kept, subnormals too; ties go to even; too large becomes largest."""
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
    "one step too many": (
        "scales = (high - low) / (2**bits - 1)",
        "scales = (high - low) / 2**bits",
    ),
    "a zero point that is one off": (
        "torch.round(-low / nonzero(scales))",
        "torch.round(-low / nonzero(scales) + 1)",
    ),
    "the range without zero": ("low = groups.amin(-1).clamp(max=0)", "low = groups.amin(-1)"),
    "truncated, not rounded": ("codes = torch.round(groups", "codes = torch.trunc(groups"),
    "codes that wrap around": (
        "return codes.clamp(0, 2**bits - 1).to",
        "return codes.remainder(2**bits).to",
    ),
    "infinity for what is too large": (
        "return x.float().clamp(-most, most).to(dtype)",
        "return x.float().to(dtype)",
    ),
    "tiles that share one scale": (
        "largest = tiles.abs().amax((1, 3))",
        "largest = tiles.abs().amax().expand(tiles.shape[0], tiles.shape[2])",
    ),
    "NF4 as sixteen even steps": (
        "table = torch.tensor(NF4_VALUES",
        "table = torch.tensor([i / 7.5 - 1 for i in range(16)]",
    ),
    "NF4 with swapped nibbles": (
        "packed = codes[:, 0] << 4 | codes[:, 1]",
        "packed = codes[:, 1] << 4 | codes[:, 0]",
    ),
    "no offset before the second quantization": ("around = largest - offset", "around = largest"),
    "an exponent one too small": (".exponent - 1 - 2)", ".exponent - 1 - 3)"),
    "MXFP4 without signs": ("codes | (torch.signbit(scaled).to(torch.uint8) << 3)", "codes"),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_dequantized_matrix(dtype):
    x, bias = numbers(3, 64).to(dtype), torch.arange(8.0).to(dtype)
    weight = naive.round_to_nearest(numbers(8, 64), 4, 32)
    found = naive.dequantize_matmul(x, weight, bias)
    assert found.dtype == dtype
    expected = x.double() @ weight.dequantize().to(dtype).double().T + bias.double()
    assert torch.allclose(found.double(), expected, rtol=2e-2 if dtype != torch.float32 else 1e-5)


def test_to_moves_every_tensor_and_nothing_else():
    weight = naive.to_nf4(numbers(4, 64))
    moved = weight.to("meta")
    assert all(x.device.type == "meta" for x in moved.tensors().values())
    assert moved.shape == weight.shape and set(moved.tensors()) == set(weight.tensors())


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


def test_against_bitsandbytes(request):
    """The codes and the absmax that bitsandbytes itself computes, where it is installed."""
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: imports bitsandbytes, for seconds; --all runs it")
    functional = pytest.importorskip("bitsandbytes.functional", reason="NOT RUN: bitsandbytes")
    assert torch.equal(functional.create_dynamic_map(), weights.DYNAMIC_VALUES)
    matrix = numbers(128, 256)
    for double in (False, True):
        settings = dict(blocksize=64, quant_type="nf4", compress_statistics=double)
        codes, state = functional.quantize_4bit(matrix, **settings)
        ours = naive.to_nf4(matrix, double)
        assert torch.equal(codes.view(-1), ours.codes)
        theirs = Nf4Weight(codes.view(-1), state.absmax, (128, 256))
        if double:
            # it divides by multiplying with the reciprocal, so a few absmax codes differ by one
            apart = (state.absmax.int() - ours.absmax.int()).abs()
            assert apart.max() <= 1 and apart.sum() <= len(apart) // 20
            theirs = Nf4Weight(
                *(codes.view(-1), state.absmax, (128, 256)),
                *(state.state2.absmax, state.offset.view(1)),
            )
        assert torch.equal(theirs.dequantize(), functional.dequantize_4bit(codes, state))


def test_scales_of_one_row_and_of_tiles_are_told_apart():
    values = torch.ones(3, 300).to(E4M3)
    scales = torch.tensor([[1.0], [2.0], [4.0]])
    assert Float8Weight(values, scales).dequantize()[:, 0].tolist() == [1, 2, 4]
    tiles = Float8Weight(values, torch.tensor([[1.0, 2.0, 4.0]])).dequantize()
    assert tiles[0, [0, 127, 128, 256, 299]].tolist() == [1, 1, 2, 4, 4]
