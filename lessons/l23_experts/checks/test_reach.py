"""How many places a token reaches: by drawing tokens, by hand, and with planted bugs."""

import pytest
import torch

from lessons.l23_experts.ranks import reach
from lessons.l23_experts.ranks.reach import places_reached
from lessons.toolbox.proof.planted import with_bug

# experts, places, experts of a token, and of how many groups it takes how many
CASES = [(256, 32, 8), (8, 4, 2), (256, 4, 8, 8, 4), (288, 144, 8, 8, 4), (288, 18, 8, 8, 4)]


def drawn(num_experts, size, top_k, num_groups=1, top_groups=1, tokens=20_000) -> float:
    """Places that drawn tokens reach, in the mean."""
    generator = torch.Generator().manual_seed(23)
    groups = torch.rand(tokens, num_groups, generator=generator).topk(top_groups).indices
    allowed = torch.zeros(tokens, num_groups, dtype=torch.bool).scatter_(1, groups, True)
    scores = torch.rand(tokens, num_experts, generator=generator)
    allowed = allowed.repeat_interleave(num_experts // num_groups, dim=1)
    chosen = scores.masked_fill(~allowed, -1).topk(top_k).indices
    places = torch.zeros(tokens, size)
    places.scatter_(1, chosen // (num_experts // size), 1)
    return float(places.sum(1).mean())


@pytest.mark.parametrize("case", CASES)
def test_places_reached_by_drawing(case):
    assert places_reached(*case) == pytest.approx(drawn(*case), rel=0.01)


def test_places_reached_by_hand():
    """Two of four experts on two places: 2 of 6 choices are on one place, 4 on both."""
    assert places_reached(4, 2, 2) == pytest.approx((2 * 1 + 4 * 2) / 6)
    assert places_reached(8, 8, 3) == pytest.approx(3)  # one expert each: as many as experts
    assert places_reached(8, 1, 3) == 1
    assert round(places_reached(256, 32, 8), 2) == 7.27  # as reach.py says
    assert round(places_reached(256, 4, 8, 8, 4), 2) == 2.93
    limited = places_reached(256, 8, 8, 8, 4)  # a group a node: never more than four
    assert 3.5 < limited <= 4
    for wrong in ((9, 2, 2), (8, 2, 2, 3, 1), (8, 2, 5, 4, 2), (8, 2, 2, 2, 3)):
        with pytest.raises(ValueError, match="accepted"):
            places_reached(*wrong)


BUGS = {
    "the token's first expert only": (
        "comb(pool - sum(chosen), top_k) for",
        "comb(pool - sum(chosen), 1) for",
    ),
    "an expert may be chosen twice": (
        "comb(pool - sum(chosen), top_k) for",
        "comb(pool, top_k) * (1 - sum(chosen) / pool) ** top_k for",
    ),
    "groups that no token chose": ("combinations(own, top_groups)", "combinations(own, 1)"),
    "the router chooses in all groups": ("pool = top_groups * width", "pool = len(own) * width"),
    "a place of the first group only": ("max(first, g * width)", "max(first, 0)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path):
    buggy = with_bug(reach, tmp_path, *BUGS[bug])
    wanted = [places_reached(*case) for case in CASES]
    with pytest.raises((AssertionError, ValueError)):
        found = [buggy.places_reached(*case) for case in CASES]
        assert found == pytest.approx(wanted, rel=0.01)
