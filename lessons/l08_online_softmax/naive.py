"""Softmax in three passes over a row, in two, and softmax(scores) · V in one: what makes a row
divisible into parts.

Read `softmax_three_passes`, `online_sums`, then `Partial` and `merge`: what has been seen of a row
is three values, and two parts of it become one without looking at the row again.
`attention_one_pass` and `attention_split` do nothing but merge.

Sources: Milakov & Gimelshein 2018, Online normalizer calculation for softmax (algorithms 2 and 3;
section 3.1 for `merge`); Rabe & Staats 2021, Self-attention Does Not Need O(n²) Memory (section 2,
which carries the values along).
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024  # scores that are looked at together; any number gives the same result


def softmax_three_passes(scores: Tensor, block: int = BLOCK) -> Tensor:
    """Max, sum, divide: each pass reads the row again, `block` scores at a time. scores: [..., N]
    -> [..., N].

    float32 inside, float64 for float64. A row of −inf alone, where nothing is seen, gives zeros.
    """
    m, l = _nothing_seen(scores)
    for tile in tiles(scores, block):
        m = torch.maximum(m, tile.amax(-1))
    for tile in tiles(scores, block):
        l = l + exp_difference(tile, m[..., None]).sum(-1)
    return _divided(scores, m, l, block)


def softmax_online(scores: Tensor, block: int = BLOCK) -> Tensor:
    """The same in two passes: m and l together, then divide. scores: [..., N] -> [..., N]."""
    return _divided(scores, *online_sums(scores, block), block)


def online_sums(scores: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """m = max and l = Σ exp(score − m) of each row, in one pass. scores: [..., N] -> [...], [...],
    float32 or float64.
    """
    m, l = _nothing_seen(scores)
    for tile in tiles(scores, block):
        m_new = torch.maximum(m, tile.amax(-1))
        # What was summed relative to the old max counts exp(m − m_new) of it relative to the new
        # one.
        l = l * exp_difference(m, m_new) + exp_difference(tile, m_new[..., None]).sum(-1)
        m = m_new
    return m, l


def log_sum_exp(scores: Tensor, block: int = BLOCK) -> Tensor:
    """log Σ exp(score) of each row. scores: [..., N] -> [...]; −inf for a row of −inf."""
    m, l = online_sums(scores, block)
    return m + l.log()


# ------------------------------------------------------------ a part of a row, and two parts merged


class Partial(NamedTuple):
    """All that softmax(scores) · V needs to know of the scores seen so far; float32, or float64
    throughout.

    m: [...] the largest score · l: [...] Σ exp(score − m) · acc: [..., D] Σ exp(score − m) · value.
    """

    m: Tensor
    l: Tensor
    acc: Tensor


def identity(
    shape: Iterable[int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Partial:
    """Nothing seen: m = −inf, l = 0, acc = 0. shape: [...] of the rows; acc: [*shape, head_dim]."""
    shape = tuple(shape)
    return Partial(
        torch.full(shape, -torch.inf, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(*shape, head_dim, dtype=dtype, device=device),
    )


def from_scores(scores: Tensor, v: Tensor) -> Partial:
    """The Partial of some scores. scores: [..., N], −inf where masked; v: [N, D], or [..., N, D]
    for scores [..., M, N].

    N may be 0, which gives the identity. v must be finite even where masked, because 0 · NaN is
    NaN.
    """
    scores, v = wide(scores), wide(v)
    if not scores.shape[-1]:
        return identity(scores.shape[:-1], v.shape[-1], scores.dtype, scores.device)
    m = scores.amax(-1)
    weights = exp_difference(scores, m[..., None])
    return Partial(m, weights.sum(-1), weights @ v)


def from_state(out: Tensor, lse: Tensor) -> Partial:
    """The Partial of a finished part. out: [..., D]; lse: [...]. Nothing seen (lse −inf): the
    identity, whatever `out` holds.

    Only e^m · l and e^m · acc count, and e^lse · 1 = e^m · l, e^lse · out = e^m · acc: so m may be
    lse, where l is 1.
    """
    seen = lse > -torch.inf
    return Partial(lse, seen.to(lse.dtype), out.masked_fill(~seen[..., None], 0).to(lse.dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """The Partial of what a and b have seen together; a and b with the same shapes: m, l [...], acc
    [..., D].

    Associative, commutative, with `identity` as neutral element: so parts may be of any size, and
    merged in any order.
    """
    m = torch.maximum(a.m, b.m)
    alpha_a, alpha_b = exp_difference(a.m, m), exp_difference(b.m, m)
    return Partial(
        m,
        a.l * alpha_a + b.l * alpha_b,
        a.acc * alpha_a[..., None] + b.acc * alpha_b[..., None],
    )


def finish(partial: Partial) -> tuple[Tensor, Tensor]:
    """(out: [..., D], lse: [...]): the weighted mean of the values, and log Σ exp(score). Nothing
    seen: 0 and −inf.
    """
    out = torch.where((partial.l == 0)[..., None], 0.0, partial.acc / partial.l[..., None])
    return out, partial.m + partial.l.log()


# ---------------------------------------------------------------- the three values at work


def attention_one_pass(scores: Tensor, v: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """softmax(scores) · V and its log-sum-exp, reading each score once. scores: [..., N], v: [N, D]
    -> [..., D], [...].
    """
    parts = (
        from_scores(tile, v[n * block : (n + 1) * block])
        for n, tile in enumerate(tiles(scores, block))
    )
    return finish(
        reduce(
            merge,
            parts,
            identity(scores.shape[:-1], v.shape[-1], wide(scores).dtype, scores.device),
        )
    )


def attention_split(scores: Tensor, v: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """The same in `num_splits` parts that could run anywhere, at the same time. scores: [..., N],
    v: [N, D] -> as above.
    """
    pieces = zip(scores.tensor_split(num_splits, dim=-1), v.tensor_split(num_splits))
    return finish(merge_tree([from_scores(*piece) for piece in pieces]))


def merge_tree(parts: list[Partial]) -> Partial:
    """Neighbours merged in pairs until one is left: as deep as log2 of their number. parts: 1 or
    more.
    """
    while len(parts) > 1:
        parts = [reduce(merge, parts[n : n + 2]) for n in range(0, len(parts), 2)]
    return parts[0]


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Finished parts merged. outs: [S, ..., D], lses: [S, ...] -> [..., D] like outs, [...] like
    lses.
    """
    out, lse = finish(reduce(merge, (from_state(*state) for state in zip(outs, lses))))
    return out.to(outs.dtype), lse


