"""Proves FP8 attention: the kernel equals the PyTorch version that rounds where it rounds, for
pages, chunks and windows of any kind; the rounding of p depends on no tile; wrong versions are
found.

In float32 an honest kernel and its twin differ where the last bit of a score moves a weight over
the border between two codes: one in about 10^5, by 1/16. FLIPS grants that, and every planted slip
is far above it.
"""

import json
import math
from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l09_flash_attention.tiles import Tiles, chip_of
from lessons.l12_paged_kv.lab.testing import DEVICE, paged
from lessons.l19_kv_quantization.activations.attention import kernel, optimized
from lessons.l19_kv_quantization.activations.attention.kernel import fp8_prefill_kernel
from lessons.l19_kv_quantization.activations.attention.naive import (
    FP8,
    Coded,
    fp8_attention,
    products,
)
from lessons.l19_kv_quantization.activations.attention.optimized import fp8_prefill
from lessons.l19_kv_quantization.lab import products as counted
from lessons.l19_kv_quantization.lab.testing import coded, skip_where
from lessons.l19_kv_quantization.naive import dequantized_attention
from lessons.l19_kv_quantization.optimized import writes_e4m3
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    assert_close_to_oracle,
    prove,
)
from lessons.toolbox.proof.planted import with_bug

FLIPS = 5e-3  # of the result, relative
HEADS = (4, 2, 32, 32)


@pytest.fixture(autouse=True)
def on_a_chip_with_e4m3():
    """sm_89 cuts q and p to float16 before it rounds them, so more codes differ there."""
    skip_where("fp8", writes_e4m3)


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_prompts_by_products_of_codes(block_size, seed, proof):
    """A whole prompt, a chunk after what is held, a single token, an empty sequence; widths of K
    and V that differ.
    """
    lengths, new = [9, 70, 33, 0], [9, 40, 1, 0]
    pages = paged(lengths, new, block_size=block_size, heads=(4, 2, 32, 64), seed=seed)
    inputs = coded(FP8, pages)
    proof.record(fp8_prefill_kernel, prove(fp8_prefill, fp8_attention, inputs, floor=FLIPS))


