"""Placements that few moves mend: each change by hand, never worse, never more moves."""

import random

import pytest

from lessons.l23_experts.ranks import mending
from lessons.l23_experts.ranks.mending import mended
from lessons.l23_experts.ranks.placement import Placement, in_order, moved, place
from lessons.toolbox.proof.planted import with_bug


def loads_of(number: int, count: int = 24) -> list[float]:
    draw = random.Random(number)
    return [draw.expovariate(1) ** 2 for _ in range(count)]


def test_one_exchange():
    """Loads 5, 4 | 1, 2: the 4 and the 1 change places, and both ranks have 6."""
    found = mended(in_order(4, 2), [5, 4, 1, 2], 2)
    assert found.load_of_ranks([5, 4, 1, 2]).counts == (6, 6)
    assert moved(in_order(4, 2), found) == 2
    assert mended(in_order(4, 2), [5, 4, 1, 2], 1) == in_order(4, 2)  # an exchange needs two


def test_one_copy_in_the_place_of_another():
    """Expert 2 has two copies and hardly a load; the busy expert 0 gets one of them."""
    before = Placement((0, 1, 2, 3, 2, 4), 3)
    found = mended(before, [9, 1, 1, 2, 2], 1)
    assert moved(before, found) == 1 and len(found.slots_of[0]) == 2
    assert max(found.load_of_ranks([9, 1, 1, 2, 2]).counts) < 7


def test_nothing_is_moved_without_a_gain():
    even = in_order(8, 4)
    assert mended(even, [1] * 8, 10) == even
    assert mended(even, loads_of(1, 8), 0) == even


@pytest.mark.parametrize("number", range(6))
def test_a_busiest_rank_never_gets_busier(number):
    before = place(loads_of(number), 32, 8)
    loads = loads_of(number + 100)
    at_first = last = max(before.load_of_ranks(loads).counts)
    for most in (1, 2, 5, 12):
        found = mended(before, loads, most)
        assert moved(before, found) <= most and set(found.experts) == set(range(24))
        busiest = max(found.load_of_ranks(loads).counts)
        assert busiest <= last
        last = busiest
    assert last < at_first


def test_few_moves_do_most_of_the_work():
    """In the mean over loads that have nothing to do with the old ones."""
    old, few, anew = [], [], []
    for number in range(5):
        before, loads = place(loads_of(number), 32, 8), loads_of(number + 100)
        fresh = place(loads, 32, 8)
        for found, values in ((before, old), (mended(before, loads, 12), few), (fresh, anew)):
            values.append(found.load_of_ranks(loads).imbalance)
        assert moved(before, fresh) > 12
    assert sum(old) - sum(few) > 0.6 * (sum(old) - sum(anew))


def test_bad_numbers_of_moves_are_refused():
    with pytest.raises(ValueError, match="most_moves: got -1"):
        mended(in_order(4, 2), [1, 2, 3, 4], -1)


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "the other ranks are forgotten": (
        "max(ranks[busiest] - gain, ranks[rank] + gain, *rest)",
        "ranks[busiest] - gain",
    ),
    "an exchange is one move": ("yield load, 2, experts", "yield load, 1, experts"),
    "the only copy is overwritten": (
        "if len(now.slots_of[expert]) == 1:",
        "if len(now.slots_of[expert]) > 1:",
    ),
    "a rank gets the same expert twice": ("or is_doubled(now, slot, other)", ""),
    "one change, and no more": (
        "now, left = Placement(tuple(experts), now.size), left - moves",
        "now, left = Placement(tuple(experts), now.size), 0",
    ),
    "copies as heavy as all of the expert": (
        "loads[expert] / len(now.slots_of[expert]) for",
        "loads[expert] for",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path):
    buggy = with_bug(mending, tmp_path, *BUGS[bug])
    with pytest.raises((AssertionError, ValueError)):
        for number in range(6):
            before, loads = place(loads_of(number), 32, 8), loads_of(number + 100)
            found = buggy.mended(before, loads, 12)
            assert moved(before, found) <= 12
            assert found == mended(before, loads, 12)
