"""Top-k and top-p for a batch without a sort; part of batch_sampling.py.

Both ask for a threshold: the k-th largest probability of a row, or the probability at which the
larger ones reach the mass p. A sort of the vocabulary finds both, and spends most of its time on
tokens that are cut anyway.

A row with a small top_k needs its few largest entries only. For any other row the threshold is
found bit by bit, with one pass over the row for each bit. No function reads a value back to Python.

Source: the search is radix exchange that follows one side only (Knuth, *The Art of Computer
Programming* 3, section 5.2.2).
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_math import (
    BLOCK,
    at_mass,
    block_masses,
    one_block,
    total,
)

# Up to this top_k, finding the largest entries is quicker than the search.
FEW = 256
PART = BLOCK // 4
# an integer as wide as the float, and how many of its bits a float from 0 to 1 uses
BITS = {
    torch.float32: (torch.int32, 30),
    torch.float64: (torch.int64, 62),
}

# ---------------------------------------------------------------- rows with a small top_k


def largest(p: Tensor, count: int) -> Tensor:
    """The `count` largest entries of each row in descending order.

    p: [B, blocks, BLOCK] -> [B, count], or the whole row if it has fewer entries. They are in the
    `count` parts of the row that have the largest maxima, so only these parts are sorted.
    """
    parts = p.view(len(p), -1, PART)
    if count < parts.shape[1]:
        maxima = parts.amax(dim=-1)
        best = maxima.topk(count).indices
        best = best[:, :, None].expand(-1, -1, PART)
        parts = parts.gather(1, best)
    row = parts.flatten(1)
    count = min(count, row.shape[1])
    return row.topk(count).values


def kth_largest(candidates: Tensor, top_k: Tensor) -> Tensor:
    """Each row's top_k-th largest entry; 0 for a row with top_k > FEW.

    candidates: [B, K], made by `largest`; top_k: [B, 1, 1] -> [B, 1, 1].
    """
    kth = candidates.gather(1, _last_place(candidates, top_k))
    return torch.where(top_k <= FEW, kth[:, :, None], 0)


def reaching(candidates: Tensor, top_k: Tensor, wanted: Tensor) -> Tensor:
    """The entry with which a row's largest reach the weight `wanted`; 0 for a row with top_k > FEW.

    candidates: [B, K], made by `largest`; top_k, wanted: [B, 1, 1] -> [B, 1, 1]. If the top_k
    largest stay below, it is the last of them: only entries that tie with it can weigh the rest.
    """
    reached = candidates.cumsum(dim=-1, dtype=torch.float64)
    is_before = reached < wanted.view(-1, 1)
    place = is_before.sum(dim=-1, keepdim=True)
    place = torch.minimum(place, _last_place(candidates, top_k))
    entry = candidates.gather(1, place)
    return torch.where(top_k <= FEW, entry[:, :, None], 0)


def _last_place(candidates: Tensor, top_k: Tensor) -> Tensor:
    """Where the top_k-th largest is, [B, 1] int64; the last place if there are fewer."""
    count = top_k.view(-1, 1).clamp(max=candidates.shape[1])
    return count.long() - 1


# ---------------------------------------------------------------- all other rows


def lowest_kept(p: Tensor, wanted: Tensor, kept: Tensor, weights: Tensor | None = None) -> Tensor:
    """The largest threshold t for which the entries p >= t weigh `wanted` or more.

    p: [B, blocks, BLOCK], from 0 to 1. wanted: [B, 1, 1], above 0. kept: memory as p. weights: as
    p; None counts entries. -> [B, 1, 1], an entry of the row; 0 if the whole row weighs less.

    Floats from 0 to 1 are in the same order as their bits read as integers. So t is set bit by
    bit from the highest, and ends on the entry itself, whatever the row holds.
    """
    integer, bits = BITS[p.dtype]
    threshold = torch.zeros_like(wanted, dtype=integer)
    for bit in reversed(range(bits)):
        higher = threshold + (1 << bit)
        # 1.0 and 0.0: a CPU takes five times as long to write booleans and to multiply by them
        torch.ge(p, higher.view(p.dtype), out=kept)
        if weights is not None:
            kept.mul_(weights)
        is_enough = total(kept) >= wanted
        threshold = torch.where(is_enough, higher, threshold)
    return threshold.view(p.dtype)


def keep_down_to(p: Tensor, cut: Tensor, wanted: Tensor, above: Tensor, ties: Tensor) -> Tensor:
    """Zero what is below `cut`. Of the entries that equal it, keep the first ones, as many as it
    takes to weigh `wanted`.

    p: [B, blocks, BLOCK]; cut, wanted: [B, 1, 1], a wanted of inf keeps all that equal the cut;
    above, ties: memory as p -> as p, in the memory of `above`.
    """
    torch.gt(p, cut, out=above).mul_(p)
    torch.eq(p, cut, out=ties)
    missing = wanted - total(above)
    number = (missing / cut).ceil()
    # counted from 1, so the running count exceeds number - 0.5 at the last one that stays
    last = at_mass(ties, block_masses(ties), number.view(-1, 1) - 0.5)
    _end_after(ties, last)
    return above.addcmul_(ties, p)


def _end_after(ties: Tensor, last: Tensor) -> None:
    """Zero what follows the id `last`, in place. ties: [B, blocks, BLOCK], last: [B, 1]."""
    block, slot = last // BLOCK, last % BLOCK
    slots = torch.arange(BLOCK, device=ties.device)
    blocks = torch.arange(ties.shape[1], device=ties.device)
    ends = one_block(ties, block) * (slots <= slot)
    earlier = (blocks <= block).to(ties.dtype)
    ties.mul_(earlier[:, :, None])
    place = block[:, :, None].expand(-1, -1, BLOCK)
    ties.scatter_(1, place, ends[:, None, :])
