"""Attention over pages in PyTorch: what generates where kernels would be interpreted.

Read `work_list`, then `decode`. A decode step is a list of work, (block, reader) pairs, so that
sequences of all lengths go together and nothing is padded. Each pair gives partial sums, and partial
sums merge (lesson 8). Prompts gather their blocks, sequence by sequence.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.stand_ins import sequences
from lessons.l04_positions.stand_ins import LESSON_04_TORCH


class WorkList(NamedTuple):
    """W pairs of a block and the one query that reads it. A block with several readers stands in
    several pairs.
    """

    block: Tensor  # [W] int64
    reader: Tensor  # [W] int64: which of the single queries, in the order of `rows`
    first: Tensor  # [W] int64: the position of the block's first key in the reader's sequence
    rows: Tensor  # [R] int64: the rows of q that belong to sequences with one new token
    length: Tensor  # [R] int64: the context of each of these sequences
    last: Tensor  # [R] int64: the pair with the reader's newest block, which may be filled in part


def paged_batch(
    chunks: Sequence[tuple[Sequence[int], int]],
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> Batch:
    """`new_batch` with the list of what its single queries read. Arguments and errors as there."""
    batch = new_batch(chunks, block_size, device, block_tables)
    return replace(batch, work_list=work_list(chunks, block_size, block_tables))


def work_list(
    chunks: Sequence[tuple[Sequence[int], int]],
    block_size: int,
    block_tables: Sequence[Sequence[int]],
) -> WorkList:
    """The work of the sequences that run one token. Made once a step, because all layers share it."""
    block, reader, first, rows, lengths, last, row = [], [], [], [], [], [], 0
    for (new, held), table in zip(chunks, block_tables):
        if len(new) == 1:
            in_use = held // block_size + 1
            block += table[:in_use]
            reader += [len(rows)] * in_use
            first += range(0, in_use * block_size, block_size)
            rows.append(row)
            lengths.append(held + 1)
            last.append(len(block) - 1)
        row += len(new)
    return WorkList(*map(torch.tensor, (block, reader, first, rows, lengths, last)))


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """One new token of each sequence. q: [B, Hq, D] -> [B, Hq, Dv]; k_cache, v_cache: [num_blocks,
    block_size, Hkv, …].
    """
    return read_blocks(q, k_cache, v_cache, WorkList(*batch.work_list), softmax_scale, window)


def read_blocks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: WorkList,
    softmax_scale: float,
    window: int | None = None,
) -> Tensor:
    """Each query over its blocks. q: [R, Hq, D] -> [R, Hq, Dv]; caches as in `decode`."""
    (num_queries, num_heads, head_dim), (_, block_size, num_kv_heads, v_dim) = (
        q.shape,
        v_cache.shape,
    )
    group, pairs = num_heads // num_kv_heads, len(work.block)
    # [pairs · Hkv, block_size, D]: one copy of what is read, heads outside, for the products below.
    k, v = (
        cache.transpose(1, 2).index_select(0, work.block).view(pairs * num_kv_heads, block_size, -1)
        for cache in (k_cache, v_cache)
    )
    queries = q.view(num_queries, num_kv_heads, group, head_dim)[work.reader]
    scores = torch.bmm(queries.flatten(0, 1), k.transpose(1, 2)).mul_(softmax_scale)
    scores = scores.view(pairs, num_kv_heads, group, block_size)
    key = work.first[:, None] + torch.arange(block_size)  # [pairs, block_size], positions
    length = work.length[work.reader][:, None]
    hidden = key >= length if window is None else (key >= length) | (key < length - window)
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    # What was left in a block by others may be NaN, and 0 · NaN is NaN.
    v = v.view(pairs, num_kv_heads, block_size, v_dim)
    v[work.last] = v[work.last].masked_fill(hidden[work.last][:, None, :, None], 0)

    # The merge of lesson 8, over all pairs at once: one maximum a query, then plain sums.
    owner = work.reader[:, None, None].expand(pairs, num_kv_heads, group)
    m = scores.new_full((num_queries, num_kv_heads, group), -torch.inf)
    m = m.scatter_reduce_(0, owner, scores.amax(-1), "amax")
    p = scores.sub_(m[work.reader][..., None]).exp_()
    l = torch.zeros_like(m).index_add_(0, work.reader, p.sum(-1))
    part = torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).view(pairs, num_kv_heads, group, v_dim)
    acc = q.new_zeros(num_queries, num_kv_heads, group, v_dim).index_add_(0, work.reader, part)
    return (acc / l[..., None]).view(num_queries, num_heads, v_dim)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Any number of new tokens of each sequence. q: [T, Hq, D] -> [T, Hq, Dv]; caches as in
    `decode`.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    work = WorkList(*batch.work_list)
    if len(work.rows):
        singles = read_blocks(q[work.rows], k_cache, v_cache, work, softmax_scale, window)
        out[work.rows] = singles
    for b, (rows, length) in enumerate(sequences(batch)):
        if rows.stop - rows.start > 1:
            k, v = (gathered(cache, batch, b, length) for cache in (k_cache, v_cache))
            out[rows] = chunk_attention(q[rows], k, v, softmax_scale, window)
    return out


def gathered(cache: Tensor, batch: Batch, b: int, length: int) -> Tensor:
    """The first `length` rows of sequence b. cache: [num_blocks, block_size, Hkv, D] -> [length,
    Hkv, D].
    """
    blocks = batch.block_table[b, : -(-length // cache.shape[1])]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None
) -> Tensor:
    """The last tokens of a sequence over all of it. q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv,
    Dv] -> [Tq, Hq, Dv]. PyTorch's fused attention, because no N×N scores are stored.
    """
    held = len(k) - len(q)
    sees = None
    if held or window is not None:
        distance = torch.arange(held, len(k))[:, None] - torch.arange(len(k))
        sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=sees, is_causal=sees is None, scale=softmax_scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


LESSON_12_TORCH = LESSON_04_TORCH._replace(prefill=prefill, decode=decode)
