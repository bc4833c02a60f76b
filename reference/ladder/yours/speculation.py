"""Exercises 16.2 and 17.4: which drafted tokens stay, and what moves in the cache then."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def verify_for(yours: Callable, original: Callable) -> Callable:
    """verify_one in place of lesson 16's verification, one sequence after the other."""

    def verify(
        p: Tensor, q: Tensor | None, drafted: Tensor, u: Tensor, cu_rows: Tensor, max_rows: int
    ) -> tuple[Tensor, Tensor]:
        tokens = torch.full_like(drafted, -1)
        accepted = torch.full_like(cu_rows[1:], -1, dtype=torch.int32)
        starts = cu_rows.tolist()
        for b, (first, end) in enumerate(pairwise(starts)):
            if first == end:
                continue  # padding
            rows, own = slice(first, end - 1), drafted[first : end - 1]
            if p[first:end].isnan().any():  # of which the exercise does not speak
                accepted[b] = 0
                continue
            # A draft that was sure of its tokens gave each of them a probability of 1.
            share = one_hot(own, p.shape[1]) if q is None else q[rows]
            emitted = yours(
                p[first:end].double(), share.double(), own.tolist(), u[first:end].double()
            )
            tokens[first : first + len(emitted)] = tokens.new_tensor(emitted)
            accepted[b] = len(emitted) - 1
        return tokens, accepted

    return lambda device: verify


def path_moves(yours: Callable, original: Callable) -> Callable:
    """keep_path in place of lesson 17's path_moves: it is given a cache in which each slot holds
    its own number, so what it returns says from where each slot was filled.
    """

    def moves(
        path: list[int], begin: int, table: list[int], block_size: int
    ) -> list[tuple[int, int]]:
        slots = torch.arange((max(table) + 1) * block_size)[:, None]
        nodes = list(range(max(path) + 1))
        kept, _, _ = yours(slots, table, block_size, begin, path, nodes, 0, len(path), set())
        moved = (kept != slots).flatten().nonzero().flatten().tolist()
        return [(int(kept[slot, 0]), slot) for slot in moved]

    return moves