@pytest.mark.parametrize("window", [9, 40, 200])
def test_any_window(window, seed, proof):
    inputs = coded(FP8, paged([90, 100], [90, 30], block_size=16, heads=HEADS, seed=seed))
    fast, plain = (partial(f, window=window) for f in (fp8_prefill, fp8_attention))
    proof.record(fp8_prefill_kernel, prove(fast, plain, inputs, floor=FLIPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits(dtype, seed, proof):
    """Two scales are in a word then. The oracle is the twin over the same codes, because in float64
    a query's scale would not be rounded. One query is so small that float16 has only two thirds of
    its scale.
    """
    pages = paged([70, 33], [40, 33], block_size=16, heads=HEADS, dtype=dtype, seed=seed)
    pages.q[2] = pages.q[2].sign() * 3.8e-5
    inputs = coded(FP8, pages)
    out, twin = fp8_prefill(*inputs), fp8_attention(*inputs)
    errors = assert_close_to_oracle(out, twin, twin.double(), floor=FLIPS)
    proof.record(fp8_prefill_kernel, errors)


def test_rows_of_any_size(seed, proof):
    """V's scales from 2^-8 to 2^6, so that they rise from tile to tile; a query of zeros."""
    pages = paged([140], [70], block_size=16, heads=HEADS, seed=seed)
    factors = torch.logspace(-8, 6, 140, base=2.0, device=DEVICE)
    for key, factor in enumerate(factors):
        pages.v_cache[pages.block_table[0, key // 16], key % 16] *= factor
    pages.q[5] = 0
    inputs = coded(FP8, pages)
    proof.record(fp8_prefill_kernel, prove(fp8_prefill, fp8_attention, inputs, floor=FLIPS))


def test_tiles_change_nothing_but_rare_codes(seed):
    """Because the maximum moves by whole powers of two. On Hopper a tile's sum has 14 bits."""
    inputs = coded(FP8, paged([150], [70], block_size=16, heads=HEADS, seed=seed))
    small, large = (fp8_prefill(*inputs, tiles=Tiles(*size)) for size in ((64, 32), (64, 128)))
    near = 1e-3 if chip_of(DEVICE) == 90 else 1e-5
    same = (small - large).abs() <= near * large.abs().amax()
    assert same.all(-1).double().mean() > 0.95


def test_a_constant_v_comes_out_within_a_code(seed):
    """Σ p · v / Σ p with v = 1: what is left is the rounding of p, half a code of three bits."""
    pages = paged([100], [40], block_size=16, heads=HEADS, seed=seed)
    pages.v_cache[pages.v_cache.isfinite()] = 1.0
    out = fp8_prefill(*coded(FP8, pages))
    assert float((out - 1).abs().max()) <= 2**-4 and float((out - 1).mean().abs()) < 0.01


def test_the_naive_version_is_attention_but_for_its_codes(seed):
    """With inputs that codes hold, and weights that are powers of two, it is lesson 2's."""
    q, k, v = torch.randint(-1, 2, (3, 40, 2, 32), device=DEVICE).double()
    q[..., 4:] = 0  # scores from -4 to 4, in steps of log 2
    ones = q.new_ones(40, 2, 1)
    bits = [x.float().to(torch.float8_e4m3fn).view(torch.uint8) for x in (q, k, v)]
    scale = math.log(2)
    got = products(*(Coded(x, ones) for x in bits), scale, None)
    torch.testing.assert_close(got, attention(q, k, v, scale), rtol=1e-12, atol=1e-12)


def test_its_error_is_that_of_three_more_roundings(seed):
    """Beside the kernel that makes numbers of codes: q and p are rounded as well."""
    pages = paged([100], [60], block_size=16, heads=(4, 2, 64, 64), seed=seed)
    inputs = coded(FP8, pages)
    exact = dequantized_attention(*inputs, FP8)
    error = float((fp8_prefill(*inputs) - exact).norm() / exact.norm())
    assert 0.005 < error < 0.06


def test_what_is_counted_is_these_functions(seed):
    """lab/products.py's ways beside the kernels' twins, and what MORE.md concludes from its
    record.
    """
    q, k, v = counted.inputs_of("random", seed % 100)
    q, k, v = q[:40], k[:40], v[:40]
    got = counted.by_numbers(q, k, v, 0.1)
    over = (FP8.dequantize(*FP8.quantize(x.bfloat16())).double() for x in (k, v))
    exact = attention(q.double(), *over, 0.1)
    assert float((got - exact).norm() / exact.norm()) < 4e-3  # of p in 16 bits
    codes, scales = counted.a_scale_a_head(k)
    assert float((FP8.dequantize(codes, scales) - k).abs().max() / k.abs().max()) < 2**-4
    assert len(scales[:, 0].unique()) == 1
    record = json.loads(counted.OUT.read_text(encoding="utf-8"))
    for ways in record["errors"].values():
        assert 1.3 < ways["products"] / ways["numbers"] < 1.6
        assert ways["products, a scale a head"] < 1.1 * ways["products"]
    for ways in record["predicted"].values():
        times = [ways[name]["predicted_s"] for name in ("products", "16-bit cache", "numbers")]
        assert times == sorted(times)


# ---------------------------------------------------------------- wrong versions

SLIPS = [
    ("another KV head's scales", "k_scale_ptr + kv_head * stride_sh", "k_scale_ptr"),
    ("p's unit is not in the sum", "l_i = l_i * alpha + tl.sum(p, axis=1)",
     "l_i = l_i * alpha + tl.sum(p, axis=1) * tl.exp2((up - 7).to(tl.float32))"),
    ("no unit for V's scales", "+ (up - 7)", "- 7"),
    ("V's scales are in the sum", "tl.sum(p, axis=1)", "tl.sum(p * v_scale[None, :], axis=1)"),
    ("V without its scales", "(p * v_scale[None, :])", "p"),
    ("codes of masked slots", "tl.load(row, mask=(at < count)[:, None], other=0.0)",
     "tl.load(row)"),
    ("scales of masked slots", "tl.where(in_use, v_scale, 0.0)", "v_scale"),
    ("a scale of q that is not rounded", "tl.where(scale == 0.0, 1.0, scale).to(x.dtype)",
     "tl.div_rn(tl.max(tl.abs(wide), axis=1), 448.0)"),
    ("q's scale twice", "top = tl.ceil(tl.max(scores, axis=1) * q_scale)",
     "scores *= q_scale[:, None]\n                top = tl.ceil(tl.max(scores, axis=1) * q_scale)"),
    ("keys in their old order", "tl.permute(parts, (0, 1, 3, 2, 4))", "parts"),
    ("channels in another order", "(ROWS, 16, DIM // 16)), (0, 2, 1)",
     "(ROWS, DIM // 16, 16)), (0, 2, 1)"),
    ("rows 0 to 3 of a group", "row + 8 * stride, key + 8", "row + 2 * stride, key + 8"),
    ("scales of a word changed", "tl.join(low, high)", "tl.join(high, low)"),
    ("no mask in the last tiles", "tl.minimum(held + start_m + 1, num_keys) // BLOCK_N",
     "tl.minimum(held + start_m + BLOCK_M, num_keys) // BLOCK_N"),
    ("sums that are not rescaled", "acc = acc * alpha[:, None]", "acc = acc"),
]  # fmt: skip


def assert_right(seed: int) -> None:
    """Raises NotEquivalent unless the kernel equals its twin, in bfloat16, on inputs that every
    slip changes.
    """
    many = (
        paged([140, 37], [70, 37], block_size=16, heads=HEADS, dtype=torch.bfloat16, seed=seed + at)
        for at in range(1000)
    )
    # No sequence owns block 0, where keys after a sequence's end are looked up.
    pages = next(found for found in many if not (found.block_table == 0).any())
    for block in range(9):  # V grows, and so does what its unit has to follow
        pages.v_cache[pages.block_table[0, block]] *= 4.0 ** (block - 4)
    inputs = coded(FP8, pages)
    twin = fp8_attention(*inputs)
    assert_close_to_oracle(fp8_prefill(*inputs), twin, twin.double(), floor=FLIPS)


def test_the_right_kernel_is_not_refused(seed):
    assert_right(seed)


@pytest.mark.parametrize("slip, old, new", SLIPS)
@pytest.mark.sample(6)
def test_a_wrong_kernel_is_found(slip, old, new, seed, tmp_path, monkeypatch):
    buggy = with_bug(kernel, tmp_path, old, new)
    monkeypatch.setattr(optimized, "fp8_prefill_kernel", buggy.fp8_prefill_kernel)
    with pytest.raises(NotEquivalent):
        assert_right(seed)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(block_size=8), "k_codes: got blocks of 8 tokens; accepted: multiples of 16"),
        (dict(heads=(4, 2, 48, 48)), "q, v_codes: got head sizes 48 and 48; accepted: 32, 64"),
        (dict(tiles=Tiles(16, 32)), "tiles: got blocks of (16, 32); accepted: powers of two"),
        (dict(softmax_scale=-1.0), "softmax_scale: got -1.0; accepted: None, or above 0"),
        (dict(window=0), "window: got 0"),
    ],
)
def test_bad_input_is_named_in_one_line(options, message):
    of_pages = {"block_size": 16, "heads": HEADS} | options
    pages = paged([20], [20], **{name: of_pages[name] for name in ("block_size", "heads")})
    rest = {name: x for name, x in options.items() if name not in ("block_size", "heads")}
    with pytest.raises(ValueError) as error:
        fp8_prefill(*coded(FP8, pages), **rest)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
