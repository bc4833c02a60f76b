"""FlashAttention in PyTorch tiles: what the kernels do, with their variable names, and no N×N
matrix anywhere.

Read `attention` (all scores at once: the oracle), `tile_scores`, `tiled_attention_fa1`, then
`tiled_attention`. Compare the last two: what is in the outer loop, and how often `acc` is
divided.

Sources: Dao et al. 2022, FlashAttention, algorithm 1 (keys outside, normalised at every step); Dao
2023, FlashAttention-2, algorithm 1 (queries outside, divided once). The running max and sum are
lesson 8's.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.optimized import grouped_scores, weighted_values
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.stand_ins import attend_each
from lessons.l05_gqa.optimized import LESSON_05_TORCH
from lessons.l08_online_softmax.naive import exp_difference, wide
from lessons.l09_flash_attention.tiles import Tiles, key_range

PYTORCH_TILES = Tiles(128, 128)


def tile_scores(
    q: Tensor,
    k: Tensor,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Scores of one tile, -inf where a query does not see a key. q: [M, Hq, D], k: [N, Hkv, D] ->
    [Hq, M, N].

    query: [M], key: [N], their positions in the sequence of keys. softcap: scores become softcap ·
    tanh(score / softcap). alibi_slopes: [Hq], subtracted for each position between query and key.
    """
    scores = grouped_scores(q, k) * softmax_scale
    distance = query[:, None] - key[None, :]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance.abs()
    if causal:
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle: all scores of a sequence at once. q: [Tq, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv,
    Dv] -> out, lse.

    out: [Tq, Hq, Dv]. lse: [Tq, Hq], the logarithm of the softmax's denominator, sink included;
    -inf for a query without a key. sinks: [Hq], a score that takes part in the softmax and has no
    value: weight that goes nowhere (gpt-oss).
    """
    query = torch.arange(len(q), device=q.device) + len(k) - len(q)
    scores = tile_scores(
        q,
        k,
        query,
        torch.arange(len(k), device=q.device),
        _scale(q, softmax_scale),
        causal,
        window,
        softcap,
        alibi_slopes,
    )
    scores = wide(scores)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)], dim=-1
        )
    # [Hq, Tq]
    lse = torch.logsumexp(scores, dim=-1)
    # a row of -inf alone gives 0, not NaN
    probs = exp_difference(scores, lse[..., None])[..., : len(k)]
    return weighted_values(probs.to(v.dtype).contiguous(), v), lse.T


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tiles: Tiles = PYTORCH_TILES,
) -> tuple[Tensor, Tensor]:
    """FA-2 order: a tile of queries meets one tile of keys after another. Arguments and results as
    in `attention`.

    q: [Tq, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] -> out: [Tq, Hq, Dv], lse: [Tq, Hq].
    """
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), wide(q.new_empty(q.shape[:2]))
    for start_m in range(0, len(q), tiles.block_m):
        q_tile = wide(q[start_m : start_m + tiles.block_m])
        query = torch.arange(start_m, start_m + len(q_tile), device=q.device) + len(k) - len(q)
        m_i, l_i, acc = _start(q_tile, v, sinks)
        begin, _, end = key_range(start_m, len(q), len(k), tiles, causal, window)
        for start_n in range(begin, end, tiles.block_n):
            rows = slice(start_n, min(start_n + tiles.block_n, len(k)))
            key = torch.arange(rows.start, rows.stop, device=q.device)
            scores = tile_scores(
                q_tile,
                wide(k[rows]),
                query,
                key,
                _scale(q, softmax_scale),
                causal,
                window,
                softcap,
                alibi_slopes,
            )
            m_i, alpha, p = _rescale(m_i, scores)
            l_i = l_i * alpha + p.sum(-1)
            acc = acc * alpha.T[..., None] + weighted_values(p, wide(v[rows]))
        rows = slice(start_m, start_m + len(q_tile))
        # late division: once, not once a tile
        out[rows] = (acc / _or_one(l_i).T[..., None]).to(out.dtype)
        lse[rows] = (m_i + torch.log(l_i)).T
    return out, lse


def tiled_attention_fa1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    tiles: Tiles = PYTORCH_TILES,
) -> tuple[Tensor, Tensor]:
    """FA-1 order: a tile of keys meets one tile of queries after another. Arguments and results as
    in `attention`.

    m, l: [Hq, Tq] and out: [Tq, Hq, Dv] wait in slow memory between two tiles of keys: each visit
    reads, rescales, writes them.
    """
    m, l, out = _start(q, v, None)
    for start_n in range(0, len(k), tiles.block_n):
        k_tile, v_tile = (wide(x[start_n : start_n + tiles.block_n]) for x in (k, v))
        key = torch.arange(start_n, start_n + len(k_tile), device=q.device)
        for start_m in range(0, len(q), tiles.block_m):
            if start_n >= key_range(start_m, len(q), len(k), tiles, causal)[2]:
                continue  # above the diagonal: these queries see nothing of this tile
            rows = slice(start_m, min(start_m + tiles.block_m, len(q)))
            query = torch.arange(rows.start, rows.stop, device=q.device) + len(k) - len(q)
            scores = tile_scores(
                wide(q[rows]), k_tile, query, key, _scale(q, softmax_scale), causal
            )
            m_i, alpha, p = _rescale(m[:, rows], scores)
            l_new = l[:, rows] * alpha + p.sum(-1)
            # undo the last division, move to the new maximum
            old = (l[:, rows] * alpha).T[..., None] * out[rows]
            out[rows] = (old + weighted_values(p, v_tile)) / _or_one(l_new).T[..., None]
            m[:, rows], l[:, rows] = m_i, l_new
    return out.to(q.dtype), (m + torch.log(l)).T


def _start(q: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """m_i: [Hq, M], l_i: [Hq, M], acc: [M, Hq, Dv] before the first key. A sink is a key without a
    value, already seen.
    """
    num_queries, num_heads, _ = q.shape
    zeros = wide(q.new_zeros(num_heads, num_queries))
    acc = wide(q.new_zeros(num_queries, num_heads, v.shape[2]))
    return (
        (zeros - torch.inf, zeros, acc)
        if sinks is None
        else (zeros + sinks[:, None], zeros + 1, acc)
    )


def _rescale(m_i: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new maximum [Hq, M], what older sums are worth under it [Hq, M], and the new weights p
    [Hq, M, N].
    """
    m_new = torch.maximum(m_i, scores.amax(-1))
    return m_new, exp_difference(m_i, m_new), exp_difference(scores, m_new[..., None])


def _or_one(l_i: Tensor) -> Tensor:
    """A query without a key has l = 0 and acc = 0: divided by 1 it gives 0. A NaN stays."""
    return l_i.masked_fill(l_i == 0, 1)


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


# ---------------------------------------------------------------- the rung


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Sequence by sequence, tile by tile. q: [T, Hq, D] -> [T, Hq, Dv]."""
    return attend_each(tiled_output, q, k_cache, v_cache, batch, softmax_scale, window)


def tiled_output(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """`tiled_attention` without its lse. q: [Tq, Hq, D], v: [Tk, Hkv, Dv] -> [Tq, Hq, Dv]."""
    return tiled_attention(q, k, v, softmax_scale, window=window)[0]


LESSON_09_TORCH = LESSON_05_TORCH._replace(prefill=prefill)
