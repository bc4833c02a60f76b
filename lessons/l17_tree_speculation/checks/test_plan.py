"""Proves trees by a list of splits: the list beside its plain definition, the kernel and the merge
over it, a step that uses it, and wrong versions that are found.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l10_flash_decoding.splits import WorkItems, bounds_by_length, pays_by_length
from lessons.l17_tree_speculation import optimized, runner
from lessons.l17_tree_speculation.lab.testing import BRANCHES, DEVICE, tree_inputs
from lessons.l17_tree_speculation.naive import path_attention
from lessons.l17_tree_speculation.optimized import LESSON_17, tree_attention, tree_kernel
from lessons.l17_tree_speculation.runner import with_trees
from lessons.l17_tree_speculation.trees import kernel, plan
from lessons.l17_tree_speculation.trees.plan import places_by_token, reach_of, tree_items
from lessons.l17_tree_speculation.trees.tree import chain, full_tree
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import guarded_empty, poisoned_empty

SLOTS, TILE = 12, 64  # of a small machine; keys of a tile in float32 and 16 columns
BATCHES = {  # the tree of each sequence, and tokens with the tree's
    "one giant": ([BRANCHES, full_tree([2, 2]), chain(0)], [30, 420, 64]),
    "a giant that comes last": ([chain(0), BRANCHES, chain(3)], [1, 70, 390]),
    "all equal": ([BRANCHES] * 3, [130] * 3),
    "trees alone": ([BRANCHES, full_tree([3, 2])], [6, 10]),
    "several tiles of rows": ([full_tree([3, 2, 2]), chain(1)], [330, 129]),
}


def inputs_of(name, seed, **options):
    trees, lengths = BATCHES[name] if isinstance(name, str) else name
    return tree_inputs(trees, [0] * len(trees), lengths, block_size=16, seed=seed, **options)


def listed(made_by=plan, window=None, slots=SLOTS, attention=tree_attention):
    """tree_attention by the list of a module, into results that hold NaN before."""

    def run(*inputs):
        q, k_cache, _, _, starts, lens, _ = inputs
        most = int(starts.diff().max())
        programs = k_cache.shape[2] * optimized.row_tiles_of(most, q.shape[1] // k_cache.shape[2])
        where = lens, starts, len(q), programs, slots, TILE, reach_of(window, most)
        items = made_by.tree_items(*where)
        with poisoned_empty():
            return attention(*inputs, window=window, items=items)

    return run


# ---------------------------------------------------------------- the list


def test_places_by_hand():
    """Sequence 0 has two splits and two new tokens, sequence 1 one split and three."""
    bounds = [[(0, 64), (64, 90)], [(0, 40)]]
    want = [range(0, 2), range(2, 4), range(4, 5), range(5, 6), range(6, 7)]
    assert places_by_token(bounds, [2, 3]) == want


@pytest.mark.parametrize("reach", [None, 1, 90])
def test_the_list_is_its_definition(reach):
    """Every split of every sequence once; every new token as many places as its definition says;
    none for padding; and no place beyond the room that a launch makes.
    """
    for _ in range(60):
        count, programs, slots = (random.randint(1, most) for most in (12, 8, 300))
        new = [random.randint(1, 9) for _ in range(count)]
        lengths = [n + random.choice((0, 1, 63, 64, 65, 500, 4000)) for n in new]
        starts = torch.tensor([0, *new]).cumsum(0).int()
        padding = random.choice((0, 3))
        where = starts, sum(new) + padding, programs, slots, TILE, reach
        items, places = tree_items(torch.tensor(lengths), *where)
        bounds = bounds_by_length(lengths, programs, slots, TILE, reach)
        live = [row for row in items.tolist() if row[0] >= 0]
        found = {(b, split): (begin, end) for b, begin, end, split in live}
        assert len(found) == len(live)
        assert found == {(b, s): x for b, cut in enumerate(bounds) for s, x in enumerate(cut)}
        edges = places.tolist()
        got = [range(*x) for x in pairwise(edges)]
        assert got[: sum(new)] == places_by_token(bounds, new)
        assert all(len(x) == 0 for x in got[sum(new) :])
        assert edges[-1] <= max(new) * len(items)


# ---------------------------------------------------------------- the kernel over the list


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.sample(2)
def test_trees_by_a_list(name, seed, proof):
    inputs, table = inputs_of(name, seed)
    proof.record(tree_kernel, prove(listed(), path_attention, (*inputs, table)))


@pytest.mark.parametrize("window", [1, 5, 100])
@pytest.mark.sample(1)
def test_windows_by_a_list(window, seed, proof):
    """Windows that end among the new keys, in the tile before them, and among old keys alone."""
    inputs, table = inputs_of("one giant", seed)
    plain = partial(path_attention, window=window)
    proof.record(tree_kernel, prove(listed(window=window), plain, (*inputs, table)))


@pytest.mark.parametrize(
    "heads, dtype",
    [((6, 1, 24, 40), torch.float32), ((4, 2, 80, 80), torch.bfloat16)],
)
@pytest.mark.sample(1)
def test_any_heads_by_a_list(heads, dtype, seed, proof):
    inputs, table = inputs_of(([BRANCHES, chain(2)], [200, 40]), seed, heads=heads, dtype=dtype)
    proof.record(tree_kernel, prove(listed(), path_attention, (*inputs, table)))


def test_nothing_is_written_beside_the_results_of_a_list(seed):
    inputs, table = inputs_of("one giant", seed, heads=(6, 2, 20, 12))
    with guarded_empty() as checks:
        out = listed()(*inputs, table)
    assert len(checks) == 4 and out.isfinite().all()


# ---------------------------------------------------------------- a step


def step_of(trees, held, seed):
    """q, caches and the batch of a step: a tree of each sequence, after so many tokens."""
    lengths = [len(tree) + before for tree, before in zip(trees, held)]
    inputs, _ = inputs_of((trees, lengths), seed)
    blocks = len(inputs.k_cache)
    tables = [[int(x) for x in row if x < blocks] for row in inputs.block_table]
    chunks = [([0] * len(tree), before) for tree, before in zip(trees, held)]
    batch = with_trees(new_batch(chunks, 16, DEVICE, tables), trees)
    return inputs[:3], batch


def test_all_layers_of_a_step_share_a_list(seed, monkeypatch):
    made = []
    monkeypatch.setattr(plan, "tree_items", lambda *x: made.append(x) or tree_items(*x))
    tensors, batch = step_of([BRANCHES, full_tree([2, 2]), chain(0)], [20, 300, 33], seed)
    known = replace(batch, plans={})
    outs = [LESSON_17.prefill(*tensors, known, 0.25, window) for window in (None, 40, None, 40)]
    assert len(made) == 2 and len(known.plans) == 2
    for one, again, window in zip(outs, outs[2:], (None, 40)):
        assert_same_bits(one, again)
        want = LESSON_17.prefill(*tensors, batch, 0.25, window)
        torch.testing.assert_close(one, want, atol=1e-5, rtol=1e-5)


def test_padding_of_a_graph_is_no_work(seed):
    """A sequence without tokens and rows after the last: what a captured step is filled with."""
    inputs, table = inputs_of("one giant", seed)
    want = tree_attention(*inputs, table)
    q, k_cache, v_cache, blocks, starts, lens = inputs
    q = torch.cat([q, q[:2]])
    table = torch.cat([table, table[:2] * 0])
    starts, lens = torch.cat([starts, starts[-1:]]), torch.cat([lens, lens[:1] * 0])
    blocks = torch.cat([blocks, blocks[:1]])
    run = listed(attention=partial(tree_attention, max_seqlen_q=9))
    got = run(q, k_cache, v_cache, blocks, starts, lens, table)
    torch.testing.assert_close(got[:-2], want, atol=1e-5, rtol=1e-5)
    assert (got[-2:] == 0).all()


@pytest.mark.parametrize(
    "kinds, held, is_listed",
    [
        ([BRANCHES] * 64, [32768] + [512] * 63, True),
        ([BRANCHES] * 64, [512] * 64, False),
        ([BRANCHES, *[None] * 63], [32768] + [512] * 63, True),
        ([5, *[BRANCHES] * 63], [32768] + [512] * 63, False),  # a prompt before trees
        ([*[BRANCHES] * 63, 5], [512] * 63 + [32768], False),  # the long one is a prompt
    ],
)
def test_when_a_step_of_trees_has_a_list(kinds, held, is_listed, monkeypatch):
    monkeypatch.setattr(runner, "list_pays", on_an_h200)
    trees = [None if isinstance(kind, int) else kind for kind in kinds]
    new = [kind if isinstance(kind, int) else len(kind or "1") for kind in kinds]
    chunks = [([0] * count, before) for count, before in zip(new, held)]
    tables = [list(range(-(-(n + before) // 4096))) for n, before in zip(new, held)]
    batch = with_trees(new_batch(chunks, 4096, "cpu", tables), trees, object())
    assert (batch.plans is not None) is is_listed


def on_an_h200(pool, context_lens, most_nodes):
    """`list_pays` for Llama-3-8B's heads."""
    return pays_by_length(context_lens, 8 * optimized.row_tiles_of(most_nodes, 4), 264)


