"""The kernel of token trees: lesson 12's walk over a tile of nodes and query heads.

`tile_step` finds the keys, loads them and keeps the running sums. What is new is who sees whom
(`in_tree`, a SEES hook). Only new keys need the table for that: every node sees what was held
before the step, or what of it is in its window. So the keys are walked in two loops, and the first
one, over tiles of old keys alone, asks no table.

Sources: Miao et al. 2024, SpecInfer, section 4.2; Cai et al. 2024, Medusa, section 2.1.2.
"""

from collections import namedtuple

from lessons.l12_paged_kv.kernels.hooks import equal_split, paged_row, plain_load
from lessons.l12_paged_kv.kernels.paged import Keys, tile_step
from lessons.toolbox.kernels.triton_ import tl, triton

# What a tree's hooks ask beside positions: how many tokens the sequence held before this step, the
# window, which row of the tree's table a query has ([M, 1]), and this table.
View = namedtuple("View", "held window token tree_ptr stride_tree")


@triton.jit
def in_tree(query, key, view):
    """A node sees what the sequence held before the step, and the nodes on its way from the root.

    query: [M, 1], where the token lies; key: [1, N]; view: a `View`, whose table is [T, W] int8,
    dense: at [t, w] how far new token w of its sequence lies above t, 1 for itself, 0 if it is not
    on the way. A row of zeros is a token of a prompt: it sees what lies in front of it. A window
    counts along the way.
    """
    held, window, token, tree_ptr, stride_tree = view
    row = token.to(tl.int32) * stride_tree  # int32, because wide addresses take registers
    level = tl.load(tree_ptr + row).to(tl.int32)  # [M, 1]: depth + 1; 0 in a prompt
    is_new = (key >= held) & (key < held + stride_tree)
    above = tl.load(tree_ptr + (row + key - held), mask=is_new & (level > 0), other=0).to(tl.int32)
    # A key that was held lies `level` tokens or more above: the root is the token right behind it.
    in_a_tree = tl.where(key < held, level + held - key, above)
    distance = tl.where(level > 0, in_a_tree, query - key + 1)
    return (distance > 0) & (distance <= window)


@triton.jit
def all_old(query, key, view):
    """Every node sees every key that was held. Arguments as `in_tree`'s."""
    return key < view.held


@triton.jit
def old_in_window(query, key, view):
    """Of keys that were held, those in the window of a node or of a prompt's token: the part of
    `in_tree` that needs no row of the table.
    """
    held, window, token, tree_ptr, stride_tree = view
    level = tl.load(tree_ptr + token.to(tl.int32) * stride_tree).to(tl.int32)
    distance = tl.where(level > 0, level + held - key, query - key + 1)
    return distance <= window


@triton.jit
def tree_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    places_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tree_ptr,
    scale_log2e,
    window,
    reach,
    split_size,
    num_kv_heads,
    num_places,
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
    BLOCK_NEW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ROW_OF: tl.constexpr = paged_row,
    LOAD: tl.constexpr = plain_load,
    SEES_OLD: tl.constexpr = all_old,
    SEES: tl.constexpr = in_tree,
    SPLIT_OF: tl.constexpr = equal_split,
):
    """One program: BLOCK_M rows (new token, query head) of one KV head over one split of its
    keys. reach: keys from the last one back to the first that any new token sees.
    """
    # 0 heads, because a split's number is wanted here and not its place: every token has its own.
    sequence, num_keys, begin, end, split = SPLIT_OF(
        items_ptr, context_lens_ptr, reach, split_size, 0, BLOCK_N
    )
    if items_ptr is not None and sequence < 0:  # an idle item of the list
        return
    kv_head = tl.program_id(0) % num_kv_heads
    start_q = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - start_q
    start_m = tl.program_id(0) // num_kv_heads * BLOCK_M
    if start_m < num_queries * GROUP:  # the grid is made for the sequence with most new tokens
        row = start_m + tl.arange(0, BLOCK_M)
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
        strides = stride_kblock, stride_kn, stride_vblock, stride_vn
        keys = Keys(sequence, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, *strides)

        held = num_keys - num_queries
        view = View(held, window, token[:, None], tree_ptr, stride_tree)
        # Where the first tile begins that has a new key, or the last one that is not full.
        new = begin + tl.maximum(tl.minimum(held, end) - begin, 0) // BLOCK_N * BLOCK_N
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        sums = m_i, l_i, acc
        for start in tl.range(begin, new, BLOCK_N, num_stages=NUM_STAGES):
            key = start + tl.arange(0, BLOCK_N)
            sums = tile_step(
                q,
                sums,
                (held + query)[:, None],
                key,
                key < end,
                keys,
                view,
                scale_log2e,
                HEAD_DIM,
                V_HEAD_DIM,
                PAGE_SIZE,
                BLOCK_D,
                BLOCK_DV,
                ROW_OF,
                LOAD,
                LOAD,
                SEES_OLD,
            )
        for start in range(new, end, BLOCK_NEW):
            key = start + tl.arange(0, BLOCK_NEW)
            sums = tile_step(
                q,
                sums,
                (held + query)[:, None],
                key,
                key < end,
                keys,
                view,
                scale_log2e,
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

        m_i, l_i, acc = sums
        # A split in which a node sees nothing: 0, and by log2(0) the weight −inf.
        out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # ln 2, because combine expects base e
        if places_ptr is None:  # [T, Hq, S]
            partial = (token * num_kv_heads * GROUP + head) * tl.num_programs(1) + split
        else:  # [Hq, places]
            partial = head.to(tl.int64) * num_places + tl.load(places_ptr + token) + split
        tl.store(
            out_ptr + partial[:, None] * V_HEAD_DIM + v_column,
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (v_column < V_HEAD_DIM),
        )
        tl.store(lse_ptr + partial, lse, mask=is_row)
