"""Proves that the kernels over codes equal lesson 12's attention over the numbers that the codes
mean, and that rows are quantized in a kernel bit for bit as in PyTorch.

The oracle dequantizes and attends in float64, so all that is granted is what rounding the numbers
to the model's dtype costs the naive version, too. How far the codes are from K and V is measured
elsewhere.
"""

from functools import partial

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from lessons.l09_flash_attention.tiles import Tiles
from lessons.l12_paged_kv.kernels.paged import prefill_kernel
from lessons.l12_paged_kv.lab.testing import DEVICE, paged
from lessons.l19_kv_quantization import optimized
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kernels import hooks, launch
from lessons.l19_kv_quantization.kernels.decode import codes_decode_kernel
from lessons.l19_kv_quantization.lab.testing import coded, skip_where
from lessons.l19_kv_quantization.naive import dequantized_attention, dequantized_decode
from lessons.l19_kv_quantization.optimized import (
    quantize_kernel,
    quantize_rows,
    quantized_decode,
    quantized_prefill,
    writes_e4m3,
)
from lessons.toolbox.proof.numerics import Errors, NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug

SMALL = Tiles(16, 16)
EXACT = Errors(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_decode_over_codes(name, seed, proof):
    """Pages in any order, an empty sequence, splits; scales that were never written are NaN."""
    dtype = torch.float32 if name == "fp8" else torch.bfloat16  # the bits of E4M3: in 16 bits below
    # 32 channels, not 16: Triton up to 3.7 counts the product of 16 columns twice where they come
    # from 4-bit codes (mended by triton-lang/triton pull request 11691). No model has such heads.
    heads = (4, 2, 32, 32) if name == "int4" else (4, 2, 16, 16)
    pages = paged([16, 5, 0, 33], block_size=16, heads=heads, dtype=dtype, seed=seed)
    inputs = coded(FORMATS[name], pages).decode
    fast = partial(quantized_decode, num_splits=2)
    proof.record(codes_decode_kernel, prove(fast, dequantized_decode, (*inputs, FORMATS[name])))


@pytest.mark.parametrize("name, heads", [("int8", (3, 1, 24, 24)), ("int4", (3, 1, 24, 40))])
def test_heads_of_any_size(name, heads, seed, proof):
    """Widths that are no powers of two, pages of 5, a window."""
    inputs = coded(FORMATS[name], paged([17, 40], block_size=5, heads=heads, seed=seed)).decode
    fast, plain = (partial(f, window=9) for f in (quantized_decode, dequantized_decode))
    proof.record(codes_decode_kernel, prove(fast, plain, (*inputs, FORMATS[name])))


@pytest.mark.parametrize("name", FORMATS)
def test_prefill_over_codes(name, seed, proof):
    """A whole prompt, a chunk after what is held, a single token."""
    heads = (4, 2, 32, 32) if name == "int4" else (4, 2, 16, 32)  # as in test_decode_over_codes
    pages = paged([9, 20, 33], [9, 3, 1], block_size=4, heads=heads, seed=seed)
    fast = partial(quantized_prefill, tiles=None if name == "int4" else SMALL)
    inputs = (*coded(FORMATS[name], pages), FORMATS[name])
    proof.record(prefill_kernel, prove(fast, dequantized_attention, inputs))


def test_chips_without_e4m3_read_its_bits(seed, proof, monkeypatch):
    for module in (optimized, launch):
        monkeypatch.setattr(module, "has_e4m3", lambda device: False)
    pages = paged([16, 33], block_size=16, dtype=torch.bfloat16, seed=seed)
    inputs = coded(FORMATS["fp8"], pages)
    fast = partial(quantized_decode, num_splits=1)
    one = (*inputs.decode, FORMATS["fp8"])
    proof.record(codes_decode_kernel, prove(fast, dequantized_decode, one))
    fast = partial(quantized_prefill, tiles=SMALL)
    every = (*inputs, FORMATS["fp8"])
    proof.record(prefill_kernel, prove(fast, dequantized_attention, every))


def test_every_e4m3_number_is_read_by_its_bits(monkeypatch):
    """All 254 of them as V of one key each, so the output is the number itself."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    numbers = torch.tensor(codes, dtype=torch.uint8, device=DEVICE).view(-1, 1, 1, 1)
    v_codes = numbers.expand(-1, 1, 1, 16).contiguous()
    count = len(codes)
    ones = torch.ones(1, count, 1, 1, device=DEVICE).permute(1, 2, 0, 3)
    q = torch.zeros(count, 1, 16, device=DEVICE)
    table = torch.arange(count, dtype=torch.int32, device=DEVICE)[:, None]
    lens = torch.ones(count, dtype=torch.int32, device=DEVICE)
    want = FORMATS["fp8"].dequantize(v_codes, ones.float())[:, 0] + 0.0  # of -0.0 a sum makes 0.0
    monkeypatch.setattr(launch, "has_e4m3", lambda device: False)
    few = slice(0, None) if DEVICE.type == "cuda" else slice(0, None, 9)
    arguments = (
        v_codes,
        v_codes,
        ones,
        ones,
        table[few].contiguous(),
        lens[few].contiguous(),
        FORMATS["fp8"],
    )
    # not bit by bit: a GPU divides float32, here by 1, to within 2 units (PTX, div.full)
    out = quantized_decode(q[few], *arguments)
    torch.testing.assert_close(out, want[few], rtol=2**-22, atol=0)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, width", [("fp8", 16), ("int8", 24), ("int4", 24)])
def test_rows_are_quantized_bit_for_bit(name, width, dtype, seed, proof):
    """Into slots in any order; slot −1 skips a token, and others stay as they are."""
    skip_where(name, writes_e4m3)
    format = FORMATS[name]
    x = torch.randn(6, 2, width, device=DEVICE).to(dtype)
    x[0] = 0
    x[1] = -2.5
    x[2, :, 3] = 300
    x[3] *= 2.0**-12
    x[4, 0, 1], x[4, 1, 2] = float("nan"), float("inf")
    slots = torch.tensor([3, 0, -1, 5, 8, 1], device=DEVICE)
    codes = torch.full((9, 2, width * format.bits // 8), 99, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((2, 9, format.scales_per_row), 7.0, dtype=dtype, device=DEVICE)
    scales = scales.transpose(0, 1)
    quantize_rows(format, x.transpose(0, 1).contiguous().transpose(0, 1), codes, scales, slots)
    want_codes, want_scales = torch.full_like(codes, 99), torch.full_like(scales, 7.0)
    kept = slots >= 0
    want_codes[slots[kept]], want_scales[slots[kept]] = format.quantize(x[kept])
    assert_same_rows(name, codes, scales, want_codes, want_scales)
    proof.record(quantize_kernel, EXACT)


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
def test_heads_beyond_two_to_the_31_elements(seed, tmp_path):
    """Three heads of new rows, of codes and of scales, so far apart that int32 cannot tell where
    the third is.
    """
    format = FORMATS["int8"]
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed)).half()
    slots = torch.tensor([1, 0])
    near = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, 1).half()
    away = [far_apart(y, 1, tmp_path / name) for name, y in zip(("codes", "scales"), near)]
    quantize_rows(format, x, *near, slots)
    quantize_rows(format, far_apart(x, 1, tmp_path / "x"), *away, slots)
    for y, same in zip(away, near):
        assert_same_bits(y, same)


def assert_same_rows(name, codes, scales, want_codes, want_scales):
    """The same bits, except that one NaN is as good as another."""
    scales, want_scales = (x.where(~x.isnan(), float("nan")) for x in (scales, want_scales))
    assert_same_bits(scales, want_scales)
    if name == "fp8":  # whose NaN is 127 with either sign
        codes, want_codes = (x.where(x & 127 != 127, 127) for x in (codes, want_codes))
    assert_same_bits(codes, want_codes)


# ---------------------------------------------------------------- wrong versions

SLIPS = [
    ("int8", "scaled_load", "tl.load(scale_ptr + slot)[:, None].to(tl.float32)\n    # Not",
     "tl.load(scale_ptr)[:, None].to(tl.float32)\n    # Not"),
    ("int8", "scaled_load", "tl.where(mask, codes.to(tl.float32) * scale, 0.0)",
     "(codes.to(tl.float32) * scale)"),
    ("int4", "int4_load", "tl.join(bytes_of_row & 15, bytes_of_row >> 4)",
     "tl.join(bytes_of_row >> 4, bytes_of_row & 15)"),
    ("int4", "int4_load", "tl.where(mask, codes * scale + low, 0.0)",
     "tl.where(mask, codes * scale, 0.0)"),
    ("int4", "int4_load", "scale = tl.load(scale_ptr + 2 * slot)[:, None]",
     "scale = tl.load(scale_ptr + slot)[:, None]"),
    ("fp8", "e4m3_bits_load", "(scale * 256.0)", "(scale * 128.0)"),
    ("fp8", "e4m3_bits_load", "((codes & 0x80) << 8) | ((codes & 0x7F) << 7)", "codes << 7"),
]  # fmt: skip


@pytest.mark.parametrize("name, hook, old, new", SLIPS)
def test_a_wrong_hook_is_found(name, hook, old, new, seed, tmp_path, monkeypatch):
    buggy = with_bug(hooks, tmp_path, old, new)
    monkeypatch.setattr(optimized, hook, getattr(buggy, hook))
    monkeypatch.setattr(optimized, "has_e4m3", lambda device: hook != "e4m3_bits_load")
    # No sequence owns block 0. Keys after a sequence's end are looked up there, and find a scale of
    # NaN.
    many = (paged([5, 20], block_size=4, seed=seed + at) for at in range(1000))
    pages = next(found for found in many if not (found.block_table == 0).any())
    inputs = (*coded(FORMATS[name], pages), FORMATS[name])
    with pytest.raises(NotEquivalent):
        prove(partial(quantized_prefill, tiles=SMALL), dequantized_attention, inputs)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("fp8", "smaller(larger(ratio, -LARGEST), LARGEST)", "larger(ratio * 1.2, -LARGEST)"),
        ("int8", "(ratio + 12582912.0) - 12582912.0", "tl.floor(ratio)"),
        ("int4", "low_half | (high_half << 4)", "high_half | (low_half << 4)"),
        ("int8", "scale = tl.div_rn(span, LARGEST)", "scale = tl.div_rn(span, LARGEST + 1)"),
        ("int8", "tl.reduce(tl.abs(x), 0, larger)", "tl.max(tl.abs(x), axis=0)"),
        ("int4", "tl.reduce(tl.where(inside, x, float(\"inf\")), 0, smaller)",
         "tl.min(tl.where(inside, x, float(\"inf\")), axis=0)"),
    ],
)  # fmt: skip
def test_a_wrong_writer_is_found(name, old, new, seed, tmp_path):
    skip_where(name, writes_e4m3)
    buggy = with_bug(optimized, tmp_path, old, new)
    x, slots = torch.randn(3, 2, 16, device=DEVICE), torch.arange(3, device=DEVICE)
    x[2, 1, 5] = float("nan")
    format = FORMATS[name]
    codes = torch.zeros(3, 2, 16 * format.bits // 8, dtype=torch.uint8, device=DEVICE)
    scales = torch.ones(2, 3, format.scales_per_row, device=DEVICE).transpose(0, 1)
    buggy.quantize_rows(format, x, codes, scales, slots)
    want_codes, want_scales = format.quantize(x)
    with pytest.raises(NotEquivalent):
        assert_same_rows(name, codes, scales, want_codes, want_scales)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"k_codes": a["k_codes"].float()}, "k_codes: got torch.float32"),
        (lambda a: a | {"v_scales": a["v_scales"].double()}, "v_scales: got torch.float64"),
        (lambda a: a | {"k_scales": a["k_scales"][..., :0]}, "k_scales: got torch.float32"),
        (lambda a: a | {"k_scales": a["k_scales"].contiguous()}, "k_scales: got strides"),
        (lambda a: a | {"q": a["q"][..., :8]}, "q, k_cache, v_cache: got"),
        (lambda a: a | {"window": 0}, "window: got 0"),
    ],
)
def test_bad_input_is_named_in_one_line(change, message):
    names = ["q", "k_codes", "v_codes", "k_scales", "v_scales", "block_table", "context_lens"]
    pages = coded(FORMATS["int8"], paged([5, 20], block_size=4)).decode
    arguments = change(dict(zip(names, pages)) | {"format": FORMATS["int8"]})
    with pytest.raises(ValueError) as error:
        quantized_decode(**arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
