"""Redundant experts: the busiest experts get copies, and copies are placed so that ranks have equal
loads.

    placement = place(loads, num_slots=288, size=32)      # 256 experts, 32 copies, 9 on each rank
    slots = in_turn(chosen, placement.copies())           # which copy each pair of a token takes

A *slot* is a place for one expert's weights. Slots are numbered, those of rank 0 first, and each
rank has equally many. The router knows nothing of slots: it chooses experts, and a table says in
which slots an expert is. All copies have the same weights, so it does not matter to the output
which of them a token takes.

Two greedy steps, as in DeepSeek's EPLB:

    replicate   give the next copy to the expert with the largest load for each of its copies
    pack        heaviest copy first, onto the rank with the least load that has a free slot

`place_by_nodes` packs groups of experts onto nodes before that. A router that limits a token to
some groups (DeepSeek-V3: 4 of 8) then limits the nodes that its rows travel to.

Sources: DeepSeek-V3 (2024), section 3.4 (redundant experts); github.com/deepseek-ai/EPLB (2025),
eplb.py: replicate_experts, balanced_packing, rebalance_experts_hierarchical.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l23_experts.ranks.load import Load
from lessons.toolbox.model.arguments import check_whole, refuse


class Copies(NamedTuple):
    """Where an expert is. slots: [E, most copies], filled up with 0; counts: [E], how many of them
    are the expert's. Both int64.
    """

    slots: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Placement:
    """experts: of each slot the expert whose weights it has. size: how many ranks share the slots,
    equally. Raises ValueError if an expert is nowhere.
    """

    experts: tuple[int, ...]
    size: int

    def __post_init__(self):
        check_whole(size=self.size)
        numbers = set(self.experts)
        if numbers != set(range(len(numbers))):
            refuse("experts", self.experts, "all numbers from 0 on, each at least once")
        if len(self.experts) % self.size:
            refuse("size", self.size, f"a divisor of {len(self.experts)}, the slots")

    @property
    def per_rank(self) -> int:
        return len(self.experts) // self.size

    @cached_property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each expert."""
        found = [[] for _ in range(len(set(self.experts)))]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The experts in a rank's slots."""
        return self.experts[rank * self.per_rank : (rank + 1) * self.per_rank]

    @property
    def num_doubled(self) -> int:
        """Slots that gain nothing, because their rank has the same expert in another slot."""
        return sum(self.per_rank - len(set(self.of_rank(rank))) for rank in range(self.size))

    def copies(self, device: torch.device | str = "cpu") -> Copies:
        """The same as tensors."""
        most = max(map(len, self.slots_of))
        rows = [list(slots) + [0] * (most - len(slots)) for slots in self.slots_of]
        counts = torch.tensor([len(slots) for slots in self.slots_of], device=device)
        return Copies(torch.tensor(rows, device=device), counts)

    def load_of_ranks(self, loads: Sequence[float]) -> Load:
        """The ranks' loads if the copies of an expert share its load evenly. loads: of experts."""
        share = [load / len(slots) for load, slots in zip(loads, self.slots_of)]
        ranks = range(self.size)
        return Load(tuple(sum(share[expert] for expert in self.of_rank(rank)) for rank in ranks))


def in_order(num_experts: int, size: int) -> Placement:
    """Without copies: the first experts on the first rank, and so on."""
    return Placement(tuple(range(num_experts)), size)


# ---------------------------------------------------------------- how many copies, and where


def replicate(loads: Sequence[float], num_slots: int) -> list[int]:
    """How many copies each expert gets. No other choice has a smaller largest load of a copy."""
    copies = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        busiest = max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])
        copies[busiest] += 1
    return copies


