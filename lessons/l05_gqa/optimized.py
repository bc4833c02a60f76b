"""Grouped-query decoding without a copy: one program serves all query heads of a KV head and loads
each tile of K and V once.

Lesson 3's decode_kernel gives a program to each query head, so the programs of a group load the
same tiles again. Here the group is the rows of one small matrix: padded to 16 rows, because that is
the smallest tile of a tensor core's matrix product.

Sources: Ainslie et al. 2023 (GQA), section 2.2; Shazeer 2019 (MQA), section 3; the running max and
sum: Milakov & Gimelshein 2018, section 3 (lesson 8 takes them apart).
"""

import math

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.optimized import LESSON_03
from lessons.l03_kv_cache.stand_ins import decode_attention_torch
from lessons.l04_positions.optimized import LESSON_04
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.l05_gqa.arguments import check_grouped_inputs, check_query_heads
from lessons.l05_gqa.naive import sequence_by_sequence
from lessons.l05_gqa.tiles import has_matrix_units, tiles_for, warps_for
from lessons.toolbox.kernels.triton_ import tl, triton

LOG2_E = math.log2(math.e)  # exp(x) = exp2(x · log2 e), and exp2 is what the hardware computes


@triton.jit
def gqa_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    context_lens_ptr,
    scale_log2e,
    window,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program per sequence and KV head: its GROUP query heads walk over the keys together, as
    rows of one tile.
    """
    kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column, step = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + row
    in_head = column[None, :] < HEAD_DIM
    # the rows after the group belong to the next KV head's queries
    in_group = (row < GROUP)[:, None] & in_head
    q = tl.load(
        q_ptr + sequence * stride_qb + head[:, None] * stride_qh + column[None, :],
        mask=in_group,
        other=0.0,
    )
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    # int64, because head · stride passes 2^31 where all rows of a head are next to each other
    k_ptr += sequence * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += sequence * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_tile = step[:, None] * stride_kn + column[None, :]
    v_tile = step[:, None] * stride_vn + column[None, :]

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(tl.maximum(length - window, 0), length, BLOCK_N, num_stages=NUM_STAGES):
        # because row · stride passes 2^31 in a long cache of many heads
        first = tl.cast(start, tl.int64)
        in_use = start + step < length
        held = in_use[:, None] & in_head
        # [BLOCK_N, BLOCK_D]
        k = tl.load(k_ptr + first * stride_kn + k_tile, mask=held, other=0.0)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        scores = tl.where(in_use[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))  # never -inf, because start is a key in use
        # what was summed relative to the old max, relative to the new one
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        v = tl.load(v_ptr + first * stride_vn + v_tile, mask=held, other=0.0)
        # [BLOCK_M, BLOCK_D]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    # an empty sequence attends to nothing (not l_i > 0: that hides a NaN)
    out = tl.where(length > 0, acc / l_i[:, None], 0.0)
    rows = (
        out_ptr
        + (sequence * tl.num_programs(0) * GROUP + head[:, None]) * HEAD_DIM
        + column[None, :]
    )
    tl.store(rows, out.to(out_ptr.dtype.element_ty), mask=in_group)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """One query per sequence over its cache: q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]
    -> [B, Hq, D].

    context_lens: [B] int32 or int64, the rows in use, the query's own included; 0 gives zeros.
    window: only the last `window` rows count. float32 inside. Raises ValueError.
    """
    check_grouped_inputs(q, k_cache, v_cache, context_lens, window)
    check_query_heads(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(q, k_cache, v_cache, context_lens, out, softmax_scale, window)
    return out


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    out: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> None:
    """decode_attention of inputs that are known to fit, into out: [B, Hq, D], dense."""
    (num_sequences, num_heads, head_dim), (_, capacity, num_kv_heads, _) = q.shape, k_cache.shape
    group = num_heads // num_kv_heads
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if out.numel():
        # KV heads on the first axis, because programs that start together then read neighbouring
        # rows of memory.
        gqa_decode_kernel[num_kv_heads, num_sequences](
            q,
            k_cache,
            v_cache,
            out,
            context_lens,
            softmax_scale * LOG2_E,
            capacity if window is None else window,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            GROUP=group,
            HEAD_DIM=head_dim,
            **tiles_for(group, head_dim, has_matrix_units(q)),
            num_warps=warps_for(group, head_dim),
        )


def decode_attention_grouped(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """decode_attention in PyTorch, sequence by sequence, for machines without a GPU: an interpreted
    kernel takes seconds.

    q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]; context_lens: [B] -> [B, Hq, D]. Raises
    ValueError as decode_attention does.
    """
    check_grouped_inputs(q, k_cache, v_cache, context_lens, window)
    check_query_heads(q)
    if not len(q):
        return torch.empty_like(q)
    return sequence_by_sequence(
        decode_attention_torch, q, k_cache, v_cache, context_lens, softmax_scale, window
    )


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """The kernel above for all sequences at once. q: [B, Hq, D] -> [B, Hq, Dv]."""
    if v_cache.shape != k_cache.shape:
        # DeepSeek's expanded heads (lesson 6): v is narrower, and no two query heads share one
        return LESSON_03.decode(q, k_cache, v_cache, batch, softmax_scale, window)
    k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    return decode_attention(q, k_cache, v_cache, batch.context_lens, softmax_scale, window)


LESSON_05 = LESSON_04._replace(decode=decode)
LESSON_05_TORCH = LESSON_04_TORCH  # lesson 3's decode in PyTorch repeats nothing either
IN_GROUPS = Rung("KV heads read in groups", LESSON_05, LESSON_05_TORCH)
