"""Wrong lists of splits, wrong ranges of the merge and stale items are found by the tests of
test_plan.py. Then latents by a list of splits, right and wrong.
"""

from functools import partial

import pytest
import torch

from lessons.l10_flash_decoding import splits
from lessons.l10_flash_decoding.splits import (
    WorkItems,
    work_items,
)
from lessons.l12_paged_kv.checks.test_plan import BATCHES, SLOTS, TILE, inputs_of, listed
from lessons.l12_paged_kv.kernels import hooks, latents, launch, paged, plan
from lessons.l12_paged_kv.kernels.latents import paged_mla_decode, paged_mla_kernel
from lessons.l12_paged_kv.lab.testing import DEVICE, decoded
from lessons.l12_paged_kv.lab.testing import paged as pages_of
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import poisoned_empty

WRONG_LISTS = {  # name: (the code as it is, the code with the bug)
    "an item twice": (
        "(place - starts[owner]) * size",
        "(place - starts[owner]).clamp(max=1) * size",
    ),
    "the last tile lost": (
        "size[owner] * block_n, length[owner])",
        "size[owner] * block_n, (length - 1)[owner] // block_n * block_n)",
    ),
    "splits that leave a tile out": (
        "    splits = cdiv(tiles, size)\n",
        "    splits = cdiv(tiles, share + 1)\n",
    ),
    "the neighbour's sequence": ("stack([owner.", "stack([owner.roll(1)."),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_a_wrong_list_is_found(name, seed, tmp_path):
    """Of lengths of as many pages, so that no bug reads a page that does not exist."""
    buggy = with_bug(splits, tmp_path, *WRONG_LISTS[name])
    with pytest.raises(NotEquivalent):
        prove(listed(buggy, slots=24), decoded, inputs_of([300, 303, 301, 302], seed))


def test_a_list_of_hidden_keys_is_found(tmp_path):
    """A list that forgets the window gives the right result, because the kernel masks. It is as
    long as without one.
    """
    buggy = with_bug(splits, tmp_path, "(length - window).clamp(min=0)", "length.clamp(max=0)")
    lens = torch.tensor([23, 300, 33, 5])
    assert work_items(lens, 2, SLOTS, TILE, 60).starts[-1] == 5  # 2, 4, 3, 1 tiles in shares of 3
    assert buggy.work_items(lens, 2, SLOTS, TILE, 60).starts[-1] == 6


WRONG_RANGES = {
    "the last split of each range lost": ("sequence + 1),", "sequence + 1) - 1,"),
    "the first split of each range lost": (
        "starts_ptr + sequence),",
        "starts_ptr + sequence) + 1,",
    ),
    "one split of the next sequence too": ("sequence + 1),", "sequence + 1) + 1,"),
    "all ranges from the first place": ("tl.load(starts_ptr + sequence),", "0,"),
    "the first head's results": ("partial_lse_ptr + head * num_places", "partial_lse_ptr"),
}


@pytest.mark.parametrize("name", WRONG_RANGES)
def test_a_wrong_range_is_found(name, seed, tmp_path, monkeypatch):
    buggy = with_bug(plan, tmp_path, *WRONG_RANGES[name])
    monkeypatch.setattr(launch, "combine_ranges", buggy.combine_ranges)
    with pytest.raises(NotEquivalent):
        prove(listed(), decoded, inputs_of([23, 300, 33, 5], seed))


def with_stale_items(lens):
    """A list whose idle items hold what an earlier step left in them: the places of live ones.
    There are so many that some of them write last, in whatever order programs run.
    """
    items, starts = work_items(lens, 2, 60, TILE)
    idle = items[:, 0] < 0
    assert idle.sum() > 3 * starts[-1]
    items[idle, 1] = 0
    items[idle, 2] = 7
    items[idle, 3] = torch.arange(int(idle.sum()), dtype=torch.int32, device=DEVICE) % starts[-1]
    return WorkItems(items, starts)


def test_idle_items_are_not_run(seed):
    inputs = inputs_of([9, 33, 20], seed)
    items = with_stale_items(inputs[4])
    prove(partial(paged_decode, items=items), decoded, inputs)


WRONG_HOOKS = {
    "stale items run": ("tl.load(item).to(tl.int64)", "tl.maximum(tl.load(item), 0).to(tl.int64)"),
    "every item from the first key": (
        "length, tl.load(item + 1), tl.load(item + 2)",
        "length, 0, tl.load(item + 2)",
    ),
    "the number of an item as its place": (
        "place = tl.load(item + 3)",
        "place = tl.program_id(1)",
    ),
}


@pytest.mark.parametrize("name", WRONG_HOOKS)
def test_a_wrong_hook_is_found(name, seed, tmp_path, monkeypatch):
    buggy = with_bug(hooks, tmp_path, *WRONG_HOOKS[name])
    monkeypatch.setattr(launch, "listed_split", buggy.listed_split)
    inputs = inputs_of([9, 33, 20], seed)
    with pytest.raises(NotEquivalent):
        prove(partial(paged_decode, items=with_stale_items(inputs[4])), decoded, inputs)


def test_partial_results_of_one_head_are_found(seed, tmp_path, monkeypatch):
    buggy = with_bug(paged, tmp_path, "place + head * tl.num_programs(1)", "place + head")
    monkeypatch.setattr(launch, "decode_kernel", buggy.decode_kernel)
    with pytest.raises(NotEquivalent):
        prove(listed(), decoded, inputs_of([9, 300, 33], seed))


# ---------------------------------------------------------------- latents

HEADS = 20  # two blocks of heads, the second one in part


def latents_of(lengths, seed, block_size=16):
    """q, latents, table, lengths; pages in random order."""
    heads = (HEADS, 1, 48, 1)
    q, rows, _, table, lens = pages_of(
        lengths, block_size=block_size, heads=heads, seed=seed
    ).decode
    return q, rows[:, :, 0], table, lens


def absorbed(q, rows, table, lens):
    cache = rows[:, :, None]
    return decoded(q, cache, cache[..., :32], table, lens, softmax_scale=0.2)


def latents_listed(items_of=work_items, slots=SLOTS):
    """By a list, into results that hold NaN before."""

    def run(q, rows, table, lens):
        items = items_of(lens, 2, slots, TILE, None)
        tiles, how = latents.Tiles(16, TILE, 4, 1), dict(softmax_scale=0.2, kv_lora_rank=32)
        with poisoned_empty():
            return paged_mla_decode(q, rows, table, lens, tiles=tiles, items=items, **how)

    return run


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.sample(3)
def test_latents_by_a_list(batch, seed, proof):
    inputs = latents_of(BATCHES[batch], seed)
    proof.record(paged_mla_kernel, prove(latents_listed(), absorbed, inputs))


@pytest.mark.parametrize("block_size, slots", [(1, 5), (5, 40), (64, 9)])
def test_pages_and_machines_of_any_size(block_size, slots, seed, proof):
    inputs = latents_of([3, 190, 0, 50, 17], seed, block_size)
    proof.record(paged_mla_kernel, prove(latents_listed(slots=slots), absorbed, inputs))


def test_idle_items_of_latents_are_not_run(seed):
    prove(
        latents_listed(lambda lens, *_: with_stale_items(lens)),
        absorbed,
        latents_of([9, 33, 20], seed),
    )


LATENT_SLIPS = {
    "partial results of one head": ("place + head * tl.num_programs(1)", "place + head"),
    "every item from the first key": ("range(begin, end,", "range(0, end,"),
    "without the last key of a split": ("in_split = key < end", "in_split = key < end - 1"),
    "another sequence's query": ("q_ptr + sequence *", "q_ptr + tl.program_id(2) *"),
}


@pytest.mark.parametrize("name", LATENT_SLIPS)
def test_a_kernel_of_latents_that_reads_its_list_wrongly_is_found(
    name, seed, tmp_path, monkeypatch
):
    buggy = with_bug(latents, tmp_path, *LATENT_SLIPS[name])
    monkeypatch.setattr(latents, "paged_mla_kernel", buggy.paged_mla_kernel)
    with pytest.raises(NotEquivalent):
        prove(latents_listed(), absorbed, latents_of([9, 150, 33], seed))


@pytest.mark.parametrize("name", WRONG_HOOKS)
def test_a_wrong_hook_of_latents_is_found(name, seed, tmp_path, monkeypatch):
    buggy = with_bug(hooks, tmp_path, *WRONG_HOOKS[name])
    monkeypatch.setattr(latents, "listed_split", buggy.listed_split)
    stale = latents_listed(lambda lens, *_: with_stale_items(lens))
    with pytest.raises(NotEquivalent):
        prove(stale, absorbed, latents_of([9, 33, 20], seed))


def test_a_list_that_does_not_fit_latents_is_refused(seed):
    q, rows, table, lens = latents_of([9, 20], seed)
    run = partial(paged_mla_decode, q, rows, table, lens, softmax_scale=0.2, kv_lora_rank=32)
    items = work_items(lens, 2, SLOTS, TILE, None)
    with pytest.raises(ValueError, match=r"items: got .*; accepted: what work_items gives for 2"):
        run(items=items._replace(starts=items.starts[:-1]))
    with pytest.raises(ValueError, match="items, num_splits, split_size: got a list, 2"):
        run(items=items, num_splits=2)
