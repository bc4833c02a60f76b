"""Proves that attention through a block table equals attention in one piece, wherever pages are."""

from functools import partial

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from lessons.l09_flash_attention.tiles import Tiles
from lessons.l12_paged_kv.kernels.hooks import contiguous_row
from lessons.l12_paged_kv.kernels.paged import decode_kernel, prefill_kernel
from lessons.l12_paged_kv.lab.testing import DEVICE, decoded, paged
from lessons.l12_paged_kv.naive import gathered, gathered_attention
from lessons.l12_paged_kv.optimized import paged_decode, paged_prefill
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    assert_same_bits,
    floor_for,
    prove,
)
from lessons.toolbox.proof.traps import guarded_empty

SMALL = Tiles(16, 16)
BLOCK_SIZES = [1, 5, 16, 48, 256]


# ---------------------------------------------------------------- the definition itself


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gathering_gives_the_rows_in_order(block_size, seed):
    inputs = paged([1, 37], block_size=block_size, seed=seed)
    in_order = paged([1, 37], block_size=block_size, seed=seed, order="ascending")
    for b, length in enumerate([1, 37]):
        for cache, same in zip(inputs[1:3], in_order[1:3]):
            rows = gathered(cache, inputs.block_table[b], length)
            assert_same_bits(rows, gathered(same, in_order.block_table[b], length))
            assert rows.isfinite().all()
    first = in_order.block_table[1, 0]
    flat = in_order.k_cache[first:].flatten(0, 1)[:37]
    assert_same_bits(flat, gathered(in_order.k_cache, in_order.block_table[1], 37))


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.sample(2)
def test_decode_kernel_for_any_block_size(block_size, seed, proof):
    """Lengths around a page; an empty sequence; splits whose ends are no page's."""
    around = {block_size - 1, block_size, block_size + 1}
    lengths = [n for n in around if n <= 50] + [0, 41]
    inputs = paged(lengths, block_size=block_size, heads=(3, 1, 16, 16), seed=seed).decode
    for options in (dict(num_splits=1), dict(num_splits=3), dict(split_size=20)):
        fast = partial(paged_decode, **options)
        proof.record(decode_kernel, prove(fast, decoded, inputs))


@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((2, 2, 64, 64), torch.float32),
        ((6, 1, 24, 40), torch.float32),
        ((4, 2, 80, 80), torch.bfloat16),
        ((8, 1, 128, 64), torch.float16),
        ((2, 1, 192, 128), torch.bfloat16),
    ],
)
@pytest.mark.sample(2)
def test_decode_kernel_for_any_heads(heads, dtype, seed, proof):
    """K and V of different widths and strides; with and without a window."""
    inputs = paged([17, 50], block_size=16, heads=heads, dtype=dtype, seed=seed).decode
    for window in (None, 20):
        fast, plain = partial(paged_decode, window=window), partial(decoded, window=window)
        proof.record(decode_kernel, prove(fast, plain, inputs))


@pytest.mark.parametrize("kind", ATTENTION_INPUTS)
@pytest.mark.sample(2)
def test_hard_inputs(kind, seed, proof):
    floor = floor_for(torch.float32, kind)
    inputs = paged([2, 40], block_size=7, kind=kind, seed=seed).decode
    fast = partial(paged_decode, num_splits=3)
    proof.record(decode_kernel, prove(fast, decoded, inputs, floor=floor))
    inputs = paged([40, 30], [40, 9], block_size=7, kind=kind, seed=seed)
    if kind != "one_row":
        fast = partial(paged_prefill, tiles=SMALL)
        proof.record(prefill_kernel, prove(fast, gathered_attention, inputs, floor=floor))


@pytest.mark.parametrize("window", [1, 16, 33])
@pytest.mark.parametrize("options", [dict(num_splits=2), dict(split_size=3)])
@pytest.mark.sample(2)
def test_a_window_hides_whole_splits(window, options, seed, proof):
    """A split may hold nothing but keys that the window hides; it weighs nothing."""
    inputs = paged([3, 50], block_size=4, seed=seed).decode
    fast = partial(paged_decode, window=window, **options)
    proof.record(decode_kernel, prove(fast, partial(decoded, window=window), inputs))


# ---------------------------------------------------------------- prompts and chunks


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.sample(2)
def test_prefill_kernel_for_any_block_size(block_size, seed, proof):
    """A fresh prompt, a chunk after a context, a single token and a sequence that runs nothing."""
    lengths, new = [block_size + 1, 50, 33, 20], [block_size + 1, 17, 1, 0]
    lengths, new = [min(n, 60) for n in lengths], [min(n, 60) for n in new]
    inputs = paged(lengths, new, block_size=block_size, seed=seed)
    fast = partial(paged_prefill, tiles=SMALL)
    proof.record(prefill_kernel, prove(fast, gathered_attention, inputs))


@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((2, 2, 64, 64), torch.float32),
        ((6, 1, 24, 40), torch.float32),
        ((4, 2, 80, 80), torch.bfloat16),
        ((2, 1, 192, 128), torch.bfloat16),
    ],
)
@pytest.mark.sample(2)
def test_prefill_kernel_for_any_heads(heads, dtype, seed, proof):
    inputs = paged([17, 50], [17, 9], block_size=16, heads=heads, dtype=dtype, seed=seed)
    for window in (None, 12):
        fast = partial(paged_prefill, tiles=SMALL, window=window)
        plain = partial(gathered_attention, window=window)
        proof.record(prefill_kernel, prove(fast, plain, inputs))


