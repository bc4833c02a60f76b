"""Multi-head, multi-query and grouped-query attention for one new token, the shared heads repeated
until there is one for each.

    MHA  every query head has its own KV head           Hkv = Hq
    MQA  all query heads share one                      Hkv = 1
    GQA  groups of Hq / Hkv query heads share one       between the two

Repeating is how the definition reads, and how many models' first code ran: K and V are read,
written Hq / Hkv times as large, and read again. optimized.py reads them once.

Sources: Shazeer 2019, Fast Transformer Decoding (MQA), section 3; Ainslie et al. 2023, GQA, section
2.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import attend_each
from lessons.l04_positions.optimized import LESSON_04
from lessons.l04_positions.stand_ins import LESSON_04_TORCH


def repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """A KV head for each query head: [length, Hkv, D] -> [length, num_heads, D], head h a copy of
    KV head h // (num_heads / Hkv).

    repeat_interleave gives 0 0 0 1 1 1; `repeat` gives 0 1 0 1 0 1, which is another model.
    """
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def decode_mha(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The newest token attends to all, every query head to its own KV head. q: [1, H, D]; k, v:
    [length, H, D] -> [1, H, D].

    No mask, because nothing is in the newest token's future; a window is a slice.
    """
    if window is not None:
        k, v = k[-window:], v[-window:]
    scores = torch.einsum("qhd,nhd->hqn", q, k) * softmax_scale  # [H, 1, length]
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.einsum("hqn,nhd->qhd", torch.softmax(wide, dim=-1).to(v.dtype), v)


def decode_repeated(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The same for any number of KV heads, by making it MHA first. q: [1, Hq, D]; k, v: [length,
    Hkv, D] -> [1, Hq, D].
    """
    return decode_mha(q, repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1]), softmax_scale, window)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """A batch: q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]; context_lens: [B], the rows
    in use -> [B, Hq, D].
    """
    return sequence_by_sequence(
        decode_repeated, q, k_cache, v_cache, context_lens, softmax_scale, window
    )


def sequence_by_sequence(
    decode_one: Callable,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """decode_one(q: [1, Hq, D], k, v: [length, Hkv, D], scale, window) on each sequence's rows in
    use. Shapes as above.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return torch.cat(
        [
            decode_one(q[b : b + 1], k_cache[b, :length], v_cache[b, :length], scale, window)
            for b, length in enumerate(context_lens.tolist())
        ]
    )


# ---------------------------------------------------------------- the rung


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Sequence by sequence, K and V repeated before, for prompts and steps alike. q: [T, Hq, D] ->
    [T, Hq, Dv].
    """
    return attend_each(attention_repeated, q, k_cache, v_cache, batch, softmax_scale, window)


def attention_repeated(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """Lesson 2's attention, by making it MHA first. q: [Tq, Hq, D]; k, v: [Tk, Hkv, D] -> [Tq, Hq,
    D].
    """
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    return attention(q, k, v, softmax_scale, window=window)


REPEATED = Rung(
    "KV heads repeated",
    LESSON_04._replace(prefill=attend, decode=attend),
    LESSON_04_TORCH._replace(prefill=attend, decode=attend),
)
