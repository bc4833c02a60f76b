"""Proves decode by a list of splits: the list itself, the kernel and the merge over it, a step and
a CUDA graph that use it.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l10_flash_decoding import splits
from lessons.l10_flash_decoding.splits import (
    WorkItems,
    bounds_by_length,
    pays_by_length,
    shares_of,
    work_items,
)
from lessons.l11_cuda_graphs.simulator import SimulatedGraph
from lessons.l12_paged_kv import optimized
from lessons.l12_paged_kv.kernels import launch, plan
from lessons.l12_paged_kv.kernels.launch import keys_of_tile
from lessons.l12_paged_kv.kernels.paged import decode_kernel
from lessons.l12_paged_kv.kernels.plan import combine_ranges, combine_ranges_kernel
from lessons.l12_paged_kv.lab.testing import DEVICE, decoded
from lessons.l12_paged_kv.lab.testing import paged as pages_of
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.toolbox.proof.numerics import assert_same_bits, prove
from lessons.toolbox.proof.traps import guarded_empty, poisoned_empty

SLOTS, TILE = 12, 16  # of a small machine; keys
BATCHES = {
    "one giant": [9, 300, 33, 16],
    "a giant that comes last": [1, 2, 15, 17, 250],
    "lengths of 0 and 1": [0, 1, 200, 0, 31],
    "exactly a tile": [16, 32, 160, 48],
    "all equal": [64, 64, 64],
    "one sequence": [170],
    "no key at all": [0, 0],
    "more sequences than slots": [100, *range(1, 14)],
}


def inputs_of(lengths, seed, **options):
    """The arguments of paged_decode, pages in random order."""
    return pages_of(lengths, block_size=options.pop("block_size", 16), seed=seed, **options).decode


def listed(module=splits, decode=paged_decode, window=None, slots=SLOTS):
    """paged_decode by the list that a module makes, as `prove` calls it."""

    def run(q, k_cache, v_cache, table, lens):
        items = module.work_items(lens, k_cache.shape[2], slots, TILE, window)
        with poisoned_empty():
            return decode(q, k_cache, v_cache, table, lens, window=window, items=items)

    return run


# ---------------------------------------------------------------- the list


def test_a_list_by_hand():
    """The README's: 3 shares of 15 tiles are 5 each, so 12 tiles are three splits of 4."""
    lens = torch.tensor([1, 12, 1, 1])
    assert shares_of(1, 4) == 3
    assert bounds_by_length([1, 12, 1, 1], 1, 4)[1] == [(0, 4), (4, 8), (8, 12)]
    items, starts = work_items(lens, 1, 4, 1)
    assert starts.tolist() == [0, 1, 4, 5, 6]
    assert items[:3].tolist() == [[1, 0, 4, 1], [1, 4, 8, 2], [1, 8, 12, 3]]
    assert items[3:6, 0].tolist() == [0, 2, 3] and items[6:, 0].tolist() == [-1]


@pytest.mark.parametrize("window", [None, 1, 40])
def test_the_list_is_its_definition(window):
    """Every split once, at the place that its range says, the longest first, idle items last."""
    for _ in range(60):
        count, kv_heads, slots = (random.randint(1, most) for most in (20, 8, 300))
        lengths = [random.choice((0, 1, 16, 63, 64, 65, 500, 4000)) for _ in range(count)]
        items, starts = work_items(torch.tensor(lengths), kv_heads, slots, TILE, window)
        assert len(items) == count + shares_of(kv_heads, slots)
        live = [row for row in items.tolist() if row[0] >= 0]
        assert items[len(live) :, 0].eq(-1).all() and len(live) == starts[-1]
        sizes = [end - begin for _, begin, end, _ in live]
        assert sizes == sorted(sizes, reverse=True)
        by_place = {place: (begin, end, b) for b, begin, end, place in live}
        want = bounds_by_length(lengths, kv_heads, slots, TILE, window)
        for b, bounds in enumerate(want):
            got = [by_place[place] for place in range(starts[b], starts[b + 1])]
            assert got == [(begin, end, b) for begin, end in bounds]


