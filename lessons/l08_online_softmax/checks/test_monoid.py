"""Partial results merge in any cut, any order and any tree: properties on random rows.

In a file of their own, because they need hypothesis, which a machine with a GPU may not have, and
no kernel.
"""

import itertools
import math
from functools import reduce

import pytest
import torch

from lessons.l08_online_softmax import naive
from lessons.l08_online_softmax.naive import (
    Partial,
    finish,
    from_scores,
    from_state,
    identity,
    merge,
    merge_tree,
)

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

INF = math.inf

SCORES = st.one_of(
    st.floats(-60, 60),
    st.floats(-1e300, 1e300),
    st.sampled_from([-INF, -INF, 0.0, 709.0, 710.0, 1e4, -1e4]),
)
ROWS = st.lists(SCORES, min_size=0, max_size=24)
PARTS = st.lists(ROWS, min_size=1, max_size=7)
no_deadline = settings(deadline=None, max_examples=80)


def partial_of(scores, start=0):
    """The Partial of a list of scores; the value of score number i is i, mixed."""
    values = torch.tensor(
        [[math.sin(7 * (start + i)), 1.0] for i in range(len(scores))], dtype=torch.float64
    ).reshape(-1, 2)
    return from_scores(torch.tensor(scores, dtype=torch.float64), values)


def same(a, b):
    """Two Partials of the same scores: m equal to the bit, the rest up to rounding, and nothing
    NaN.
    """
    assert torch.equal(a.m, b.m)
    torch.testing.assert_close(a[1:], b[1:], atol=1e-12, rtol=1e-12)
    for x, y in zip(finish(a), finish(b)):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)  # fails for NaN


@no_deadline
@given(ROWS, ROWS, ROWS)
def test_merge_is_a_commutative_monoid(x, y, z):
    a, b, c = partial_of(x), partial_of(y, 30), partial_of(z, 60)
    same(merge(merge(a, b), c), merge(a, merge(b, c)))
    nothing = identity((), 2, torch.float64)
    for left, right in ((merge(a, b), merge(b, a)), (merge(a, nothing), a), (merge(nothing, a), a)):
        assert all(torch.equal(p, q) for p, q in zip(left, right))  # to the bit


@no_deadline
@given(PARTS, st.randoms(use_true_random=False))
def test_any_cut_any_order_any_tree(parts, random):
    """A chain, a tree, a shuffled chain, one score at a time, and the whole row at once."""
    starts = [0, *itertools.accumulate(map(len, parts))]
    cut = [partial_of(part, start) for part, start in zip(parts, starts)]
    whole = partial_of([score for part in parts for score in part])
    shuffled = random.sample(cut, len(cut))
    single = [
        partial_of([score], start + i)
        for part, start in zip(parts, starts)
        for i, score in enumerate(part)
    ]
    for merged in (
        reduce(merge, cut),
        merge_tree(cut),
        reduce(merge, shuffled),
        reduce(merge, [identity((), 2, torch.float64), *single]),
    ):
        same(merged, whole)


@no_deadline
@given(PARTS)
def test_a_state_is_a_partial(parts):
    """(out, lse) says as much as (m, l, acc): but a state rounds e^lse to the unit of lse, so
    scores here stay below 1e4.
    """
    parts = [
        [max(-1e4, min(score, 1e4)) if score > -INF else score for score in part] for part in parts
    ]
    cut = [partial_of(part, 30 * i) for i, part in enumerate(parts)]
    states = [finish(part) for part in cut]
    for merged in (
        finish(reduce(merge, itertools.starmap(from_state, states))),
        naive.merge_states(*(torch.stack(x) for x in zip(*states))),
    ):
        for x, y in zip(merged, finish(reduce(merge, cut))):
            torch.testing.assert_close(x, y, atol=1e-10, rtol=1e-10)


WRONG_MERGES = {
    "frozen max": lambda a, b: Partial(
        a.m, a.l + b.l * (b.m - a.m).exp(), a.acc + b.acc * (b.m - a.m).exp()[..., None]
    ),
    "stale acc": lambda a, b: merge(a, b)._replace(
        acc=a.acc + merge(a, b).acc - a.acc * (a.m - torch.maximum(a.m, b.m)).exp()
    ),
    "stale l": lambda a, b: merge(a, b)._replace(l=a.l + b.l),
    "nan where nothing is seen": lambda a, b: merge(a, b)._replace(
        l=a.l * (a.m - torch.maximum(a.m, b.m)).exp() + b.l * (b.m - torch.maximum(a.m, b.m)).exp()
    ),
    "an average": lambda a, b: Partial((a.m + b.m) / 2, (a.l + b.l) / 2, (a.acc + b.acc) / 2),
}


@pytest.mark.parametrize("name", WRONG_MERGES)
def test_a_wrong_merge_is_no_monoid(name):
    x, y, z = partial_of([1.0, 3.0]), partial_of([-INF]), partial_of([800.0, 2.0], 5)
    wrong = WRONG_MERGES[name]
    with pytest.raises(AssertionError):
        for a, b in itertools.product((x, y, z), repeat=2):
            same(wrong(a, b), merge(a, b))
