"""Attention of which each query has the same bits, whatever runs beside it: single tokens, chunks
of any length, and prompts that found their first blocks in the prefix cache.

Lesson 10's `split_size` makes the bits of a *decode* independent of the batch. But a token may also
be computed in a prompt's chunk: after a preemption, or at another place of a cut. Another kernel
adds in another order. So here one walk serves all: each query goes over its own keys from the first
to the last, in tiles that begin at multiples of the same size.

Masked keys change nothing: their p is exactly 0, and a tile without a key that counts multiplies
the running sums by exactly 1. So it does not matter how far a neighbour's keys go.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.generate import Rung
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH
from lessons.l25_one_step_ahead.same_bits.linear import ROWS

KEYS = 64  # of a tile


def one_walk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Any number of new tokens of each sequence, ROWS queries at a time. q: [T, Hq, D] -> [T, Hq,
    Dv]; k_cache, v_cache: [num_blocks, block_size, Hkv, …].
    """
    num_tokens, sequence = len(q), torch.arange(len(batch.context_lens))
    sequence = sequence.repeat_interleave(batch.cu_seqlens_q.diff(), output_size=num_tokens)
    outs = []
    for start in range(0, num_tokens, ROWS):
        # The last tile is filled with the last query again, so that all have one shape.
        row = torch.arange(start, start + ROWS).clamp(max=num_tokens - 1)
        table, position = batch.block_table[sequence[row]], batch.positions[row]
        outs.append(walk(q[row], k_cache, v_cache, table, position, softmax_scale, window))
    return torch.cat(outs)[:num_tokens]


def walk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    position: Tensor,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Lesson 8's running sums for ROWS queries, each over its own sequence. q: [ROWS, Hq, D];
    table: [ROWS, max_blocks]; position: [ROWS] -> [ROWS, Hq, Dv].
    """
    (_, block_size, num_kv_heads, _), wide = (
        k_cache.shape,
        torch.promote_types(q.dtype, torch.float),
    )
    q = q.unflatten(1, (num_kv_heads, -1)).to(wide)  # [ROWS, Hkv, G, D]
    m = q.new_full((*q.shape[:3], 1), -torch.inf)
    l, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:3], v_cache.shape[-1])
    newest = position[:, None]
    first = torch.zeros_like(newest) if window is None else (newest - window + 1).clamp(min=0)
    for start in range(int(first.min()) // KEYS * KEYS, int(newest.max()) + 1, KEYS):
        key = torch.arange(start, start + KEYS)
        sees = (key >= first) & (key <= newest)  # [ROWS, KEYS]
        # Its own newest key in the place of what it does not see: that may be another sequence's.
        key = torch.where(sees, key, newest)
        slot = (table.gather(1, key // block_size), key % block_size)  # [ROWS, KEYS] each
        k, v = (cache[slot].transpose(1, 2).to(wide) for cache in (k_cache, v_cache))
        scores = (q @ k.mT * softmax_scale).masked_fill(~sees[:, None, None], -torch.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        m_safe = m_new.masked_fill(m_new == -torch.inf, 0)  # no key seen yet
        alpha, p = torch.exp(m - m_safe), torch.exp(scores - m_safe)
        l = l * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v
        m = m_new
    return (acc / l).flatten(1, 2).to(v_cache.dtype)


SAME_BITS_TORCH = LESSON_12_TORCH._replace(prefill=one_walk, decode=one_walk)


def same_bits_kernels() -> AttentionOps:
    """Lesson 12's kernel for prompts in the place of both: its tiles are those of the chip, each
    query walks all of its keys in one program, and a single token is a chunk of one.
    """
    from lessons.l12_paged_kv.optimized import LESSON_12, prefill  # a CPU needs no kernels

    return LESSON_12._replace(prefill=prefill, decode=prefill)


SAME_BITS = Rung("same bits", same_bits_kernels, SAME_BITS_TORCH, prepare=fused)
