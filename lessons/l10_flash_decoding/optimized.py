"""Flash-decoding: each program attends to one split of one KV head's keys, a second kernel merges
the splits by their LSE.

`split_decode_kernel` is lesson 5's gqa_decode_kernel with two changes: its loop runs over a part of
the keys, and it says how much it has seen (the log-sum-exp). `combine_kernel` is lesson 8's loop
once more, over splits in the place of keys.

Sources: Dao, Haziza, Massa & Sizov 2023, Flash-Decoding for long-context inference; He et al. 2025,
Defeating Nondeterminism in LLM Inference (fixed split size).
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_powers_of_two
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l05_gqa.arguments import check_grouped_inputs
from lessons.l05_gqa.optimized import LESSON_05, LOG2_E
from lessons.l05_gqa.tiles import SMALLEST_TILE, has_matrix_units, tiles_for, warps_for
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l08_online_softmax.partials import STAGES, merge_warps, online_values
from lessons.l09_flash_attention.optimized import LESSON_09
from lessons.l10_flash_decoding.arguments import check_partials, check_splits
from lessons.l10_flash_decoding.naive import LESSON_10_TORCH
from lessons.l10_flash_decoding.splits import PROGRAMS_PER_SM, plan_splits, sms_of
from lessons.toolbox.kernels.triton_ import tl, triton

# splits that are merged at a time, however many there are: another number would be another order of
# sums
BLOCK_S = 16


@triton.jit
def split_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    context_lens_ptr,
    scale_log2e,
    window,
    split_size,
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
    """One program per KV head, split and sequence: its GROUP query heads, rows of one tile, walk
    over the split's keys.
    """
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(1)
    row, column, step = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + row
    in_head = column[None, :] < HEAD_DIM
    in_group = row < GROUP  # the rows after the group belong to the next KV head's queries
    q = tl.load(
        q_ptr + sequence * stride_qb + head.to(tl.int64)[:, None] * stride_qh + column[None, :],
        mask=in_group[:, None] & in_head,
        other=0.0,
    )
    # int64, because head · stride passes 2^31 where all rows of a head are next to each other
    k_ptr += sequence * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += sequence * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_tile = step[:, None] * stride_kn + column[None, :]
    v_tile = step[:, None] * stride_vn + column[None, :]

    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    begin, end = keys_of_split(split, num_splits, split_size, length, window, BLOCK_N)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        # because row · stride passes 2^31 in a long cache of many heads
        tile = tl.cast(start, tl.int64)
        in_split = start + step < end
        held = in_split[:, None] & in_head
        # [BLOCK_N, BLOCK_D]
        k = tl.load(k_ptr + tile * stride_kn + k_tile, mask=held, other=0.0)
        # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        scores = tl.where(in_split[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        v = tl.load(v_ptr + tile * stride_vn + v_tile, mask=held, other=0.0)
        # [BLOCK_M, BLOCK_D]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new

    # an empty split: 0, and by log2(0) the weight −inf
    out = tl.where(begin < length, acc / l_i[:, None], 0.0)
    # ln 2, because the merge expects base e
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    partial = (sequence * tl.num_programs(0) * GROUP + head) * num_splits + split
    tl.store(
        out_ptr + partial[:, None] * HEAD_DIM + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_group[:, None] & in_head,
    )
    tl.store(lse_ptr + partial, lse, mask=in_group)


@triton.jit
def keys_of_split(split, num_splits, split_size, length, window, BLOCK_N: tl.constexpr):
    """`split_bounds` on the GPU, by the sequence's own length: begin and end of a split's keys;
    begin ≥ length if it is empty.
    """
    # once for the sequence, because the window counts from its end, not from a split's
    first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, num_splits), BLOCK_N) * BLOCK_N
    size = tl.where(split_size * num_splits >= length - first, split_size, share)
    begin = first + split * size
    return begin, tl.minimum(begin + size, length)


@triton.jit
def combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program per sequence and query head: lesson 8's loop over its splits, LSEs as scores,
    partial results as values.
    """
    row = tl.program_id(0).to(tl.int64)
    out, lse = online_values(
        partial_lse_ptr + row * num_splits,
        1,
        partial_out_ptr + row * num_splits * HEAD_DIM,
        HEAD_DIM,
        0,
        num_splits,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_S,
        NUM_STAGES,
    )
    column = tl.arange(0, BLOCK_D)
    tl.store(
        out_ptr + row * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM
    )
    tl.store(lse_ptr + row, lse)


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
) -> Tensor:
    """One query per sequence over its cache: q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]
    -> [B, Hq, D].

    context_lens: [B] int32 or int64, the rows in use, the query's own included; 0 gives zeros.
    window: only the last `window` rows count. num_splits: of every sequence (default: enough to
    fill the GPU). split_size: keys in every split instead; then a sequence's bits do not depend on
    its batch. max_context_len: the longest length, if the host knows it (default: capacity;
    context_lens is on the device, and reading it there would make the host wait). float32 inside.
    Raises ValueError.
    """
    check_grouped_inputs(q, k_cache, v_cache, context_lens, window)
    check_splits(num_splits, split_size, max_context_len, k_cache)
    longest = min(x for x in (k_cache.shape[1], max_context_len, window) if x is not None)
    slots, programs = sms_of(q.device) * PROGRAMS_PER_SM, len(q) * k_cache.shape[2]
    size = size_of(q, k_cache)
    num_splits = plan_splits(programs, longest, size["BLOCK_N"], slots, num_splits, split_size)
    dtype = q.dtype if num_splits == 1 else torch.float32
    given = q, k_cache, v_cache, context_lens, softmax_scale, window
    partial_out, partial_lse = launch_splits(*given, num_splits, split_size or 0, size, dtype)
    if num_splits == 1:
        return partial_out[:, :, 0]
    return combine(partial_out, partial_lse, q.dtype)[0]


