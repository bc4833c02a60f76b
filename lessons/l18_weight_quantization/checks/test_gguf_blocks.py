"""Proves that blocks mean what llama.cpp's package says they mean, bit for bit, and that what is
written into them are the bytes that llama.cpp writes.
"""

import ctypes
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lessons.l18_weight_quantization.gguf import gguf_blocks, gguf_encode
from lessons.l18_weight_quantization.gguf.gguf_blocks import (
    FLOATS,
    FORMATS,
    GgufWeight,
    half_bytes,
    halves,
    pack_runs,
    pack_scales,
    unpack_runs,
    unpack_scales,
)
from lessons.l18_weight_quantization.gguf.gguf_encode import ENCODERS, to_gguf
from lessons.l18_weight_quantization.gguf.gguf_search import fit_with_minimum, half_flat

K_FORMATS = [name for name in ENCODERS if name.endswith("_K")]
# Of llama.cpp's own functions (quantize_row_q4_K_ref, …, as in llama-cpp-python 0.3.36), compiled
# with -O2 -ffp-contract=off, on `numbers`: the first 16 digits of the bytes' SHA-256.
WRITTEN_BY_LLAMA_CPP = {
    "Q2_K": "787bfc4d489d4bd0",
    "Q3_K": "399bed09d3617ea1",
    "Q4_K": "a0e0d688b5c1a87d",
    "Q5_K": "729f62d9625a915e",
    "Q6_K": "dfe39b69905447ff",
}


def numbers() -> Tensor:
    """16 super-blocks, the same on every machine: zeros, constants, one sign, half zeros, many
    scales.
    """
    x = ((torch.arange(16 * 256) * 7919) % 2003 - 1001).float().reshape(16, 256) / 700
    x[0], x[1], x[2] = 0, 1, -1
    x[3], x[4] = x[3].abs(), -x[4].abs()
    x[5, :128] = 0
    return x * 2.0 ** (torch.arange(16)[:, None] - 8)


def random_bytes(format: str) -> Tensor:
    """[7, 5 blocks] of a format: every code and scale, NaN and infinity as well."""
    return torch.randint(0, 256, (7, 5 * FORMATS[format].bytes), dtype=torch.uint8)


# ---------------------------------------------------------------- packing


def test_runs_by_hand():
    """Two bytes, 0x21 and 0x43: first their low halves, then their high ones."""
    packed = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    assert unpack_runs(packed, width=2, bits=4).tolist() == [1, 3, 2, 4]
    assert unpack_runs(packed, width=1, bits=4).tolist() == [1, 2, 3, 4]
    assert unpack_runs(packed[:1], width=1, bits=2).tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 4, 16, 32])
