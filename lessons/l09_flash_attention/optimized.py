"""FlashAttention in FA-2 order, in Triton: a program owns a tile of queries of one head and walks
over the keys that they see.

Read `flash_kernel` beside naive.py's `tiled_attention`: the same names in the same order.
`key_range` is tiles.key_range, `tile_scores` naive.tile_scores, in Triton. arguments.py refuses
what does not fit; tiles.py knows the tiles of each chip.

Sources: Dao 2023, FlashAttention-2, algorithm 1 and section 3.1; ALiBi: Press et al. 2022, section
3; soft-cap: Gemma 2 (2024), section 2; sinks: gpt-oss model card (OpenAI 2025), section 2.2.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import attend_each
from lessons.l05_gqa.optimized import LESSON_05
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l09_flash_attention.arguments import (
    check_heads,
    check_options,
    check_sequences,
    check_tiles,
)
from lessons.l09_flash_attention.naive import LESSON_09_TORCH
from lessons.l09_flash_attention.tiles import Tiles, capability, tiles_for
from lessons.toolbox.kernels.triton_ import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x · log2 e): the hardware has exp2 alone


@triton.jit
def key_range(
    first,
    num_keys,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """tiles.key_range for queries that belong to the keys first … first + BLOCK_M - 1."""
    begin, full_end, end = 0, num_keys // BLOCK_N * BLOCK_N, num_keys
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(0, first + BLOCK_M))
        full_end = tl.minimum(full_end, tl.maximum(0, first + 1) // BLOCK_N * BLOCK_N)
    if WINDOW:
        begin = tl.minimum(tl.maximum(0, first - window + 1) // BLOCK_N * BLOCK_N, full_end)
    return begin, full_end, end


@triton.jit
def load_rows(
    ptr,
    start,
    num_rows,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Rows start … start + BLOCK - 1 of a matrix [num_rows, DIM] -> [BLOCK, BLOCK_D], with zeros
    where it ends.
    """
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64, because start · stride passes 2^31
    pointers = ptr + tl.cast(start, tl.int64) * stride + row * stride + column
    if PARTIAL:
        x = tl.load(pointers, mask=(start + row < num_rows) & (column < DIM), other=0.0)
    elif DIM < BLOCK_D:
        x = tl.load(pointers, mask=column < DIM, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def tile_scores(
    q,
    k,
    query,
    key,
    num_keys,
    window,
    softcap,
    slope,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Scores of q: [BLOCK_M, BLOCK_D] and k: [BLOCK_N, BLOCK_D], not yet scaled; softcap and slope
    come divided by the scale.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        # softcap · tanh(scores / softcap)
        scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1))
    if ALIBI:
        scores -= slope * tl.abs(query[:, None] - key[None, :]).to(tl.float32)
    if WINDOW:
        scores = tl.where(key[None, :] > query[:, None] - window, scores, float("-inf"))
    if EDGE:
        sees = (key < num_keys)[None, :]
        if CAUSAL:
            sees = sees & (key[None, :] <= query[:, None])
        scores = tl.where(sees, scores, float("-inf"))
    return scores


@triton.jit
def rows_of_sequence(cu_seqlens_ptr, sequence, num_rows):
    """First row and number of rows of a packed sequence, of the num_rows that there are: wrong
    cu_seqlens give a wrong result, never a foreign row.
    """
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0), num_rows)
    end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1), num_rows)
    return start.to(tl.int64), tl.maximum(end - start, 0)