def split_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int = 1,
    split_size: int = 0,
    block_n: int | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What each split finds: partial_out: [B, Hq, S, D] of out_dtype, partial_lse: [B, Hq, S]
    float32, base e; empty: 0, −inf.

    Arguments as in `flash_decode`; num_splits is S, the others as in `split_bounds`.
    """
    check_grouped_inputs(q, k_cache, v_cache, context_lens, window)
    check_splits(num_splits, None, None, k_cache)
    size = size_of(q, k_cache)
    if block_n is not None:
        check_powers_of_two(SMALLEST_TILE, block_n=block_n)
        size["BLOCK_N"] = block_n
    given = q, k_cache, v_cache, context_lens, softmax_scale, window
    return launch_splits(*given, num_splits, split_size, size, out_dtype)


def size_of(q: Tensor, k_cache: Tensor) -> dict[str, int]:
    """The constexprs that size the kernel's tiles: by heads, dtype and chip, never by batch or
    length. q: [B, Hq, D]; k_cache: [B, capacity, Hkv, D].
    """
    return tiles_for(q.shape[1] // k_cache.shape[2], q.shape[2], has_matrix_units(q))


def launch_splits(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None,
    window: int | None,
    num_splits: int,
    split_size: int,
    size: dict[str, int],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`split_decode` of arguments that are checked: q: [B, Hq, D] and the rest; size: as from
    `size_of`.
    """
    (num_sequences, num_heads, head_dim), (_, capacity, num_kv_heads, _) = q.shape, k_cache.shape
    shape, group = (num_sequences, num_heads, num_splits), num_heads // num_kv_heads
    out = torch.empty(*shape, head_dim, dtype=out_dtype, device=q.device)
    lse = torch.empty(*shape, dtype=torch.float32, device=q.device)
    if out.numel():
        split_decode_kernel[num_kv_heads, num_splits, num_sequences](
            q,
            k_cache,
            v_cache,
            out,
            lse,
            context_lens,
            (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
            capacity if window is None else window,
            split_size,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            GROUP=group,
            HEAD_DIM=head_dim,
            **size,
            num_warps=warps_for(group, head_dim),
        )
    return out, lse


def combine(
    partial_out: Tensor, partial_lse: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """All splits merged. partial_out: [B, Hq, S, D], partial_lse: [B, Hq, S], float32 -> out: [B,
    Hq, D] of dtype, lse: [B, Hq].

    partial_lse in base e; −inf: a split that weighs nothing, whatever partial_out holds; all −inf:
    0, −inf. Raises ValueError.
    """
    check_partials(partial_out, partial_lse)
    num_sequences, num_heads, num_splits, head_dim = partial_out.shape
    out = torch.empty(num_sequences, num_heads, head_dim, dtype=dtype, device=partial_out.device)
    lse = torch.empty(num_sequences, num_heads, dtype=torch.float32, device=partial_out.device)
    if out.numel():
        combine_kernel[num_sequences * num_heads,](
            partial_out,
            partial_lse,
            out,
            lse,
            num_splits,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_S=BLOCK_S,
            NUM_STAGES=STAGES,
            num_warps=merge_warps(triton.next_power_of_2(head_dim)),
        )
    return out, lse


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """As many splits as the GPU has room for. q: [B, Hq, D] -> [B, Hq, Dv].

    Their number is a shape: in a CUDA graph it stays as captured, fit for batch.max_context_len.
    """
    if v_cache.shape != k_cache.shape:
        # DeepSeek's expanded heads (lesson 6), which the kernel does not take
        return LESSON_05.decode(q, k_cache, v_cache, batch, softmax_scale, window)
    return flash_decode(
        q,
        k_cache[: len(q)],
        v_cache[: len(q)],
        batch.context_lens,
        softmax_scale,
        window,
        max_context_len=batch.max_context_len,
    )


LESSON_10 = LESSON_09._replace(decode=decode)
IN_SPLITS = Rung("steps in splits", LESSON_10, LESSON_10_TORCH, prepare=fused)