def pack(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """The items of each pack, equally many in each. weights: of the items."""
    capacity = len(weights) // num_packs
    packs, totals = [[] for _ in range(num_packs)], [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        free = (number for number in range(num_packs) if len(packs[number]) < capacity)
        lightest = min(free, key=lambda number: totals[number])
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def place(loads: Sequence[float], num_slots: int, size: int) -> Placement:
    """Copies for the busiest experts, and slots for all. loads: of each expert, as measured;
    num_slots: experts and their copies together. Raises ValueError.
    """
    check_loads(loads, num_slots, size)
    copies = replicate(loads, num_slots)
    items = [expert for expert, count in enumerate(copies) for _ in range(count)]
    ranks = pack([loads[expert] / copies[expert] for expert in items], size)
    return Placement(tuple(items[item] for rank in ranks for item in sorted(rank)), size)


def place_by_nodes(
    loads: Sequence[float], num_slots: int, size: int, num_nodes: int, num_groups: int
) -> Placement:
    """As `place`, but an expert and its copies stay on the node that its group was packed onto.
    num_groups: equal groups of neighbouring experts, as the router's. Raises ValueError.
    """
    check_loads(loads, num_slots, size)
    check_whole(num_nodes=num_nodes, num_groups=num_groups)
    if num_groups % num_nodes or len(loads) % num_groups:
        refuse("num_groups", num_groups, f"a multiple of {num_nodes} that divides {len(loads)}")
    if size % num_nodes or num_slots % size:
        refuse("num_nodes", num_nodes, f"a divisor of {size}, the ranks")
    width = len(loads) // num_groups
    groups = [range(first, first + width) for first in range(0, len(loads), width)]
    experts: list[int] = []
    for node in pack([sum(loads[e] for e in group) for group in groups], num_nodes):
        own = [expert for group in sorted(node) for expert in groups[group]]
        own_loads = [loads[expert] for expert in own]
        inside = place(own_loads, num_slots // num_nodes, size // num_nodes)
        experts += [own[number] for number in inside.experts]
    return Placement(tuple(experts), size)


def check_loads(loads: Sequence[float], num_slots: int, size: int) -> None:
    """Raise ValueError unless so many slots hold all experts, equally many on each rank."""
    check_whole(num_slots=num_slots, size=size)
    if not len(loads) or min(loads) < 0:
        refuse("loads", loads, "numbers from 0 on, one for each expert")
    if num_slots < len(loads) or num_slots % size:
        refuse("num_slots", num_slots, f"{len(loads)} or more, and a multiple of {size}")


# ---------------------------------------------------------------- which copy a token takes


def by_number(chosen: Tensor, copies: Copies) -> Tensor:
    """Token t takes copy t % count of each of its experts: [T, k] -> [T, k] slots.

    Nothing has to be counted. But if an expert's tokens have numbers with a pattern, say all even
    ones, then one of its two copies gets all of them.
    """
    token = torch.arange(len(chosen), device=chosen.device)[:, None]
    return copies.slots[chosen, token % copies.counts[chosen]]


def in_turn(chosen: Tensor, copies: Copies) -> Tensor:
    """The i-th pair of an expert takes its copy i % count: [T, k] -> [T, k] slots.

    The copies of an expert get equal loads, up to one pair. Like the sort of step 3, it waits for
    no value, and every rank that has the same `chosen` finds the same slots.
    """
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.arange(len(expert), device=chosen.device)
    place = place - torch.searchsorted(expert, expert)  # where the expert's pairs begin
    slots = torch.empty_like(expert)
    slots[order] = copies.slots[expert, place % copies.counts[expert]]
    return slots.view_as(chosen)


# ---------------------------------------------------------------- moving


def moved(before: Placement, after: Placement) -> int:
    """How many experts have to travel to a rank that does not have them yet."""
    ranks = range(after.size)
    return sum(len(set(after.of_rank(rank)) - set(before.of_rank(rank))) for rank in ranks)


def renumbered(before: Placement, after: Placement) -> Placement:
    """`after` with its ranks in another order, so that more experts stay where they are: the same
    loads. Greedy: the two ranks with most experts in common first. EPLB does not do it.
    """
    ranks = range(after.size)
    old, new = ([set(p.of_rank(rank)) for rank in ranks] for p in (before, after))
    pairs = sorted(
        ((a, b) for a in ranks for b in ranks), key=lambda ab: -len(old[ab[0]] & new[ab[1]])
    )
    goes_to: dict[int, int] = {}  # rank of `before` -> the rank of `after` that takes its place
    for a, b in pairs:
        if a not in goes_to and b not in goes_to.values():
            goes_to[a] = b
    experts = [expert for rank in ranks for expert in after.of_rank(goes_to[rank])]
    return Placement(tuple(experts), after.size)
