"""Cascade attention: sequences that share a prefix read its K and V together, not one by one.

A prefix cache stores a shared prefix once, but lesson 12's decode still reads it once for every
sequence. Read `attend_separately`, which does that, then `cascade_attention`: the queries of all
sequences are the rows of one product over the prefix, each sequence reads its own suffix, and
lesson 8's `merge` makes one result of the two. `decode` does it over the pool's blocks: which are
shared is seen in the block tables, because the cache gave all sequences the same ones.

Sources: Juravsky et al. 2024, Hydragen, section 3; Ye et al. 2024, Cascade Inference (FlashInfer).
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l08_online_softmax.naive import Partial, finish, from_scores, merge
from lessons.l10_flash_decoding.naive import attend_to_split
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH

SHORTEST_SHARED = 64  # tokens, not tuned: below, a second product and a merge hardly pay


def attend_separately(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_suffix: Tensor,
    v_suffix: Tensor,
    suffix_lens: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """One query a sequence over a shared prefix and its own suffix: q: [B, Hq, D] -> [B, Hq, Dv].

    k_prefix, v_prefix: [P, Hkv, D] and [P, Hkv, Dv], P may be 0. k_suffix, v_suffix: [B, capacity,
    Hkv, …], of which sequence b uses the first suffix_lens[b] rows, 1 at least; the others
    may hold anything. Each sequence reads the whole prefix again.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    outs = []
    for one, k, v, length in zip(q, k_suffix, v_suffix, suffix_lens.tolist()):
        shared = attend_to_split(one, k_prefix, v_prefix, scale)
        own = attend_to_split(one, k[:length], v[:length], scale)
        outs.append(finish(merge(shared, own))[0])
    return torch.stack(outs).to(q.dtype)


def cascade_attention(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_suffix: Tensor,
    v_suffix: Tensor,
    suffix_lens: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """The same with the prefix read once. q: [B, Hq, D] -> [B, Hq, Dv]; the rest as in
    `attend_separately`.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    shared = prefix_partial(q, k_prefix, v_prefix, scale)
    own = suffix_partial(q, k_suffix, v_suffix, suffix_lens, scale)
    return finish(merge(shared, own))[0].to(q.dtype)


def prefix_partial(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Partial:
    """What all queries find in the same keys. q: [B, Hq, D]; k, v: [P, Hkv, …] -> m, l: [B, Hq],
    acc: [B, Hq, Dv].
    """
    rows = rows_of_kv_heads(q, k.shape[1])  # [Hkv, B · group, D]
    scores = torch.bmm(rows, k.permute(1, 2, 0)) * softmax_scale
    found = from_scores(scores, v.transpose(0, 1))
    return Partial(*(rows_of_sequences(x, len(q)) for x in found))


def suffix_partial(
    q: Tensor, k: Tensor, v: Tensor, suffix_lens: Tensor, softmax_scale: float
) -> Partial:
    """What each query finds in its own keys. q: [B, Hq, D]; k, v: [B, capacity, Hkv, …];
    suffix_lens: [B] -> as in `prefix_partial`.
    """
    rows = q.unflatten(1, (k.shape[2], -1))  # [B, Hkv, group, D]
    unused = torch.arange(k.shape[1], device=q.device) >= suffix_lens[:, None]
    scores = rows @ k.permute(0, 2, 3, 1) * softmax_scale
    scores = scores.masked_fill(unused[:, None, None], -torch.inf)
    # What was left in a block by others may be NaN, and 0 · NaN is NaN.
    v = v.masked_fill(unused[:, :, None, None], 0).transpose(1, 2)
    return Partial(*(x.flatten(1, 2) for x in from_scores(scores, v)))


def rows_of_kv_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """The queries that read one KV head, of all sequences. q: [B, Hq, D] -> [Hkv, B · group, D]."""
    return q.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def rows_of_sequences(x: Tensor, num_sequences: int) -> Tensor:
    """The way back. x: [Hkv, B · group, …] -> [B, Hq, …]."""
    return x.unflatten(1, (num_sequences, -1)).transpose(0, 1).flatten(1, 2)


# ---------------------------------------------------------------- over the pool's blocks


def shared_blocks(block_table: Tensor) -> int:
    """How many blocks all sequences have in common, from the first on. block_table: [B, blocks].

    Never all of a sequence's: its newest token was computed, so it is in a block of its own.
    """
    same = (block_table == block_table[:1]).all(dim=0)
    return int(same.long().cumprod(0).sum())


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

    Lesson 12's, where sequences share too little, or a window lets each see another part of it.
    """
    shared = shared_blocks(batch.block_table) if len(q) > 1 and window is None else 0
    held = shared * k_cache.shape[1]
    if held < SHORTEST_SHARED:
        return LESSON_12_TORCH.decode(q, k_cache, v_cache, batch, softmax_scale, window)
    # After a sequence's blocks the table holds no block's number: any block will do there.
    own = batch.block_table[:, shared:].long().clamp(max=len(k_cache) - 1)
    k_prefix, v_prefix = (
        x[batch.block_table[0, :shared]].flatten(0, 1) for x in (k_cache, v_cache)
    )
    k_suffix, v_suffix = (x[own].flatten(1, 2) for x in (k_cache, v_cache))
    lens = batch.context_lens - held
    return cascade_attention(q, k_prefix, v_prefix, k_suffix, v_suffix, lens, softmax_scale)


LESSON_13_TORCH = LESSON_12_TORCH._replace(decode=decode)
