"""A placement that was made for other loads, mended by few moves.

    better = mended(placement, loads, most_moves=32)

EPLB makes each placement anew, so nearly all experts travel (placement.py: moved). But only some
loads change much. Here each step makes the one change that lowers the busiest rank most, until it
gains nothing or the moves are used up:

    exchange    two experts of two ranks change places: two experts travel
    overwrite   a slot whose expert has another copy gets a copy of a busy expert: one travels

This is not in EPLB. It is a local search, so it ends in a placement that no single change improves,
which need not be the best.
"""

from collections.abc import Iterator, Sequence

from lessons.l23_experts.ranks.placement import Placement
from lessons.toolbox.model.arguments import check_whole

Change = tuple[float, int, list[int]]  # load of the busiest rank, experts that travel, the slots


def mended(before: Placement, loads: Sequence[float], most_moves: int) -> Placement:
    """`before` with at most so many experts moved, and a busiest rank that has less to do, if any
    change helps. loads: of each expert, as measured now.
    """
    check_whole(0, most_moves=most_moves)
    now, left = before, most_moves
    while left:
        ranks = now.load_of_ranks(loads).counts
        changes = (*exchanges(now, loads), *overwrites(now, loads))
        possible = [change for change in changes if change[1] <= left]
        busiest, moves, experts = min(possible, default=(max(ranks), 0, []))
        if busiest >= max(ranks) * (1 - 1e-12):  # a gain, not a rounding
            break
        now, left = Placement(tuple(experts), now.size), left - moves
    return now


def exchanges(now: Placement, loads: Sequence[float]) -> Iterator[Change]:
    """Each expert of the busiest rank in the place of each lighter copy elsewhere."""
    ranks = now.load_of_ranks(loads).counts
    share = [loads[expert] / len(now.slots_of[expert]) for expert in now.experts]  # of slots
    busiest = max(range(now.size), key=lambda rank: ranks[rank])
    first = busiest * now.per_rank
    for slot in range(first, first + now.per_rank):
        for other, expert in enumerate(now.experts):
            rank, gain = other // now.per_rank, share[slot] - share[other]
            if rank == busiest or gain <= 0 or is_doubled(now, slot, other):
                continue
            rest = (load for n, load in enumerate(ranks) if n not in (rank, busiest))
            load = max(ranks[busiest] - gain, ranks[rank] + gain, *rest)
            experts = list(now.experts)
            experts[slot], experts[other] = expert, experts[slot]
            yield load, 2, experts


def is_doubled(now: Placement, slot: int, other: int) -> bool:
    """Whether a rank would have an expert twice after two slots changed places."""
    return any(
        now.experts[mine] in now.of_rank(its // now.per_rank)
        for mine, its in ((slot, other), (other, slot))
    )


def overwrites(now: Placement, loads: Sequence[float]) -> Iterator[Change]:
    """Each expert of the busiest rank in each slot whose expert has another copy."""
    ranks = now.load_of_ranks(loads).counts
    busiest = max(range(now.size), key=lambda rank: ranks[rank])
    for slot, expert in enumerate(now.experts):
        if len(now.slots_of[expert]) == 1:
            continue
        for busy in set(now.of_rank(busiest)) - set(now.of_rank(slot // now.per_rank)):
            experts = list(now.experts)
            experts[slot] = busy
            load = max(Placement(tuple(experts), now.size).load_of_ranks(loads).counts)
            yield load, 1, experts
