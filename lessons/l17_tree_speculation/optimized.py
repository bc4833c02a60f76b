"""Attention of token trees over pages, in one launch: a row of a tile is a node and a query head.

The kernel is in kernel.py. Lesson 12's prefill_kernel has a program for each query head, which
reads K and V for itself. A tree has few nodes, so here the nodes of a sequence and the query heads
of a KV head share one tile, and K and V are read once. As in lesson 10 the keys are split, because
a step of few sequences has few programs: all sequences in the same number of splits, or by a list
of splits by length (plan.py).

Sources: Miao et al. 2024, SpecInfer, section 4.2; Cai et al. 2024, Medusa, section 2.1.2; Dao et
al. 2023, Flash-Decoding.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l05_gqa.optimized import LOG2_E
from lessons.l05_gqa.tiles import SMALLEST_TILE, has_matrix_units
from lessons.l10_flash_decoding.splits import WorkItems
from lessons.l12_paged_kv import optimized as paged
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW, equal_split, listed_split
from lessons.l12_paged_kv.kernels.launch import empty_partials, merged, splits_for
from lessons.l12_paged_kv.kernels.launch import sizes_of as tile_sizes_of
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l17_tree_speculation.arguments import check_tree, check_tree_items
from lessons.l17_tree_speculation.trees.kernel import all_old, in_tree, old_in_window, tree_kernel
from lessons.l17_tree_speculation.trees.plan import items_of_step, reach_of
from lessons.toolbox.kernels.triton_ import triton

__all__ = ["LESSON_17", "MOST_ROWS", "in_tree", "tree_attention", "tree_kernel"]

# Nodes times query heads that a program takes at once: with 64 the compiler spills registers.
MOST_ROWS = 32


def sizes_of(rows: int, head_dim: int, v_head_dim: int, matrix_units: bool) -> dict[str, int]:
    """The constexprs that size a program's tiles. rows: new tokens times query heads of a KV head,
    of the sequence that has most.
    """
    size = tile_sizes_of(1, head_dim, v_head_dim, matrix_units)
    # Wide heads always take 32 rows and 8 warps, because 4 warps have too few registers for them.
    least = SMALLEST_TILE if max(size["BLOCK_D"], size["BLOCK_DV"]) <= 128 else MOST_ROWS
    block_m = max(least, min(MOST_ROWS, triton.next_power_of_2(rows)))
    block_n = min(64, size["BLOCK_N"])
    # Among the new keys a tile has a place of the table for each row and key, so it is no wider
    # than high. Narrow heads take half of that, because larger ones spill.
    block_new = max(SMALLEST_TILE, min(block_m, block_n, size["BLOCK_DV"] // 4))
    return size | {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_NEW": block_new}


def warps_of(size: dict[str, int], matrix_units: bool) -> int:
    """4 warps, 8 where a program's sums would not fit their registers: products without matrix
    units take more of them, and the compiler gives programs of narrow heads fewer.
    """
    most = 4096 if matrix_units else 2048
    is_narrow = size["BLOCK_M"] > SMALLEST_TILE and size["BLOCK_DV"] <= 64
    return 8 if is_narrow or size["BLOCK_M"] * size["BLOCK_DV"] > most else 4


def row_tiles_of(max_seqlen_q: int, group: int) -> int:
    """Programs that share the new tokens and the query heads of a KV head."""
    return triton.cdiv(max_seqlen_q * group, MOST_ROWS)


def room_for(
    q: Tensor, num_splits: int | None, v_head_dim: int, items: WorkItems | None, max_seqlen_q: int
) -> tuple[Tensor, Tensor]:
    """Room for what the programs of a launch find. q: [T, Hq, D] -> partial_out: [T, Hq, S, Dv] and
    partial_lse: [T, Hq, S]; of a list any place may be any token's, so T is 1 there.
    """
    if items is not None:
        # Enough, because no token has more places than its sequence has items.
        room = max_seqlen_q * len(items.items)
        return empty_partials(q[:1], room, v_head_dim, torch.float32)
    dtype = q.dtype if num_splits == 1 else torch.float32
    return empty_partials(q, num_splits, v_head_dim, dtype)


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
    items: WorkItems | None = None,
) -> Tensor:
    """The newest tokens of each sequence, a tree or a piece of a prompt, over all that it holds.
    q: [T, Hq, D] -> [T, Hq, Dv].

    tree: [T, W] int8, as `in_tree` reads it. Splits as in lesson 12's `paged_decode`, the rest as
    in its `paged_prefill`. items: plan.py's `tree_items`, instead of one number of splits for all.
    float32 inside. Raises ValueError.
    """
    check_tree(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, tree, window)
    if items is not None:
        check_tree_items(items, q, num_splits, split_size)
    (num_tokens, num_heads, head_dim), (num_kv_heads, v_head_dim) = q.shape, v_cache.shape[2:]
    group = num_heads // num_kv_heads
    if not num_tokens:
        return q.new_empty(0, num_heads, v_head_dim)
    max_seqlen_q = max_seqlen_q or int(cu_seqlens_q.diff().max())
    size = sizes_of(max_seqlen_q * group, head_dim, v_head_dim, has_matrix_units(q))
    if items is None:
        programs = q[:1].expand(len(context_lens) * row_tiles_of(max_seqlen_q, group), -1, -1)
        reach = reach_of(window, max_seqlen_q)
        how = reach, num_splits, split_size, max_context_len
        num_splits = splits_for(programs, k_cache, block_table, size["BLOCK_N"], *how)
    where = block_table, cu_seqlens_q, context_lens, tree
    how = softmax_scale, window, max_seqlen_q, num_splits, split_size, items
    return launch_trees(q, k_cache, v_cache, *where, size, *how)


def launch_trees(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    tree: Tensor,
    size: dict[str, int],
    softmax_scale: float | None,
    window: int | None,
    max_seqlen_q: int,
    num_splits: int | None,
    split_size: int | None,
    items: WorkItems | None,
) -> Tensor:
    """`tree_attention` of arguments that are checked. size: as from `sizes_of`; num_splits: None
    with a list.
    """
    (_, num_heads, head_dim), (num_kv_heads, v_head_dim) = q.shape, v_cache.shape[2:]
    group, reach = num_heads // num_kv_heads, reach_of(window, max_seqlen_q)
    partial_out, partial_lse = room_for(q, num_splits, v_head_dim, items, max_seqlen_q)
    splits = (num_splits, len(context_lens)) if items is None else (len(items.items), 1)
    tree_kernel[(num_kv_heads * row_tiles_of(max_seqlen_q, group), *splits)](
        q,
        k_cache,
        v_cache,
        partial_out,
        partial_lse,
        None if items is None else items.items,
        None if items is None else items.starts,
        cu_seqlens_q,
        context_lens,
        block_table,
        None,
        None,
        tree,
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        NO_WINDOW if window is None else window,
        NO_WINDOW if reach is None else reach,
        split_size or 0,
        num_kv_heads,
        partial_out.shape[2],
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
        SEES_OLD=all_old if window is None else old_in_window,
        SPLIT_OF=equal_split if items is None else listed_split,
        num_warps=warps_of(size, has_matrix_units(q)),
    )
    return merged(partial_out, partial_lse, items, q.dtype)[0]


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
        group, num_kv_heads = q.shape[1] // k_cache.shape[2], k_cache.shape[2]
        programs = num_kv_heads * row_tiles_of(part.max_seqlen_q, group)
        widths = q.shape[2], v_cache.shape[3]
        block_n = sizes_of(group, *widths, has_matrix_units(q))["BLOCK_N"]
        items = items_of_step(part, programs, block_n, window)
        most = part.max_context_len
        how = *how, None, None, most, items
        return tree_attention(q, k_cache, v_cache, *where, part.tree, *how)

    def prompts(q: Tensor, part: Batch) -> Tensor:
        return paged.prefill(q, k_cache, v_cache, part, softmax_scale, window)

    # All through the kernel of trees, if one comes after a prompt.
    return apart(q, batch, trees, prompts if batch.num_decodes else trees)


LESSON_17 = LESSON_12._replace(prefill=prefill)