@pytest.mark.parametrize("tiles", [Tiles(16, 16), Tiles(32, 16), Tiles(16, 64)])
@pytest.mark.sample(1)
def test_tiles_change_nothing(tiles, seed, proof):
    inputs = paged([40, 70], [40, 33], block_size=10, seed=seed)
    fast = partial(paged_prefill, tiles=tiles, max_seqlen_q=40)
    proof.record(prefill_kernel, prove(fast, gathered_attention, inputs))


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("block_size", [3, 16])
def test_where_pages_lie_changes_no_bit(block_size, seed):
    """Ascending pages, pages in random order, and one page as long as a sequence."""
    lengths, new = [33, 47], [20, 47]
    shuffled, ascending = (
        paged(lengths, new, block_size=block_size, seed=seed, order=order)
        for order in ("random", "ascending")
    )
    caches = []
    for cache in ascending[1:3]:
        rows = [gathered(cache, ascending.block_table[b], n) for b, n in enumerate(lengths)]
        caches.append(
            torch.stack([torch.cat([x, x[:1].expand(47 - len(x), -1, -1)]) for x in rows])
        )
    table = ascending.block_table
    starts, lens = ascending.cu_seqlens_q, ascending.context_lens
    prefill = partial(paged_prefill, tiles=SMALL)
    whole = prefill(shuffled.q, *caches, table, starts, lens, row_of=contiguous_row)
    for inputs in (shuffled, ascending):
        assert_same_bits(prefill(*inputs), whole)
    steps = [x._replace(q=x.q[-2:]) for x in (shuffled, ascending)]
    decode = partial(paged_decode, num_splits=2)
    whole = decode(steps[0].q, *caches, table, lens, row_of=contiguous_row)
    for inputs in steps:
        assert_same_bits(decode(*inputs.decode), whole)


def test_a_fixed_split_size_makes_bits_independent_of_the_batch(seed):
    inputs = paged([50, 3, 64], block_size=8, seed=seed).decode
    together = paged_decode(*inputs, split_size=16)
    q, k_cache, v_cache, table, lens = inputs
    alone = paged_decode(q[:1], k_cache, v_cache, table[:1], lens[:1], split_size=16)
    assert_same_bits(together[:1], alone)


def test_nothing_is_written_beside_the_results(seed):
    step = paged([20, 33], block_size=5, heads=(6, 2, 20, 12), seed=seed).decode
    chunk = paged([20, 33], [20, 5], block_size=5, heads=(6, 2, 20, 12), seed=seed)
    with guarded_empty() as checks:
        results = [paged_decode(*step, num_splits=n) for n in (1, 3)]
        results.append(paged_prefill(*chunk, tiles=SMALL, max_seqlen_q=20))
    assert len(checks) == 2 + 4 + 1 and all(x.isfinite().all() for x in results)


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
@pytest.mark.parametrize("far", ["heads", "rows"])
def test_places_beyond_two_to_the_31_elements(far, seed, tmp_path):
    """A pool that stores head after head, or row 0 of all blocks before row 1 of all blocks, so
    large that the third begins after element 2^31: 4.3 GB of addresses, 100 kB in use.
    """
    pages = paged([40], block_size=3, heads=(3, 3, 16, 16), dtype=torch.float16, seed=seed)
    dim = dict(rows=1, heads=2)[far]
    away = [far_apart(x, dim, tmp_path / name) for name, x in zip("kv", pages[1:3])]
    away = pages._replace(k_cache=away[0], v_cache=away[1])
    assert_same_bits(paged_decode(*away.decode), paged_decode(*pages.decode))
    assert_same_bits(paged_prefill(*away), paged_prefill(*pages))


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
def test_queries_beyond_two_to_the_31_elements(seed, tmp_path):
    """Three query heads so far apart that int32 cannot tell where the third is."""
    pages = paged([40], block_size=8, heads=(3, 1, 16, 16), dtype=torch.float16, seed=seed)
    away = pages._replace(q=far_apart(pages.q, 1, tmp_path / "q"))
    assert_same_bits(paged_decode(*away.decode), paged_decode(*pages.decode))
    assert_same_bits(paged_prefill(*away), paged_prefill(*pages))


def test_probes_with_known_answers(seed):
    inputs = paged([7, 33], [7, 4], block_size=4, seed=seed)
    q, k_cache, v_cache, table, starts, lens = inputs
    prefill = partial(paged_prefill, tiles=SMALL)
    ones = prefill(q, k_cache, torch.ones_like(v_cache), table, starts, lens)
    torch.testing.assert_close(ones, torch.ones_like(ones), atol=1e-6, rtol=0)
    v_cache[table[0, 1], 0] = float("nan")  # the key at position 4
    out = prefill(q, k_cache, v_cache, table, starts, lens)
    # Of the queries before it too, because they share its tile, and 0 · NaN is NaN.
    assert out[4:7].isnan().any() and out[7:].isfinite().all()
