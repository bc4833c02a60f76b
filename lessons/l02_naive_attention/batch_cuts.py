"""Top-k and top-p for a batch without a sort, part of batch_sampling.py.

Both ask for a threshold: the k-th largest probability of a row, or the one at which the larger ones
reach the mass p. Sorting the vocabulary finds both, and most of what it finds nobody asked for.

A row with a small top_k needs only its largest entries. For any other row the threshold is built
bit by bit, with one pass over the row a bit. No function reads a value back to Python.

Source: the bitwise search is radix selection with one bit a pass (Knuth, *The Art of Computer
Programming* 3, section 5.2.2, exchange on binary digits, going into one side only).
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batch_math import (
    BLOCK,
    at_mass,
    block_masses,
    one_block,
    total,
)

FEW = 256  # up to this top_k finding the largest entries is quicker than the search
# an integer as wide as the float, and how many bits of it a float from 0 to 1 uses
BITS = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 62)}


def largest(p: Tensor, count: int) -> Tensor:
    """The largest `count` entries of each row, in descending order. p: [B, blocks, BLOCK] -> [B,
    count], or the whole row if it has fewer.

    They lie in the `count` quarter blocks with the largest maxima. So most of the row is only
    read once, and never sorted.
    """
    parts = p.view(len(p), -1, BLOCK // 4)
    if count < parts.shape[1]:
        best = parts.amax(dim=-1).topk(count).indices[:, :, None]
        parts = parts.gather(1, best.expand(-1, -1, BLOCK // 4))
    row = parts.flatten(1)
    return row.topk(min(count, row.shape[1])).values


def kth_largest(candidates: Tensor, top_k: Tensor) -> Tensor:
    """Each row's top_k-th of its `largest` entries; 0 if top_k > FEW, which `lowest_kept` answers.

    candidates: [B, K], top_k: [B, 1, 1] -> [B, 1, 1].
    """
    last = _last_candidate(candidates, top_k)
    return torch.where(top_k <= FEW, candidates.gather(1, last)[:, :, None], 0)


def reaching(candidates: Tensor, top_k: Tensor, wanted: Tensor) -> Tensor:
    """The entry with which a row's top_k largest reach the weight `wanted`; 0 if top_k > FEW.

    candidates: [B, K]; top_k, wanted: [B, 1, 1] -> [B, 1, 1]. The last of the top_k if they stay
    below, because only entries that tie with it can weigh the rest.
    """
    reached = candidates.cumsum(dim=-1, dtype=torch.float64)
    before = (reached < wanted.view(-1, 1)).sum(dim=-1, keepdim=True)
    place = torch.minimum(before, _last_candidate(candidates, top_k))
    return torch.where(top_k <= FEW, candidates.gather(1, place)[:, :, None], 0)


def _last_candidate(candidates: Tensor, top_k: Tensor) -> Tensor:
    """The place of the top_k-th largest, [B, 1, 1] -> [B, 1] int64; the last place if K < top_k."""
    return top_k.view(-1, 1).clamp(max=candidates.shape[1]).long() - 1


def lowest_kept(p: Tensor, wanted: Tensor, kept: Tensor, weights: Tensor | None = None) -> Tensor:
    """The largest threshold t at which the entries p >= t still weigh `wanted` or more; 0 if even
    the whole row weighs less.

    p: [B, blocks, BLOCK], from 0 to 1. wanted: [B, 1, 1], above 0. weights: as p; None counts
    entries. -> [B, 1, 1], an entry of the row.

    Floats from 0 to 1 have the same order as their bits read as integers. So t is built bit by bit
    from the highest, one pass a bit, and ends on the entry itself whatever the row holds.
    """
    integer, bits = BITS[p.dtype]
    threshold = torch.zeros_like(wanted, dtype=integer)
    for bit in reversed(range(bits)):
        higher = threshold + (1 << bit)
        torch.ge(p, higher.view(p.dtype), out=kept)
        if weights is not None:
            kept.mul_(weights)
        threshold = torch.where(total(kept) >= wanted, higher, threshold)
    return threshold.view(p.dtype)


def keep_down_to(p: Tensor, cut: Tensor, wanted: Tensor, above: Tensor, ties: Tensor) -> Tensor:
    """Zero what is below `cut`, and of the entries that equal it all but the first that are needed
    to weigh `wanted`. p: [B, blocks, BLOCK]; cut, wanted: [B, 1, 1], inf keeps them all -> as p.
    """
    torch.gt(p, cut, out=above).mul_(p)
    torch.eq(p, cut, out=ties)
    number = ((wanted - total(above)) / cut).ceil().view(-1, 1)
    last = at_mass(ties, block_masses(ties), number - 0.5)
    block, slot = last // BLOCK, last % BLOCK
    places = torch.arange(BLOCK, device=p.device)
    ends = one_block(ties, block) * (places <= slot)
    blocks = torch.arange(p.shape[1], device=p.device)
    ties.mul_((blocks <= block).to(p.dtype)[:, :, None])
    ties.scatter_(1, block[:, :, None].expand(-1, -1, BLOCK), ends[:, None])
    return above.addcmul_(ties, p)
