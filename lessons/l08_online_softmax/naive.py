"""Softmax in three passes over a row, in two, and softmax(scores) · V in one: what makes a row divisible into parts.

Read `softmax_three_passes`, `softmax_online`, then `Partial` and `merge`: the part of a row that has been seen is three values,
and two parts become one without looking at the row again. `attention_one_pass` and `attention_split` only merge.

Sources: Milakov & Gimelshein 2018, Online normalizer calculation for softmax (algorithms 2 and 3; section 3.1 for `merge`);
Rabe & Staats 2021, Self-attention Does Not Need O(n²) Memory (section 2, which carries the values along).
"""
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


def softmax_three_passes(scores: Tensor, block: int = 1024) -> Tensor:
    """Max, sum, divide: each pass reads the row again, `block` scores at a time. scores: [..., N] -> [..., N].

    float32 inside, float64 for float64. A row of −inf alone, where nothing is seen, gives zeros.
    """
    m, l = _nothing_seen(scores)
    for tile in tiles(scores, block):
        m = torch.maximum(m, tile.amax(-1))
    for tile in tiles(scores, block):
        l = l + exp_difference(tile, m[..., None]).sum(-1)
    return _divided(scores, m, l, block)


def softmax_online(scores: Tensor, block: int = 1024) -> Tensor:
    """The same in two passes: m and l together, then divide. scores: [..., N] -> [..., N]."""
    m, l = _nothing_seen(scores)
    for tile in tiles(scores, block):
        m_new = torch.maximum(m, tile.amax(-1))
        # What was summed relative to the old max counts exp(m - m_new) of it, relative to the new one.
        l = l * exp_difference(m, m_new) + exp_difference(tile, m_new[..., None]).sum(-1)
        m = m_new
    return _divided(scores, m, l, block)


def log_sum_exp(scores: Tensor, block: int = 1024) -> Tensor:
    """log Σ exp(score) of each row, by the online pass. scores: [..., N] -> [...], float32 or float64; −inf for a row of −inf."""
    m, l = _nothing_seen(scores)
    for tile in tiles(scores, block):
        m_new = torch.maximum(m, tile.amax(-1))
        l = l * exp_difference(m, m_new) + exp_difference(tile, m_new[..., None]).sum(-1)
        m = m_new
    return m + l.log()


# ---------------------------------------------------------------- a part of a row, and two parts merged

class Partial(NamedTuple):
    """All that softmax(scores) · V needs to know of the scores seen so far; float32, or float64 throughout.

    m: [...] the largest score · l: [...] Σ exp(score − m) · acc: [..., D] Σ exp(score − m) · value.
    """

    m: Tensor
    l: Tensor
    acc: Tensor


def identity(shape: Iterable[int], head_dim: int, dtype: torch.dtype = torch.float32,
             device: torch.device | str = "cpu") -> Partial:
    """Nothing seen: m = −inf, l = 0, acc = 0. shape: [...] of the rows; acc: [*shape, head_dim]."""
    shape = tuple(shape)
    return Partial(torch.full(shape, -torch.inf, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device),
                   torch.zeros(*shape, head_dim, dtype=dtype, device=device))


def from_scores(scores: Tensor, v: Tensor) -> Partial:
    """The Partial of some scores. scores: [..., N], −inf where masked; v: [N, D], or [..., N, D] for scores [..., M, N].

    N may be 0, which gives the identity. v must be finite even where masked, because 0 · NaN is NaN.
    """
    scores, v = wide(scores), wide(v)
    if not scores.shape[-1]:
        return identity(scores.shape[:-1], v.shape[-1], scores.dtype, scores.device)
    m = scores.amax(-1)
    weights = exp_difference(scores, m[..., None])
    return Partial(m, weights.sum(-1), weights @ v)


def merge(a: Partial, b: Partial) -> Partial:
    """The Partial of what a and b have seen together; a and b with the same shapes: m, l [...], acc [..., D].

    Associative, commutative, with `identity` as neutral element: so parts may be of any size, and merged in any order.
    """
    m = torch.maximum(a.m, b.m)
    shrink_a, shrink_b = exp_difference(a.m, m), exp_difference(b.m, m)
    return Partial(m, a.l * shrink_a + b.l * shrink_b, a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None])


def finish(partial: Partial) -> tuple[Tensor, Tensor]:
    """(out: [..., D], lse: [...]): the weighted mean of the values, and log Σ exp(score). Nothing seen: 0 and −inf."""
    out = torch.where((partial.l == 0)[..., None], 0.0, partial.acc / partial.l[..., None])
    return out, partial.m + partial.l.log()


def attention_one_pass(scores: Tensor, v: Tensor, block: int = 1024) -> tuple[Tensor, Tensor]:
    """softmax(scores) · V and its log-sum-exp, reading each score once. scores: [..., N], v: [N, D] -> [..., D], [...]."""
    parts = (from_scores(tile, v[n * block:n * block + block]) for n, tile in enumerate(tiles(scores, block)))
    return finish(reduce(merge, parts, identity(scores.shape[:-1], v.shape[-1], wide(scores).dtype, scores.device)))


# ---------------------------------------------------------------- small parts

def exp_difference(x: Tensor, m: Tensor) -> Tensor:
    """exp(x − m), and 0 where x is −inf: there m may be −inf too, and −inf − −inf is NaN. x, m: broadcast together."""
    return torch.where(x == -torch.inf, 0.0, torch.exp(x - m))


def tiles(scores: Tensor, block: int) -> Iterator[Tensor]:
    """The row in pieces of `block` scores, the last one shorter, widened one by one. scores: [..., N] -> [..., ≤ block] each."""
    for start in range(0, scores.shape[-1], block):
        yield wide(scores[..., start:start + block])


def wide(x: Tensor) -> Tensor:
    """x: [...] in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def _nothing_seen(scores: Tensor) -> tuple[Tensor, Tensor]:
    """m = −inf and l = 0 for each row. scores: [..., N] -> [...], [...]."""
    m = torch.full(scores.shape[:-1], -torch.inf, dtype=torch.promote_types(scores.dtype, torch.float32), device=scores.device)
    return m, torch.zeros_like(m)


def _divided(scores: Tensor, m: Tensor, l: Tensor, block: int) -> Tensor:
    """The last pass: exp(score − m) / l, 0 for rows that saw nothing. scores: [..., N]; m, l: [...] -> [..., N]."""
    probs = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for n, tile in enumerate(tiles(scores, block)):
        share = exp_difference(tile, m[..., None]) / l[..., None]
        probs[..., n * block:n * block + block] = torch.where((l == 0)[..., None], 0.0, share).to(scores.dtype)
    return probs
