"""Wrong lists of splits, wrong ranges of the merge and stale items are found by the tests of
test_plan.py.
"""

from functools import partial

import pytest
import torch

from lessons.l10_flash_decoding import splits
from lessons.l10_flash_decoding.splits import (
    WorkItems,
    work_items,
)
from lessons.l12_paged_kv.checks.test_plan import SLOTS, TILE, inputs_of, listed
from lessons.l12_paged_kv.kernels import hooks, launch, paged, plan
from lessons.l12_paged_kv.lab.testing import DEVICE, decoded
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug

# NumPy, the interpreter's engine, warns of what is meant: log2(0) of an empty split is −inf.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
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