def test_bounds_by_length_hold_every_key_once():
    for _ in range(100):
        lengths = [random.randint(0, 900) for _ in range(random.randint(1, 9))]
        window = random.choice((None, 1, 100))
        bounds = bounds_by_length(lengths, 2, 40, TILE, window)
        first = [0 if window is None else max(n - window, 0) // TILE * TILE for n in lengths]
        for n, start, cut in zip(lengths, first, bounds):
            assert [key for begin, end in cut for key in range(begin, end)] == list(range(start, n))
        tiles = sum(-(-(n - start) // TILE) for n, start in zip(lengths, first))
        share = max(1, -(-tiles // shares_of(2, 40))) * TILE
        assert all(end - begin <= share for cut in bounds for begin, end in cut)


def test_when_a_list_pays():
    assert pays_by_length([32768] + [512] * 63, 8, 264)
    assert not pays_by_length([4096] * 20, 8, 264) and not pays_by_length([4096], 8, 264)
    assert not pays_by_length([], 8, 264) and not pays_by_length([0, 0], 8, 264)
    assert not pays_by_length([100, 90, 80], 8, 264)  # the mean is 0.9 of the longest
    # No program has more than a slot's share: 2000 sequences fill the slots many times.
    assert not pays_by_length([4096, *[1024] * 2000], 8, 264)


# ---------------------------------------------------------------- the kernels over the list


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.sample(4)
def test_decode_by_a_list(name, seed, proof):
    errors = prove(listed(), decoded, inputs_of(BATCHES[name], seed))
    proof.record(decode_kernel, errors)
    proof.record(combine_ranges_kernel, errors)


@pytest.mark.parametrize("window", [1, 16, 33])
@pytest.mark.sample(2)
def test_a_window_hides_what_would_be_whole_items(window, seed, proof):
    inputs = inputs_of([3, 290, 0, 50], seed, block_size=4)
    fast = listed(window=window)
    proof.record(decode_kernel, prove(fast, partial(decoded, window=window), inputs))


@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((6, 1, 24, 40), torch.float32),
        ((4, 2, 80, 80), torch.bfloat16),
        ((8, 1, 128, 64), torch.float16),
    ],
)
@pytest.mark.sample(1)
def test_any_heads_by_a_list(heads, dtype, seed, proof):
    inputs = inputs_of([17, 120, 5], seed, heads=heads, dtype=dtype)
    proof.record(decode_kernel, prove(listed(), decoded, inputs))


def test_more_splits_than_the_merge_takes_at_once(seed):
    """40 splits of one sequence, and LSEs beside those of PyTorch."""
    inputs = inputs_of([640, 1], seed, heads=(2, 1, 16, 16))
    prove(listed(slots=64), decoded, inputs)
    items = work_items(inputs[4], 1, 64, TILE)
    assert items.starts.tolist() == [0, 40, 41]
    out, lse = launch.launch_decode(*inputs, items=items)
    want = launch.launch_decode(*inputs, num_splits=1)
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5)


def test_nothing_is_written_beside_the_results_of_a_list(seed):
    inputs = inputs_of([20, 133, 0], seed, block_size=5, heads=(6, 2, 20, 12))
    items = work_items(inputs[4], 2, SLOTS, TILE)
    with guarded_empty() as checks:
        out = paged_decode(*inputs, items=items)
    assert len(checks) == 4 and out.isfinite().all() and (out[2] == 0).all()


# ---------------------------------------------------------------- a step, and a graph


def step_of(lengths, seed, plans):
    """q, caches and the batch of one new token a sequence."""
    q, k_cache, v_cache, table, _ = inputs_of(lengths, seed)
    tables = [[int(x) for x in row if x < len(k_cache)] for row in table]
    batch = new_batch([([1], n - 1) for n in lengths], 16, DEVICE, tables)
    return (q, k_cache, v_cache), replace(batch, plans=plans)


def test_all_layers_of_a_step_share_a_list(seed, monkeypatch):
    made = []
    monkeypatch.setattr(plan, "work_items", lambda *x: made.append(x) or work_items(*x))
    tensors, batch = step_of([9, 300, 33], seed, {})
    outs = [optimized.decode(*tensors, batch, 0.25, window) for window in (None, 40, None, 40)]
    assert len(made) == 2 and len(batch.plans) == 2
    assert_same_bits(outs[0], outs[2])
    assert_same_bits(outs[1], outs[3])
    _, equal = step_of([9, 300, 33], seed, None)
    for out, window in zip(outs, (None, 40)):
        want = optimized.decode(*tensors, equal, 0.25, window)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_a_graph_makes_the_list_of_the_lengths_that_it_finds(seed):
    """Captured over no key at all, replayed over two batches. A list that was made before the graph
    would stay that of the first.
    """
    tensors, batch = step_of([9, 300, 33], seed, None)
    q, k_cache, v_cache = tensors
    lens, now = batch.context_lens.clone(), batch.context_lens
    now.zero_()
    graph, stale = SimulatedGraph(), SimulatedGraph()
    known = replace(batch, plans={})
    optimized.decode(*tensors, known, 0.25, None)  # a warm-up, which makes the list
    out = graph.record(lambda: optimized.decode(*tensors, replace(batch, plans={}), 0.25, None))
    kept = stale.record(lambda: optimized.decode(*tensors, known, 0.25, None))
    for lengths in (lens, lens.flip(0).clamp(max=9), lens.clamp(max=1)):
        now.copy_(lengths)
        graph.replay()
        want = paged_decode(q, k_cache, v_cache, batch.block_table, lengths, 0.25, num_splits=1)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        stale.replay()
        assert not torch.allclose(kept, want, atol=1e-3)


# ---------------------------------------------------------------- bad input


def test_a_list_that_does_not_fit_is_refused(seed):
    inputs = inputs_of([9, 20], seed)
    items, starts = work_items(inputs[4], 2, SLOTS, TILE)
    for wrong in (
        WorkItems(items.long(), starts),
        WorkItems(items[:, :3], starts),
        WorkItems(items[:, 0], starts),
        WorkItems(items, starts[:-1]),
        WorkItems(items.repeat(1, 2)[:, ::2], starts),
    ):
        with pytest.raises(
            ValueError, match=r"items: got .*; accepted: what work_items gives for 2"
        ):
            paged_decode(*inputs, items=wrong)
    for options in (dict(num_splits=2), dict(split_size=16)):
        with pytest.raises(ValueError, match="items, num_splits, split_size: got a list") as error:
            paged_decode(*inputs, items=WorkItems(items, starts), **options)
        assert "\n" not in str(error.value)


def test_a_range_without_places_is_zero(seed):
    partial_out, partial_lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    starts = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
    moved = (x.to(DEVICE) for x in (partial_out, partial_lse, starts))
    out, lse = combine_ranges(*moved, torch.float32)
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -torch.inf).all()
    weights = partial_lse.softmax(-1)
    want = (weights[..., None] * partial_out).sum(1)
    torch.testing.assert_close(out[1].cpu(), want)


def test_keys_of_a_tile_are_those_of_the_kernel(seed):
    inputs = inputs_of([9, 20], seed)
    group = inputs[0].shape[1] // inputs[1].shape[2]
    sizes = launch.sizes_of(group, 16, 16, launch.has_matrix_units(inputs[0]))
    assert keys_of_tile(*inputs[:3]) == sizes["BLOCK_N"]
