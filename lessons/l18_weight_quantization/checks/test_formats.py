"""Formats: what the bytes mean, held against plain loops, their code books and their true bits."""

import pytest
import torch

from lessons.l18_weight_quantization import naive, weights
from lessons.l18_weight_quantization.kernels.operands import operand_of
from lessons.l18_weight_quantization.lab.cases import numbers
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
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
    "NVFP4": (to_nvfp4, 4.5 + 32 / (512 * 1024)),
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
    """Eight positive quantiles and seven negative ones, evenly spread in probability from ½ to
    0.9677, and 0; all divided by the largest (QLoRA, section 3, in the form of bitsandbytes).
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


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_dequantized_matrix(dtype):
    x, bias = numbers(3, 64).to(dtype), torch.arange(8.0).to(dtype)
    weight = naive.round_to_nearest(numbers(8, 64), 4, 32)
    found = naive.dequantize_matmul(x, weight, bias)
    assert found.dtype == dtype
    expected = x.double() @ weight.dequantize().to(dtype).double().T + bias.double()
    assert torch.allclose(found.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.3)


def test_to_moves_every_tensor_and_nothing_else():
    weight = naive.to_nf4(numbers(4, 64))
    moved = weight.to("meta")
    assert all(x.device.type == "meta" for x in moved.tensors().values())
    assert moved.shape == weight.shape and set(moved.tensors()) == set(weight.tensors())


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
    values = torch.ones(3, 300).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [2.0], [4.0]])
    assert Float8Weight(values, scales).dequantize()[:, 0].tolist() == [1, 2, 4]
    tiles = Float8Weight(values, torch.tensor([[1.0, 2.0, 4.0]])).dequantize()
    assert tiles[0, [0, 127, 128, 256, 299]].tolist() == [1, 1, 2, 4, 4]


@pytest.mark.parametrize(
    "quantize",
    [naive.to_nf4, lambda w: naive.to_nf4(w, double_quantization=False), naive.to_mxfp4, to_nvfp4],
    ids=["nf4_double", "nf4", "mxfp4", "nvfp4"],
)
def test_a_code_book_is_copied_to_a_device_once(quantize, monkeypatch):
    """A product that copies from the CPU cannot be captured in a CUDA graph."""
    weight = quantize(torch.randn(2, 128))
    want = weight.dequantize()
    operand_of(weight)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(weight.dequantize(), want)
    operand_of(weight)
