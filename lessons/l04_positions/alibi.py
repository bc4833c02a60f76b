"""Positions without a rotation: ALiBi takes slope · distance from every score, so K and V in the
cache know no position at all.

For contrast, `sinusoidal`: positions added to the embedding, whose scores depend on more than the
distance.

Sources: Train Short, Test Long (Press, Smith, Lewis 2021, section 3); slopes for head counts that
are no power of two: the code that its authors published; sinusoids: Vaswani et al. 2017, section
3.5.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import causal_mask, check_shapes, masked_softmax
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.stand_ins import sequences, store


def alibi_slopes(num_heads: int) -> Tensor:
    """How steeply each head's bias falls with the distance: [num_heads] float64, positive. Raises
    ValueError.

    A power of two n: 2^(-8/n), 2^(-16/n), … 2^-8. Otherwise those of the next smaller power of two,
    and then every other slope of the next larger one, from its first on, as many as are missing. 12
    heads: the 8 of 8 heads, then 1st, 3rd, 5th, 7th of 16.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: got {num_heads}; accepted: 1 or more")
    # the largest power of two that is not above num_heads
    known = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * i / known for i in range(1, known + 1)]
    # 4 / known = 8 / (2 · known)
    exponents += [4 * i / known for i in range(1, 2 * (num_heads - known), 2)]
    return 2.0 ** -torch.tensor(exponents, dtype=torch.float64)


def alibi_bias(slopes: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """-slope · (distance from the query back to the key), bottom-right aligned. slopes: [H] -> [H,
    Tq, Tk] like slopes.
    """
    # the last query belongs to the last key
    query = torch.arange(num_queries, device=slopes.device) + num_keys - num_queries
    distance = query[:, None] - torch.arange(num_keys, device=slopes.device)
    return -slopes[:, None, None] * distance


def alibi_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, softmax_scale: float | None = None
) -> Tensor:
    """Causal attention with biased scores. q: [Tq, Hq, D]; k, v: [Tk, Hkv, D]; slopes: [Hq] -> [Tq,
    Hq, D]. Raises ValueError.
    """
    check_shapes(q, k, v, causal=True, window=None)
    if slopes.shape != q.shape[1:2]:
        raise ValueError(
            f"slopes: got {tuple(slopes.shape)} for {q.shape[1]} query heads; accepted: one slope "
            f"a query head"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    # in the slopes' float64: bfloat16 rounds distances
    biased = scores + alibi_bias(slopes.to(q.device), len(q), len(k))
    probs = masked_softmax(biased, causal_mask(len(q), len(k), device=q.device))
    return torch.einsum("hqk,khd->qhd", probs.to(v.dtype), v)


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    batch: Batch,
    cos_sin_cache: Tensor,
) -> Tensor:
    """Store k and v as they are: with ALiBi a key carries no position. Shapes as in
    AttentionOps.
    """
    store(k, v, k_slots, v_slots, batch.slot_mapping)
    return q


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Biased scores, sequence by sequence, for any number of new tokens. q: [T, Hq, D] -> [T, Hq,
    Dv].
    """
    slopes = alibi_slopes(q.shape[1])
    outs = []
    for b, (rows, length) in enumerate(sequences(batch)):
        k, v = k_cache[b, :length], v_cache[b, :length]
        outs.append(alibi_attention(q[rows], k, v, slopes, softmax_scale))
    return torch.cat(outs)


ALIBI = AttentionOps(write, prefill=attend, decode=attend)


def sinusoidal(positions: Tensor, dim: int) -> Tensor:
    """What the first transformer adds to its embeddings: sin and cos of every frequency. positions:
    [T] -> [T, dim] float64.
    """
    angles = positions[:, None].double() * 10000.0 ** (
        -torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
