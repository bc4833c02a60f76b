"""The operations of lesson 3 in PyTorch: what generates where kernels would be interpreted.

An interpreted kernel takes seconds a token. These functions do the same, sequence by sequence.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.rope import rotate
from lessons.l03_kv_cache.batch import Batch, sequences
from lessons.l03_kv_cache.cache import AttentionOps


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    batch: Batch,
    cos_sin_cache: Tensor,
) -> Tensor:
    """Rotate q and k, then store k and v. Shapes as in AttentionOps; returns the rotated q."""
    q = rotate(q, batch.positions, cos_sin_cache)
    k = rotate(k, batch.positions, cos_sin_cache)
    store(k, v, k_slots, v_slots, batch.slot_mapping)
    return q


def store(k: Tensor, v: Tensor, k_slots: Tensor, v_slots: Tensor, slot_mapping: Tensor) -> None:
    """k, v: [T, Hkv, D] into the slots slot_mapping: [T]; -1 is the last slot, which no sequence
    owns.

    k_slots, v_slots: [slots + 1, Hkv, D].
    """
    k_slots.index_put_((slot_mapping,), k)
    v_slots.index_put_((slot_mapping,), v)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """New tokens attend to all of their sequence up to themselves. q: [T, Hq, D] -> [T, Hq, Dv]."""
    from lessons.l02_naive_attention.optimized import attention_torch  # here: kernels are beside it

    return attend_each(attention_torch, q, k_cache, v_cache, batch, softmax_scale, window)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """One new token of each sequence attends to all of it. q: [B, Hq, D] -> [B, Hq, Dv]."""
    return attend_each(decode_attention_torch, q, k_cache, v_cache, batch, softmax_scale, window)


def attend_each(
    attention: Callable,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """attention(q: [T, Hq, D], k, v: [length, Hkv, …], scale, window=…) -> [T, Hq, Dv], sequence by
    sequence. q: [T, Hq, D] of all sequences -> [T, Hq, Dv].
    """
    outs = []
    for b, (rows, length) in enumerate(sequences(batch)):
        k, v = k_cache[b, :length], v_cache[b, :length]
        outs.append(attention(q[rows], k, v, softmax_scale, window=window))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def decode_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The newest token attends to all. q: [1, Hq, D]; k: [length, Hkv, D]; v: [length, Hkv, Dv] ->
    [1, Hq, Dv]. k and v may be views.

    No mask, because nothing is in the newest token's future; a window is a slice. The query heads
    of a KV head are the rows of one matrix, so K and V are never repeated (lesson 5).
    """
    if window is not None:
        k, v = k[-window:], v[-window:]
    rows = q.view(k.shape[1], -1, q.shape[-1])  # [Hkv, group, D]
    # Two batched products rather than scaled_dot_product_attention(enable_gqa=True), because on a
    # CPU that is slower for one query beyond about 1000 keys.
    scores = torch.bmm(rows, k.permute(1, 2, 0)) * softmax_scale  # [Hkv, group, length]
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probs = torch.softmax(wide, dim=-1).to(v.dtype)
    return torch.bmm(probs, v.transpose(0, 1)).view(*q.shape[:2], -1)


LESSON_03_TORCH = AttentionOps(write, prefill, decode)