# Not specialised, because a variant for every kind of number would be compiled while requests wait.
@triton.jit(do_not_specialize=["total_q", "total_k"])
def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    total_q,
    total_k,
    softmax_scale,
    window,
    softcap,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one sequence. out: [T, Hq, V_HEAD_DIM] and lse:
    [T, Hq], both dense.
    """
    head, sequence, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(0)
    # Backwards, because a causal sequence's last tile sees most keys: started last, it would finish
    # long after all others.
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    start_q, num_queries = rows_of_sequence(cu_seqlens_q_ptr, sequence, total_q)
    start_k, num_keys = rows_of_sequence(cu_seqlens_k_ptr, sequence, total_k)
    if start_m < num_queries:  # the grid is made for the longest sequence
        k_ptr += start_k * stride_kn + head // GROUP * stride_kh
        v_ptr += start_k * stride_vn + head // GROUP * stride_vh
        q = load_rows(
            q_ptr + start_q * stride_qm + head * stride_qh,
            start_m,
            num_queries,
            stride_qm,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_D,
            True,
        )
        qk_scale = softmax_scale * LOG2_E
        slope = tl.load(alibi_slopes_ptr + head) / softmax_scale if ALIBI else 0.0
        # A sink is a key that was seen already and has no value: its weight goes nowhere.
        m_i = (
            tl.full((BLOCK_M,), float("-inf"), tl.float32)
            if not SINKS
            else tl.full((BLOCK_M,), 0.0, tl.float32) + tl.load(sinks_ptr + head) * LOG2_E
        )
        l_i = tl.full((BLOCK_M,), 1.0 if SINKS else 0.0, tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        # bottom-right aligned: the last query belongs to the last key
        first = start_m + num_keys - num_queries
        query = first + tl.arange(0, BLOCK_M)
        edges = key_range(first, num_keys, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
        # Two loops: the long one needs no mask but a window's, and its loads run ahead; then the
        # diagonal or the ragged end. Loads that run ahead in both would make ptxas serialise
        # Hopper's matrix instructions (its warning C7515).
        for edge in tl.static_range(2):
            for start_n in tl.range(
                edges[edge], edges[edge + 1], BLOCK_N, num_stages=1 if edge else None
            ):
                k = load_rows(
                    k_ptr, start_n, num_keys, stride_kn, HEAD_DIM, BLOCK_N, BLOCK_D, edge == 1
                )
                scores = tile_scores(
                    q,
                    k,
                    query,
                    start_n + tl.arange(0, BLOCK_N),
                    num_keys,
                    window,
                    softcap,
                    slope,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    edge == 1,
                )
                m_new = tl.maximum(m_i, tl.max(scores, axis=1) * qk_scale)
                # no key seen yet
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if edge or WINDOW else m_new
                alpha = tl.exp2(m_i - m_safe)
                # scaled here, because this is one fused multiply-add
                p = tl.exp2(scores * qk_scale - m_safe[:, None])
                l_i = l_i * alpha + tl.sum(p, axis=1)
                v = load_rows(
                    v_ptr, start_n, num_keys, stride_vn, V_HEAD_DIM, BLOCK_N, BLOCK_DV, edge == 1
                )
                acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
                m_i = m_new
        # late division; a query without a key has l = 0 and acc = 0
        out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        row, column = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
        cell = (start_q + row) * num_heads + head
        tl.store(
            out_ptr + cell[:, None] * V_HEAD_DIM + column[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=(row < num_queries)[:, None] & (column < V_HEAD_DIM)[None, :],
        )
        tl.store(lse_ptr + cell, (m_i + tl.log2(l_i)) / LOG2_E, mask=row < num_queries)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    max_seqlen_q: int | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention without an N×N matrix. q: [T, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] -> out: [T,
    Hq, Dv], lse: [T, Hq].

    cu_seqlens_q, cu_seqlens_k: [B + 1] int32, where each of B packed sequences begins, and the end;
    None: one sequence. max_seqlen_q: the longest sequence's queries, or more; None: read from
    cu_seqlens_q, for which the CPU waits. Too small a one, which cannot be seen on a GPU without
    waiting, leaves rows unwritten. The rest as in naive.attention. lse is float32. tiles: None
    takes tiles.py's for this chip. float32 products are no tf32. Raises ValueError.
    """
    check_heads(q, k, v)
    check_options(q, softmax_scale, causal, window, softcap, alibi_slopes, sinks)
    *cu_seqlens, longest = check_sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    (num_tokens, num_heads, head_dim), (_, num_kv_heads, v_head_dim) = q.shape, v.shape
    out = torch.empty(num_tokens, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    tiles = tiles or tiles_for(capability(q.device), max(head_dim, v_head_dim), q.itemsize)
    check_tiles(tiles, longest)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if out.numel():
        # Heads first: neighbours in time then share K and V in the L2 cache, and the heaviest tiles
        # of all heads start first.
        flash_kernel[num_heads, triton.cdiv(longest, tiles.block_m), len(cu_seqlens[0]) - 1](
            q,
            k,
            v,
            out,
            lse,
            *cu_seqlens,
            alibi_slopes,
            sinks,
            num_tokens,
            len(k),
            softmax_scale,
            window or 0,
            (softcap or 0.0) / softmax_scale,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            CAUSAL=causal,
            WINDOW=window is not None,
            SOFTCAP=softcap is not None,
            ALIBI=alibi_slopes is not None,
            SINKS=sinks is not None,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_D=triton.next_power_of_2(max(head_dim, 16)),
            BLOCK_DV=triton.next_power_of_2(max(v_head_dim, 16)),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out, lse


# ---------------------------------------------------------------- the rung


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """`flash_kernel` on each sequence's rows of the cache. q: [T, Hq, D] -> [T, Hq, Dv]."""
    return attend_each(flash_output, q, k_cache, v_cache, batch, softmax_scale, window)


def flash_output(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """`flash_attention` without its lse. q: [Tq, Hq, D], v: [Tk, Hkv, Dv] -> [Tq, Hq, Dv]."""
    out, _ = flash_attention(
        q, k, v, softmax_scale=softmax_scale, window=window, max_seqlen_q=len(q)
    )
    return out


LESSON_09 = LESSON_05._replace(prefill=prefill)
FLASH_PROMPTS = Rung("prompts by FlashAttention", LESSON_09, LESSON_09_TORCH, prepare=fused)
