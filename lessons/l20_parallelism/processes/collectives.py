"""What is inside a collective: all-reduce in four ways, built from sends that happen together.

    total = ring(x, group)              # the same sums as group.all_reduce(x), in 2 (P − 1) rounds

Read `one_shot`, then `reduce_scatter` and `all_gather`, of which `ring` consists. A *round* is a
set of sends that need nothing from each other; the next one needs what this one brought. A round
costs a latency, and each byte costs time on the wire, so a way is judged by two numbers for P ranks
and n bytes:

    way         rounds         bytes that a rank sends        good for
    one_shot    1              (P − 1) · n                    few bytes: a decode step
    two_shot    2              2 (P − 1) / P · n              where each rank reaches all others
    ring        2 (P − 1)      2 (P − 1) / P · n              many bytes: a prefill
    doubling    log₂ P         log₂ P · n                     few bytes and many ranks

The sum needs n · (P − 1) / P bytes to come into each rank and as many for the result, so the bytes
of the ring are the fewest that there can be while ranks add. A switch that adds needs n + n / P
(planner/links.py). NCCL has rings and trees; a tree takes about 2 log₂ P
rounds and, cut into pieces that follow each other, 2 n bytes. vLLM's custom kernels have one_shot
and two_shot ("one stage", "two stage"), which read the memory of the other GPUs directly, as those
of symmetric_kernels.py.

The order of the additions differs from way to way, so in floating point the last digits may, too.
Every rank gets the same digits, because each sum is made in one place, or in the same order in all.

Sources: Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms; Thakur, Rabenseifner &
Gropp 2005, Optimization of collective communication operations in MPICH (section 4).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l20_parallelism.processes.group import Group

# ---------------------------------------------------------------- four ways to add


def one_shot(x: Tensor, group: Group) -> Tensor:
    """Every rank sends all of x to all others, and each adds alone. x: any shape -> like x."""
    parts = [x if rank == group.rank else torch.empty_like(x) for rank in range(group.size)]
    group.step(dict.fromkeys(_others(group), x), {rank: parts[rank] for rank in _others(group)})
    return torch.stack(parts).sum(0)  # in the order of ranks, the same everywhere


def two_shot(x: Tensor, group: Group) -> Tensor:
    """Each rank adds one piece for all, and sends the sum to all. x: any shape -> like x."""
    pieces = _pieces(x, group)
    mine = pieces[group.rank]
    parts = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    group.step(
        {rank: pieces[rank] for rank in _others(group)},
        {rank: parts[rank] for rank in _others(group)},
    )
    total = torch.stack(parts).sum(0)
    totals = [torch.empty_like(piece) for piece in pieces]
    totals[group.rank] = total
    group.step(
        dict.fromkeys(_others(group), total), {rank: totals[rank] for rank in _others(group)}
    )
    return torch.cat(totals).view_as(x)


def ring(x: Tensor, group: Group) -> Tensor:
    """Pieces go round twice: once to be added, once to be told. x: any shape -> like x."""
    pieces = _pieces(x, group)
    pieces[group.rank] = reduce_scatter(pieces, group)
    return torch.cat(all_gather(pieces, group)).view_as(x)


def reduce_scatter(pieces: list[Tensor], group: Group) -> Tensor:
    """The sum over the ranks of this rank's piece, in P − 1 rounds. pieces: one for each rank, of
    the same shapes on all ranks -> the shape of pieces[rank].

    Piece p starts at rank p + 1, and each rank on its way round adds its own. It ends at rank p.
    """
    size, rank = group.size, group.rank
    sent = pieces[(rank - 1) % size]
    for number in range(1, size):
        mine = pieces[(rank - 1 - number) % size]
        came = torch.empty_like(mine)
        group.step({(rank + 1) % size: sent}, {(rank - 1) % size: came})
        sent = came + mine
    return sent


def all_gather(pieces: list[Tensor], group: Group) -> list[Tensor]:
    """Every rank's piece, in the order of ranks, in P − 1 rounds. pieces: shapes of all, of which
    pieces[rank] holds this rank's values.
    """
    size, rank = group.size, group.rank
    gathered = [torch.empty_like(piece) for piece in pieces]
    gathered[rank] = pieces[rank]
    for number in range(size - 1):
        # what came last goes on: after P − 1 rounds each piece has been everywhere
        sent, came = gathered[(rank - number) % size], gathered[(rank - number - 1) % size]
        group.step({(rank + 1) % size: sent}, {(rank - 1) % size: came})
    return gathered


def doubling(x: Tensor, group: Group) -> Tensor:
    """Partners swap all they have, at distances 1, 2, 4 …, so that sums double. x: any shape.

    For P between two powers of two, the ranks beyond the smaller one first give their x to a
    partner below it, and in the end get the total from it: two rounds more.
    """
    power = 2 ** int(math.log2(group.size))
    rank, total = group.rank, x.clone()
    extra = group.size - power  # ranks that take no part in the swaps
    came = torch.empty_like(total)
    if rank >= power:
        group.step({rank - power: total}, {})
        group.step({}, {rank - power: total})
        return total
    if rank < extra:
        group.step({}, {rank + power: came})
        total = total + came
    distance = 1
    while distance < power:
        partner = rank ^ distance
        group.step({partner: total}, {partner: came})
        total = total + came  # a + b is b + a to the last digit, so partners agree
        distance *= 2
    if rank < extra:
        group.step({rank + power: total}, {})
    return total


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _pieces(x: Tensor, group: Group) -> list[Tensor]:
    """x in one piece for each rank, whose sizes differ by one at most."""
    return list(x.flatten().tensor_split(group.size))


# ---------------------------------------------------------------- what they cost


class Way(NamedTuple):
    """A way to all-reduce. rounds(P): sends that have to follow each other; bytes_sent(P, n): what
    the rank that sends most sends for n bytes, where P divides them.
    """

    run: Callable[[Tensor, Group], Tensor]
    rounds: Callable[[int], int]
    bytes_sent: Callable[[int, float], float]


def doubling_rounds(size: int) -> int:
    """log₂ P, and two more where P is no power of two."""
    whole = int(math.log2(size))
    return whole if size == 2**whole else whole + 2


def doubling_bytes(size: int, n: float) -> float:
    """Bytes of a rank that swaps log₂ P times n bytes, and tells a rank without a partner."""
    whole = int(math.log2(size))
    return n * (whole if size == 2**whole else whole + 1)


def fewest_bytes(size: int, n: float) -> float:
    """2 (P − 1) / P · n: each rank's share of n goes out as parts and comes back as sums."""
    return 2 * (size - 1) / size * n


WAYS = {
    "one_shot": Way(one_shot, lambda size: min(1, size - 1), lambda size, n: (size - 1) * n),
    "two_shot": Way(two_shot, lambda size: 2 * min(1, size - 1), fewest_bytes),
    "ring": Way(ring, lambda size: 2 * (size - 1), fewest_bytes),
    "doubling": Way(doubling, doubling_rounds, doubling_bytes),
}


# ---------------------------------------------------------------- sequence parallelism


def norm_between(partial: Tensor, norm: nn.Module, group: Group) -> Tensor:
    """norm(sum of the ranks' `partial`), each row normed by one rank only.

    partial: [T, hidden_size] -> [T, hidden_size] on every rank.

    An all-reduce is a reduce-scatter and an all-gather. What is between two tensor-parallel
    matrix products (the residual sum and the norm) takes each token alone, so it fits between the
    two halves: the same bytes on the wire, 1/P of the rows to hold and to norm. This is sequence
    parallelism (Korthikanti et al. 2022, section 4.2.2); shards/sequence.py has it in whole models.
    """
    pieces = list(partial.tensor_split(group.size))
    pieces[group.rank] = norm(reduce_scatter(pieces, group))
    return torch.cat(all_gather(pieces, group))