# ---------------------------------------------------------------- bad input and wrong versions


def test_a_list_that_does_not_fit_is_refused(seed):
    inputs, table = inputs_of("one giant", seed)
    lens, starts = inputs.context_lens, inputs.cu_seqlens_q
    items, places = tree_items(lens, starts, len(table), 2, SLOTS, TILE, None)
    for wrong in (WorkItems(items, places[:-1]), WorkItems(items.long(), places)):
        with pytest.raises(ValueError, match="items: got"):
            tree_attention(*inputs, table, items=wrong)
    with pytest.raises(ValueError, match="items, num_splits, split_size: got a list"):
        tree_attention(*inputs, table, num_splits=2, items=WorkItems(items, places))


WRONG_LISTS = {
    "places of sequences, not of tokens": ("splits.cumsum(0)", "splits.clamp(max=1).cumsum(0)"),
    "the neighbour's number of splits": ("starts.diff()[", "starts.diff().roll(1)["),
    "items by their place": ("items[:, 3] - starts[owner]", "items[:, 3]"),
    "tokens counted from 1": ("token, right=True", "token, right=False"),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_a_wrong_list_is_found(name, seed, tmp_path):
    """The list is held against its definition; a launch over it might write anywhere."""
    buggy = with_bug(plan, tmp_path, *WRONG_LISTS[name])
    lengths, new = [30, 420, 64], [6, 7, 1]
    starts = torch.tensor([0, *new]).cumsum(0).int()
    bounds = bounds_by_length(lengths, 2, SLOTS, TILE)

    def is_right(module):
        where = starts, sum(new), 2, SLOTS, TILE, None
        items, places = module.tree_items(torch.tensor(lengths), *where)
        edges = places.tolist()
        numbers = sorted((b, split) for b, _, _, split in items.tolist() if b >= 0)
        return [range(*x) for x in pairwise(edges)] == places_by_token(bounds, new) and numbers == [
            (b, s) for b, cut in enumerate(bounds) for s in range(len(cut))
        ]

    assert is_right(plan) and not is_right(buggy)


WRONG_KERNELS = {
    "every token at the first one's places": ("places_ptr + token)", "places_ptr + token * 0)"),
    "every head at the first one's places": ("head.to(tl.int64) * num_places", "head.to(tl.int64)"),
    "old tiles counted up to a new key": ("tl.minimum(held, end) - begin", "end - begin"),
    "new keys walked from the split's begin": ("range(new, end,", "range(begin, end,"),
    "without the last old tile": ("tl.range(begin, new,", "tl.range(begin, new - BLOCK_N,"),
    "new keys walked by the old tile": (
        "range(new, end, BLOCK_NEW",
        "range(new, end, BLOCK_N",
    ),
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_a_wrong_kernel_is_found(name, seed, tmp_path, monkeypatch):
    buggy = with_bug(kernel, tmp_path, *WRONG_KERNELS[name])
    monkeypatch.setattr(optimized, "tree_kernel", buggy.tree_kernel)
    inputs, table = inputs_of("one giant", seed)
    with pytest.raises(NotEquivalent):
        prove(listed(), path_attention, (*inputs, table))


def test_a_window_that_forgets_the_depth_is_found(seed, tmp_path, monkeypatch):
    buggy = with_bug(kernel, tmp_path, "level > 0, level + held - key", "level > 0, 1 + held - key")
    monkeypatch.setattr(optimized, "old_in_window", buggy.old_in_window)
    inputs, table = inputs_of("one giant", seed)
    with pytest.raises(NotEquivalent):
        prove(listed(window=100), partial(path_attention, window=100), (*inputs, table))