def test_packing_is_undone(width, bits, seed):
    packed = torch.randint(0, 256, (3, 2 * width), dtype=torch.uint8)
    codes = unpack_runs(packed, width, bits)
    assert codes.shape == (3, 2 * width * 8 // bits) and int(codes.max()) < 2**bits
    assert torch.equal(pack_runs(codes, width, bits), packed)
    # upper bits belong to another field, and are ignored
    assert torch.equal(pack_runs(codes + 2**bits, width, bits), packed)


def test_scales_share_bytes(seed):
    """12 bytes hold 16 numbers of 6 bits, whichever way they are read."""
    packed = torch.randint(0, 256, (99, 12), dtype=torch.uint8)
    scales, minima = unpack_scales(packed)
    assert int(scales.max()) < 64 and int(minima.max()) < 64
    assert torch.equal(pack_scales(scales, minima), packed)
    one = torch.zeros(8, dtype=torch.uint8)
    one[5] = 35  # 0b10_0011: the high two bits in byte 1, the low four in byte 9
    assert pack_scales(one, one * 0).tolist() == [0, 0b10 << 6, *[0] * 7, 0b0011, 0, 0]


def test_a_q4_k_super_block_by_hand():
    """The lesson's example: value 0 has q = 5, scale 3, minimum 2; value 161 is the second one of
    sub-block 5, with q = 9, scale 35, minimum 0.
    """
    scales, minima, codes = (torch.zeros(n, dtype=torch.uint8) for n in (8, 8, 256))
    scales[0], minima[0], scales[5], codes[0], codes[161] = 3, 2, 35, 5, 9
    tops = half_bytes(torch.tensor([0.5, 0.25]))
    block = torch.cat([tops, pack_scales(scales, minima), pack_runs(codes, 32, 4)])
    assert block.nonzero().flatten().tolist() == [1, 3, 4, 5, 8, 13, 16, 16 + 65]
    assert block[[1, 3, 4, 5, 8, 13, 16, 81]].tolist() == [0x38, 0x34, 3, 0x80, 2, 3, 5, 0x90]
    values = GgufWeight(block[None], "Q4_K").dequantize()[0]
    assert values[0] == 0.5 * 3 * 5 - 0.25 * 2 == 7.0
    assert values[161] == 0.5 * 35 * 9 == 157.5 and values[1] == -0.5


# ---------------------------------------------------------------- bytes -> numbers


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_mean_what_the_gguf_package_says(format, seed):
    gguf = pytest.importorskip("gguf")
    kind, number = FORMATS[format], gguf.GGMLQuantizationType[format]
    assert (kind.values, kind.bytes) == gguf.GGML_QUANT_SIZES[number] and kind.number == number
    raw = random_bytes(format)
    expected = torch.from_numpy(gguf.dequantize(raw.numpy(), number))
    found = GgufWeight(raw, format)
    assert found.shape == expected.shape == (7, 5 * kind.values)
    torch.testing.assert_close(found.dequantize(), expected, rtol=0, atol=0, equal_nan=True)


def decode_with_neighbours(blocks: Tensor) -> Tensor:
    """Q4_0 as if a byte's halves were neighbours."""
    d, codes = blocks.split([2, 16], dim=-1)
    return halves(d) * (unpack_runs(codes, 1, 4).float() - 8)


def decode_adding_minimum(blocks: Tensor) -> Tensor:
    """Q4_K with the minimum added."""
    tops, packed, codes = blocks.split([4, 12, 128], dim=-1)
    scales, minima = unpack_scales(packed)
    d, dmin = halves(tops).split(1, dim=-1)
    parts = unpack_runs(codes, 32, 4).unflatten(-1, (8, 32)).float()
    return ((d * scales)[..., None] * parts + (dmin * minima)[..., None]).flatten(-2)


def decode_fewer_scale_bits(blocks: Tensor) -> Tensor:
    """Q4_K without the high bits of scales 4 to 7."""
    packed = blocks.clone()
    packed[..., 4:12] &= 63
    return gguf_blocks.decode_q4_k(packed)


def decode_unsigned_scales(blocks: Tensor) -> Tensor:
    """Q6_K with scales from 0 to 255."""
    low, high, scales, d = blocks.split([128, 64, 16, 2], dim=-1)
    codes = unpack_runs(low, 64, 4) | unpack_runs(high, 32, 2) << 4
    parts = codes.unflatten(-1, (16, 16)).float() - 32
    return ((halves(d) * scales)[..., None] * parts).flatten(-2)


def decode_zero_at_seven(blocks: Tensor) -> Tensor:
    """Q4_0 with its zero off by one."""
    return gguf_blocks.decode_q4_0(blocks) + halves(blocks[..., :2])


WRONG = {
    decode_with_neighbours: "Q4_0",
    decode_zero_at_seven: "Q4_0",
    decode_adding_minimum: "Q4_K",
    decode_fewer_scale_bits: "Q4_K",
    decode_unsigned_scales: "Q6_K",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_noticed(wrong, seed, monkeypatch):
    """Each of these is a reading that somebody has published. All of them fail on 35 random blocks:
    that none of their scales or codes shows it has a probability below 1e-9.
    """
    pytest.importorskip("gguf")
    format = WRONG[wrong]
    monkeypatch.setitem(FORMATS, format, FORMATS[format]._replace(decode=wrong))
    with pytest.raises(AssertionError):
        test_blocks_mean_what_the_gguf_package_says(format, seed)


def test_true_bits():
    """What the names leave out: the scales."""
    bits = {name: round(kind.bits_per_weight, 4) for name, kind in FORMATS.items()}
    assert bits["Q8_0"] == 8.5 and bits["Q4_0"] == bits["Q4_K"] == 4.5 and bits["Q5_K"] == 5.5
    assert bits["Q6_K"] == 6.5625 and bits["Q2_K"] == 2.625 and bits["Q3_K"] == 3.4375
    assert GgufWeight(random_bytes("Q6_K"), "Q6_K").bits_per_weight == 6.5625


# ---------------------------------------------------------------- numbers -> bytes


@pytest.mark.parametrize("format", [name for name in ENCODERS if name not in K_FORMATS])
def test_writes_the_bytes_of_the_gguf_package(format, seed):
    gguf = pytest.importorskip("gguf")
    ours = torch.cat([numbers(), torch.randn(9, 256), torch.randint(-3, 4, (9, 256)) / 2])
    expected = gguf.quantize(ours.numpy(), gguf.GGMLQuantizationType[format])
    expected = np.ascontiguousarray(expected).view(np.uint8)
    assert torch.equal(to_gguf(ours, format).blocks, torch.from_numpy(expected))


@pytest.mark.parametrize("format", K_FORMATS)
def test_writes_the_bytes_of_llama_cpp(format):
    blocks = to_gguf(numbers(), format).blocks
    assert hashlib.sha256(blocks.numpy().tobytes()).hexdigest()[:16] == WRITTEN_BY_LLAMA_CPP[format]


@pytest.mark.parametrize("format", K_FORMATS)
def test_quantizes_as_well_as_an_installed_llama_cpp(format, seed):
    """Its build may fuse products and sums, so the bytes may differ, but hardly the errors."""
    llama_cpp = pytest.importorskip("llama_cpp")
    library = Path(llama_cpp.__file__).parent / "lib"
    files = [*library.glob("libggml-base.*")]
    if not files:
        pytest.skip("NOT RUN: this llama-cpp-python has no libggml-base")
    function = getattr(ctypes.CDLL(str(files[0])), f"quantize_row_{format[:2].lower()}_K_ref")
    x, kind = torch.randn(64, 256), FORMATS[format]
    theirs = np.zeros((64, kind.bytes), np.uint8)
    pointer = ctypes.c_void_p(x.numpy().ctypes.data)
    function(pointer, ctypes.c_void_p(theirs.ctypes.data), ctypes.c_int64(x.numel()))
    errors = [
        float((weight.dequantize() - x).square().mean())
        for weight in (to_gguf(x, format), GgufWeight(torch.from_numpy(theirs), format))
    ]
    assert errors[0] < 1.001 * errors[1]


@pytest.mark.parametrize("format", ENCODERS)
def test_the_error_is_that_of_the_bits(format, seed):
    """Of normal numbers, relative to their spread: each bit fewer doubles it, roughly."""
    x = torch.randn(64, 512)
    error = float((to_gguf(x, format).dequantize() - x).square().mean().sqrt())
    bits = FORMATS[format].bits_per_weight
    assert error < (1e-2 if format in FLOATS else 3 * 2**-bits)


def test_the_search_by_hand():
    """Four values and two bits. From 0 to 3.6 the scale is 1.2 and the squared error 0.2; the line
    through the same codes, 1.18 · q − 0.12, has 0.108.
    """
    values = torch.tensor([[0.0, 1.0, 2.0, 3.6]])
    for count, scale, minimum, error in ((0, 1.2, 0.0, 0.2), (16, 1.18, 0.12, 0.108)):
        fit = fit_with_minimum(values, torch.ones(1, 4), 3, -0.5, count, torch.square)
        assert fit.codes.tolist() == [[0, 1, 2, 3]]
        assert float(fit.scale) == pytest.approx(scale, abs=1e-5)
        assert float(fit.minimum) == pytest.approx(minimum, abs=1e-5)
        decoded = fit.scale * fit.codes - fit.minimum
        assert float((decoded - values).square().sum()) == pytest.approx(error, abs=1e-5)


def test_the_search_pays(seed):
    """Against the scale that maps the extremes: never worse in any sub-block, and better on
    average.
    """
    parts = torch.randn(200, 32)
    weights = half_flat(parts)
    errors = []
    for count in (0, 21):
        fit = fit_with_minimum(parts, weights, 15, -1.0, count, torch.square)
        difference = fit.scale[:, None] * fit.codes - fit.minimum[:, None] - parts
        errors.append((weights * difference.square()).sum(-1))
    plain, searched = errors
    assert (searched <= plain * (1 + 1e-5)).all() and searched.mean() < 0.9 * plain.mean()


def test_a_matrix_in_pieces_is_the_same(seed, monkeypatch):
    x = torch.randn(12, 512)
    whole = to_gguf(x, "Q4_K").blocks
    monkeypatch.setattr(gguf_encode, "CHUNK", 3 * 256)
    assert torch.equal(to_gguf(x, "Q4_K").blocks, whole)


@pytest.mark.parametrize(
    "shape, format, message",
    [
        ((4, 256), "Q4_X", r"^format: got 'Q4_X'; accepted: F32, F16, .*Q6_K$"),
        (
            (4, 96),
            "Q4_K",
            r"weight's shape: got \[4, 96\]; accepted: \[N, K\] with K a multiple of 256",
        ),
        ((256,), "Q8_0", "weight's shape: got"),
    ],
)
def test_refuses_in_one_line(shape, format, message):
    with pytest.raises(ValueError, match=message):
        to_gguf(torch.zeros(shape), format)


def test_refuses_what_is_not_finite():
    for value in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="infinity or NaN"):
            to_gguf(torch.full((1, 32), value), "Q8_0")
