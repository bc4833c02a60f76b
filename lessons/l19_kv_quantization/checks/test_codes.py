"""Proves that decode over products of codes is decode over the numbers that they mean: any page,
any window, scales of very different sizes, rows of NaN, and wrong versions that are found.
"""

from functools import partial

import pytest
import torch

from lessons.l09_flash_attention.tiles import chip_of
from lessons.l12_paged_kv.lab.testing import DEVICE, paged
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kernels import codes, decode, launch
from lessons.l19_kv_quantization.kernels.decode import codes_decode_kernel
from lessons.l19_kv_quantization.lab.testing import coded, skip_where
from lessons.l19_kv_quantization.naive import dequantized_decode
from lessons.l19_kv_quantization.optimized import has_e4m3, quantized_decode
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug

HEADS = (4, 2, 32, 32)
ONE_HEAD = (2, 1, 32, 32)


@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 256])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sample(3)
def test_any_page_and_any_window(name, block_size, seed, proof):
    """More keys than a tile has, a window within a tile, splits whose ends are no tile's."""
    pages = paged([block_size + 1, 0, 100], block_size=block_size, heads=ONE_HEAD, seed=seed)
    inputs = (*coded(FORMATS[name], pages).decode, FORMATS[name])
    for window, options in ((None, dict(split_size=70)), (9, dict(num_splits=1))):
        fast = partial(quantized_decode, window=window, **options)
        plain = partial(dequantized_decode, window=window)
        proof.record(codes_decode_kernel, prove(fast, plain, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sample(3)
def test_keys_of_any_size(name, dtype, seed, proof):
    """Rows of V from 2^-20 to 2^6 and a row of zeros, heads of q 2^12 apart: their products leave
    float16 unless they are brought into it.
    """
    pages = paged([5, 140], block_size=16, heads=HEADS, dtype=dtype, seed=seed)
    factors = torch.logspace(-20, 6, 16, base=2.0, device=DEVICE).to(dtype)
    pages.v_cache.mul_(factors[:, None, None])
    pages.v_cache[pages.block_table[1, 0], 3] = 0
    pages.q[:, 1:2].mul_(2.0**-12)
    inputs = (*coded(FORMATS[name], pages).decode, FORMATS[name])
    proof.record(codes_decode_kernel, prove(quantized_decode, dequantized_decode, inputs))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_nan_stays_one(name, seed):
    """In the sequence that holds it, and in no other one."""
    pages = paged([5, 40], block_size=4, heads=HEADS, seed=seed)
    pages.v_cache[pages.block_table[1, 3], 2, 0] = torch.nan
    cached = coded(FORMATS[name], pages)
    row = pages.block_table[1, 3], 2, 0
    cached.v_scales[row] = torch.nan
    out = quantized_decode(*cached.decode, FORMATS[name])
    assert out[1, :2].isnan().all() and out[1, 2:].isfinite().all() and out[0].isfinite().all()


def test_scales_that_begin_within_a_word(seed):
    """An odd number of slots, and heads an odd number of slots apart, in bfloat16."""
    pages = paged([5, 20], block_size=3, heads=HEADS, dtype=torch.bfloat16, seed=seed)
    cached = coded(FORMATS["int8"], pages)
    want = quantized_decode(*cached.decode, FORMATS["int8"])
    moved = []
    for scales in (cached.k_scales, cached.v_scales):
        by_head = scales.permute(2, 0, 1, 3)
        per_head = by_head[0].numel()
        room = scales.new_full((1 + 2 * (per_head + 1 + per_head % 2 + 1),), torch.nan)
        stride = per_head + 1 + per_head % 2
        copy = room[1:].as_strided(by_head.shape, (stride, *by_head.stride()[1:]))
        moved.append(copy.copy_(by_head).permute(1, 2, 0, 3))
    odd = cached._replace(k_scales=moved[0], v_scales=moved[1])
    assert_same_bits(quantized_decode(*odd.decode, FORMATS["int8"]), want)


def test_rows_of_an_odd_number_of_bytes(seed):
    """18 codes of 4 bits are 9 bytes: no words of 16 bits."""
    pages = paged([5, 40], block_size=4, heads=(2, 1, 18, 18), seed=seed)
    inputs = (*coded(FORMATS["int4"], pages).decode, FORMATS["int4"])
    prove(quantized_decode, dequantized_decode, inputs)


# ---------------------------------------------------------------- wrong versions

KERNEL_SLIPS = [
    ("int8", "% 2 * 16)", "% 2 * 16 ^ 16)"),  # the scale of the neighbouring key
    ("int4", "second = second >> 16", "second = second"),  # the scale as the low
    ("fp8", "p = w * down[None, :]", "p = w"),  # V's scale before the maximum, and not divided out
    ("fp8", "(w * (v_scale * down)[None, :])", "w"),  # the exponent of V's scale alone
    ("fp8", "sees = in_use[None, :] & SEES", "sees = SEES"),  # a split's last tile, unmasked
    ("fp8", "k_scale[None, :])", "v_scale[None, :])"),
    ("int4", "q_low[:, None] * k_low[None, :] + shift", "shift"),
    ("int4", "p * v_low[None, :]", "w * v_low[None, :]"),
    ("int4", "low_i * alpha + new_low", "low_i + new_low"),
    ("int8", "acc[j] * alpha[:, None]", "acc[j]"),
    ("int8", "l_i * alpha + new_l", "l_i + new_l"),
    ("int8", "column = v_word * PARTS + j", "column = v_word * PARTS + (PARTS - 1 - j)"),
    ("fp8", "return scaled, two_to(-up), total", "return scaled, two_to(-up) * 2, total"),
    ("int4", "(acc[j] * UNIT + low_i[:, None])", "(acc[j] * UNIT)"),
]


def is_refused(name: str, seed: int, late: float, **options) -> bool:
    """Whether 290 keys, some of the last `late` times as large, tell a wrong kernel."""
    # bfloat16, because its scales are two in a word
    pages = paged([290], block_size=4, heads=ONE_HEAD, dtype=torch.bfloat16, seed=seed)
    pages.k_cache[pages.block_table[0, 68:72]] *= late
    inputs = (*coded(FORMATS[name], pages).decode, FORMATS[name])
    try:
        prove(partial(quantized_decode, **options), dequantized_decode, inputs)
    except NotEquivalent:
        return True
    return False


def assert_refused(name: str, seed: int) -> None:
    """By splits that end within a tile, or by a maximum in the last tile, so that alpha matters."""
    ends = is_refused(name, seed, 1.0, split_size=150)
    assert ends or is_refused(name, seed, 8.0, num_splits=1)


@pytest.mark.parametrize("name, old, new", KERNEL_SLIPS)
@pytest.mark.sample(7)
def test_a_wrong_kernel_is_found(name, old, new, seed, tmp_path, monkeypatch):
    skip_where(name, has_e4m3)
    buggy = with_bug(decode, tmp_path, old, new)
    monkeypatch.setattr(launch, "codes_decode_kernel", buggy.codes_decode_kernel)
    assert_refused(name, seed)


UNPACK_SLIPS = [
    ("int8", "bits = (words >> (8 * j)).to(tl.uint8)\n        parts += (bits.to(tl.int8",
     "bits = (words >> (8 - 8 * j)).to(tl.uint8)\n        parts += (bits.to(tl.int8"),
    ("int8", "bits.to(tl.int8, bitcast=True).to(tl.float16)", "bits.to(tl.float16)"),
    ("int4", "(words >> (4 * j)) & 15", "(words >> (4 * j)) & 7"),
    ("int4", "(words >> (4 * j)) & 15", "(words >> (12 - 4 * j)) & 15"),
]  # fmt: skip
PTX_SLIPS = [
    ("fp8", "prmt.b32 sorted, $2, 0, 0x3120", "prmt.b32 sorted, $2, 0, 0x3210"),
    ("int8", "xor.b32 above, $2, 0x80808080", "mov.b32 above, $2"),
    ("int8", "prmt.b32 high, above, middle, 0x4341", "prmt.b32 high, above, middle, 0x4143"),
    ("int4", "shr.u32 right, $4, 12", "shr.u32 right, $4, 11"),
]


@pytest.mark.parametrize("name, old, new", UNPACK_SLIPS + PTX_SLIPS)
@pytest.mark.sample(6)
def test_a_wrong_unpacking_is_found(name, old, new, seed, tmp_path, monkeypatch):
    in_ptx = (name, old, new) in PTX_SLIPS
    if in_ptx != (chip_of(DEVICE) is not None):
        pytest.skip("NOT RUN: the interpreter runs the hooks in Triton, compiled code those in PTX")
    skip_where(name, has_e4m3)
    buggy = with_bug(codes, tmp_path, old, new)
    hooks = dict(fp8=buggy.e4m3_ptx, int8=buggy.int8_ptx, int4=buggy.int4_ptx)
    if not in_ptx:
        hooks = dict(int8=buggy.int8_codes, int4=buggy.int4_codes)
    monkeypatch.setattr(launch, "codes", buggy)
    monkeypatch.setattr(launch, "IN_PTX" if in_ptx else "IN_TRITON", hooks)
    assert_refused(name, seed)