# ---------------------------------------------------------------- small parts


def exp_difference(x: Tensor, m: Tensor) -> Tensor:
    """exp(x − m) for x ≤ m, shapes that broadcast. Where m is −inf so is x, and exp(−inf − 0) is 0:
    −inf − −inf would be NaN.
    """
    return torch.exp(x - m.masked_fill(m == -torch.inf, 0.0))


def tiles(scores: Tensor, block: int) -> Iterator[Tensor]:
    """The row in pieces of `block` scores, the last one shorter, widened one by one. scores: [...,
    N] -> [..., ≤ block] each.
    """
    for start in range(0, scores.shape[-1], block):
        yield wide(scores[..., start : start + block])


def wide(x: Tensor) -> Tensor:
    """x: [...] in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def _nothing_seen(scores: Tensor) -> tuple[Tensor, Tensor]:
    """m = −inf and l = 0 for each row. scores: [..., N] -> [...], [...]."""
    m = torch.full(
        scores.shape[:-1],
        -torch.inf,
        dtype=torch.promote_types(scores.dtype, torch.float32),
        device=scores.device,
    )
    return m, torch.zeros_like(m)


def _divided(scores: Tensor, m: Tensor, l: Tensor, block: int) -> Tensor:
    """The last pass: exp(score − m) / l, 0 for rows that saw nothing. scores: [..., N]; m, l: [...]
    -> [..., N].
    """
    probs = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for n, tile in enumerate(tiles(scores, block)):
        share = exp_difference(tile, m[..., None]) / l[..., None]
        probs[..., n * block : (n + 1) * block] = torch.where((l == 0)[..., None], 0.0, share).to(
            scores.dtype
        )
    return probs
