"""Attention of token trees over pages, in one launch: a row of a tile is a node and a query head.

Lesson 12's body does the work: `tile_step` finds the keys, loads them and keeps the running sums.
What is new is who sees whom (`in_tree`, a SEES hook), and what a tile holds. Lesson 12's
prefill_kernel has a program for each query head, which reads K and V for itself. A tree has few
nodes, so here the nodes of a sequence and the query heads of a KV head share one tile, and K and V
are read once. As in lesson 10 the keys are split, because a step of few sequences has few programs.

Sources: Miao et al. 2024, SpecInfer, section 4.2; Cai et al. 2024, Medusa, section 2.1.2; Dao et
al. 2023, Flash-Decoding.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l05_gqa.optimized import LOG2_E
from lessons.l05_gqa.tiles import SMALLEST_TILE, has_matrix_units
from lessons.l10_flash_decoding.optimized import combine, keys_of_split
from lessons.l12_paged_kv import optimized as paged
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW, paged_row, plain_load
from lessons.l12_paged_kv.kernels.launch import empty_partials, splits_for
from lessons.l12_paged_kv.kernels.launch import sizes_of as tile_sizes_of
from lessons.l12_paged_kv.kernels.paged import tile_step
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l17_tree_speculation.arguments import check_tree
from lessons.toolbox.kernels.triton_ import tl, triton

# Nodes times query heads that a program takes at once: with 64 the compiler spills registers.
MOST_ROWS = 32


@triton.jit
def in_tree(query, key, held, window, token, tree_ptr, stride_tree):
    """A node sees what the sequence held before the step, and the nodes on its way from the root.

    query: [M, 1], where the token lies; key: [1, N]; token: [M, 1], which row of the table is its.
    tree_ptr: [T, W] int8, dense: at [t, w] how far new token w of its sequence lies above t, 1 for
    itself, 0 if it is not on the way. A row of zeros is a token of a prompt: it sees what lies in
    front of it. A window counts along the way.
    """
    row = token.to(tl.int32) * stride_tree  # int32, because wide addresses take registers
    level = tl.load(tree_ptr + row).to(tl.int32)  # [M, 1]: depth + 1; 0 in a prompt
    is_new = (key >= held) & (key < held + stride_tree)
    above = tl.load(tree_ptr + (row + key - held), mask=is_new & (level > 0), other=0).to(tl.int32)
    # A key that was held lies `level` tokens or more above: the root is the token right behind it.
    in_a_tree = tl.where(key < held, level + held - key, above)
    distance = tl.where(level > 0, in_a_tree, query - key + 1)
    return (distance > 0) & (distance <= window)


@triton.jit
def tree_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tree_ptr,
    scale_log2e,
    window,
    split_size,
    num_kv_heads,
    stride_qm,
    stride_qh,
    stride_kblock,
    stride_kn,
    stride_kh,
    stride_vblock,
    stride_vn,
    stride_vh,
    stride_table,
    stride_tree,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ROW_OF: tl.constexpr = paged_row,
    LOAD: tl.constexpr = plain_load,
    SEES: tl.constexpr = in_tree,
):
    """One program: BLOCK_M rows (new token, query head) of one KV head over one split of its
    keys.
    """
    kv_head, split = tl.program_id(0) % num_kv_heads, tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(1)
    start_q = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - start_q
    start_m = tl.program_id(0) // num_kv_heads * BLOCK_M
    if start_m < num_queries * GROUP:  # the grid is made for the sequence with most new tokens
        row, step = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        column, v_column = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
        is_row = row < num_queries * GROUP
        # The last token once more in rows without a sequence, because they read the tree's table.
        query = tl.minimum(row // GROUP, num_queries - 1)
        token = (start_q + query).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        q = tl.load(
            q_ptr + token[:, None] * stride_qm + head.to(tl.int64)[:, None] * stride_qh + column,
            mask=is_row[:, None] & (column < HEAD_DIM),
            other=0.0,
        )
        k_ptr += kv_head.to(tl.int64) * stride_kh
        v_ptr += kv_head.to(tl.int64) * stride_vh
        table_ptr = block_table_ptr + sequence * stride_table

        num_keys = tl.load(context_lens_ptr + sequence).to(tl.int32)
        held = num_keys - num_queries
        # The root stands at `held`, so no window reaches further back than the root's.
        first = tl.maximum(held - window + 1, 0) // BLOCK_N * BLOCK_N
        seen = num_keys - first
        begin, end = keys_of_split(split, num_splits, split_size, num_keys, seen, BLOCK_N)

        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
            key = start + step
            m_i, l_i, acc = tile_step(
                q,
                m_i,
                l_i,
                acc,
                (held + query)[:, None],
                key,
                key < end,
                held,
                token[:, None],
                sequence,
                table_ptr,
                k_ptr,
                v_ptr,
                k_scale_ptr,
                v_scale_ptr,
                tree_ptr,
                scale_log2e,
                window,
                stride_kblock,
                stride_kn,
                stride_vblock,
                stride_vn,
                stride_tree,
                HEAD_DIM,
                V_HEAD_DIM,
                PAGE_SIZE,
                BLOCK_D,
                BLOCK_DV,
                ROW_OF,
                LOAD,
                LOAD,
                SEES,
            )

        # A split in which a node sees nothing: 0, and by log2(0) the weight −inf.
        out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # ln 2, because combine expects base e
        partial = (token * num_kv_heads * GROUP + head) * num_splits + split
        tl.store(
            out_ptr + partial[:, None] * V_HEAD_DIM + v_column,
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (v_column < V_HEAD_DIM),
        )
        tl.store(lse_ptr + partial, lse, mask=is_row)


def sizes_of(rows: int, head_dim: int, v_head_dim: int, matrix_units: bool) -> dict[str, int]:
    """The constexprs that size a program's tiles. rows: new tokens times query heads of a KV head,
    of the sequence that has most.
    """
    size = tile_sizes_of(1, head_dim, v_head_dim, matrix_units)
    # Wide heads always take 32 rows and 8 warps, because 4 warps have too few registers for them.
    least = SMALLEST_TILE if max(size["BLOCK_D"], size["BLOCK_DV"]) <= 128 else MOST_ROWS
    block_m = max(least, min(MOST_ROWS, triton.next_power_of_2(rows)))
    # At most 64 keys, because a tile has a place of the table for each row and key.
    return size | {"BLOCK_M": block_m, "BLOCK_N": min(64, size["BLOCK_N"])}


def warps_of(size: dict[str, int]) -> int:
    """4 warps, 8 where a program's sums and its part of the table would not fit their registers."""
    return 4 if size["BLOCK_M"] * size["BLOCK_DV"] <= 2048 else 8


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    tree: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
) -> Tensor:
    """The newest tokens of each sequence, a tree or a piece of a prompt, over all that it holds.
    q: [T, Hq, D] -> [T, Hq, Dv].

    tree: [T, W] int8, as `in_tree` reads it. Splits as in lesson 12's `paged_decode`, the rest as
    in its `paged_prefill`. float32 inside. Raises ValueError.
    """
    check_tree(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, tree, window)
    (num_tokens, num_heads, head_dim), (num_kv_heads, v_head_dim) = q.shape, v_cache.shape[2:]
    group = num_heads // num_kv_heads
    if not num_tokens:
        return q.new_empty(0, num_heads, v_head_dim)
    max_seqlen_q = max_seqlen_q or int(cu_seqlens_q.diff().max())
    size = sizes_of(max_seqlen_q * group, head_dim, v_head_dim, has_matrix_units(q))
    row_tiles = triton.cdiv(max_seqlen_q * group, size["BLOCK_M"])
    programs = q[:1].expand(len(context_lens) * row_tiles, -1, -1)  # without splits
    span = None if window is None else window + max_seqlen_q  # from the root's to the deepest's
    how = num_splits, split_size, max_context_len
    num_splits = splits_for(programs, k_cache, block_table, size["BLOCK_N"], span, *how)
    dtype = q.dtype if num_splits == 1 else torch.float32
    partial_out, partial_lse = empty_partials(q, num_splits, v_head_dim, dtype)
    tree_kernel[num_kv_heads * row_tiles, num_splits, len(context_lens)](
        q,
        k_cache,
        v_cache,
        partial_out,
        partial_lse,
        cu_seqlens_q,
        context_lens,
        block_table,
        None,
        None,
        tree,
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        NO_WINDOW if window is None else window,
        split_size or 0,
        num_kv_heads,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        tree.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        PAGE_SIZE=k_cache.shape[1],
        **size,
        num_warps=warps_of(size),
    )
    if num_splits == 1:
        return partial_out[:, :, 0]
    return combine(partial_out, partial_lse, q.dtype)[0]


# ---------------------------------------------------------------- the rung


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Any new tokens: trees, and prompts after them. q: [T, Hq, D] -> [T, Hq, Dv]."""
    if batch.tree is None:
        return LESSON_12.prefill(q, k_cache, v_cache, batch, softmax_scale, window)

    def trees(q: Tensor, part: Batch) -> Tensor:
        where = part.block_table, part.cu_seqlens_q, part.context_lens
        how = softmax_scale, window, part.max_seqlen_q
        most = part.max_context_len
        return tree_attention(q, k_cache, v_cache, *where, part.tree, *how, max_context_len=most)

    def prompts(q: Tensor, part: Batch) -> Tensor:
        return paged.prefill(q, k_cache, v_cache, part, softmax_scale, window)

    # All through the kernel of trees, if one comes after a prompt.
    return apart(q, batch, trees, prompts if batch.num_decodes else trees)


LESSON_17 = LESSON_12._replace(prefill=prefill)
