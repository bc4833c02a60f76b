"""The best placement, found by trying all: the readable twin of placement.py, for a few experts."""

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

from lessons.l23_experts.ranks.placement import Placement


def all_placements(num_experts: int, num_slots: int, size: int) -> Iterator[Placement]:
    """Each way to fill the ranks' slots in which every expert is somewhere."""
    per_rank = num_slots // size
    fillings = list(combinations_with_replacement(range(num_experts), per_rank))
    for ranks in product(fillings, repeat=size):
        experts = tuple(expert for rank in ranks for expert in rank)
        if len(set(experts)) == num_experts:
            yield Placement(experts, size)


def best_placement(loads: Sequence[float], num_slots: int, size: int) -> Placement:
    """The one whose busiest rank has least to do."""
    placements = all_placements(len(loads), num_slots, size)
    return min(placements, key=lambda placement: max(placement.load_of_ranks(loads).counts))


def all_copies(num_experts: int, num_slots: int) -> Iterator[tuple[int, ...]]:
    """Each way to give num_slots copies to experts, one at least to each."""
    most = num_slots - num_experts + 1
    for counts in product(range(1, most + 1), repeat=num_experts):
        if sum(counts) == num_slots:
            yield counts


def in_turn_by_hand(chosen: list[list[int]], placement: Placement) -> list[list[int]]:
    """placement.in_turn, pair by pair. chosen: the experts of each token."""
    seen = [0] * len(placement.slots_of)
    slots = []
    for experts in chosen:
        row = []
        for expert in experts:
            own = placement.slots_of[expert]
            row.append(own[seen[expert] % len(own)])
            seen[expert] += 1
        slots.append(row)
    return slots
