"""FlashAttention in FA-1 order, in Triton, to read before optimized.py: the keys are in the outer
loop.

A program owns a head. Each tile of keys is loaded once and meets every tile of queries, so m, l and
out of all queries must wait in memory in between: read, rescaled, written at every visit. That is
what FA-2 turned around. A program's visits depend on each other, so there is one program a head and
no more: on a GPU with 132 processors 32 heads leave 100 idle.

Source: Dao et al. 2022, FlashAttention, algorithm 1.
"""

import torch
from torch import Tensor

from lessons.l09_flash_attention.arguments import check_heads, check_options, check_tiles
from lessons.l09_flash_attention.optimized import LOG2_E, load_rows, tile_scores
from lessons.l09_flash_attention.tiles import Tiles
from lessons.toolbox.kernels.triton_ import tl, triton

FA1_TILES = Tiles(32, 32, 8, 1)


@triton.jit
def fa1_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    l_ptr,
    m_ptr,
    softmax_scale,
    num_queries,
    num_keys,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_om,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program: a head. out: [T, Hq, V_HEAD_DIM] float32, zeros; l, m: [Hq, T] float32, 0 and
    -inf, m in units of log2.
    """
    head = tl.program_id(0).to(tl.int64)
    q_ptr += head * stride_qh
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    out_ptr += head * V_HEAD_DIM
    l_ptr += head * num_queries
    m_ptr += head * num_queries
    column = tl.arange(0, BLOCK_DV)[None, :]
    for start_n in range(0, num_keys, BLOCK_N):
        k = load_rows(k_ptr, start_n, num_keys, stride_kn, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        v = load_rows(v_ptr, start_n, num_keys, stride_vn, V_HEAD_DIM, BLOCK_N, BLOCK_DV, True)
        first_m = 0
        # earlier queries see nothing of this tile; num_queries - num_keys, because they are aligned
        # bottom right
        if CAUSAL:
            first_m = tl.maximum(0, start_n + num_queries - num_keys) // BLOCK_M * BLOCK_M
        for start_m in range(first_m, num_queries, BLOCK_M):
            row = start_m + tl.arange(0, BLOCK_M)
            inside = row < num_queries
            q = load_rows(q_ptr, start_m, num_queries, stride_qm, HEAD_DIM, BLOCK_M, BLOCK_D, True)
            scores = tile_scores(
                q,
                k,
                row + num_keys - num_queries,
                start_n + tl.arange(0, BLOCK_N),
                num_keys,
                0,
                0.0,
                0.0,
                CAUSAL,
                False,
                False,
                False,
                True,
            )
            m_i = tl.load(m_ptr + row, mask=inside, other=0.0)
            m_new = tl.maximum(m_i, tl.max(scores, axis=1) * (softmax_scale * LOG2_E))
            # because -inf - -inf is NaN: no key seen yet
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(scores * (softmax_scale * LOG2_E) - m_safe[:, None])
            l_old = tl.load(l_ptr + row, mask=inside, other=0.0) * tl.exp2(m_i - m_safe)
            l_new = l_old + tl.sum(p, axis=1)
            cell = out_ptr + row[:, None].to(tl.int64) * stride_om + column
            kept = inside[:, None] & (column < V_HEAD_DIM)
            # undo the last division, move to the new maximum
            acc = tl.load(cell, mask=kept, other=0.0) * l_old[:, None]
            acc = (
                tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
                / tl.where(l_new == 0.0, 1.0, l_new)[:, None]
            )
            tl.debug_barrier()  # every thread has read m and l before any thread writes them
            tl.store(cell, acc, mask=kept)
            tl.store(l_ptr + row, l_new, mask=inside)
            tl.store(m_ptr + row, m_new, mask=inside)
        tl.debug_barrier()  # the next tile of keys reads what other threads of this program wrote


def flash_attention_fa1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    tiles: Tiles = FA1_TILES,
) -> tuple[Tensor, Tensor]:
    """One sequence in FA-1 order. q: [T, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] -> out: [T, Hq,
    Dv], lse: [T, Hq] float32.

    As optimized.flash_attention without its options. Raises ValueError.
    """
    check_heads(q, k, v)
    check_options(q, softmax_scale, causal, None, None, None, None)
    check_tiles(tiles, 0)  # its grid has one axis, which takes any number of queries
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, v_head_dim) = q.shape, v.shape
    # float32, because it is rounded at every visit
    out = torch.zeros(num_queries, num_heads, v_head_dim, device=q.device)
    l = torch.zeros(num_heads, num_queries, device=q.device)
    m = torch.full_like(l, -torch.inf)
    if out.numel():
        fa1_kernel[num_heads,](
            q,
            k,
            v,
            out,
            l,
            m,
            head_dim**-0.5 if softmax_scale is None else softmax_scale,
            num_queries,
            num_keys,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            out.stride(0),
            CAUSAL=causal,
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
    return out.to(q.dtype), (m / LOG2_E.value + torch.log(l)).T
