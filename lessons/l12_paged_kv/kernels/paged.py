"""The two kernels of paged attention, one for steps and one for prompts, over one walk of the keys.

`tile_step` is the walk: where are these keys (ROW_OF), load them (LOAD, and LOAD_V for their
values), mask what a query does not see (SEES), and take them into lesson 8's running sums.
Around it, `decode_kernel` is lesson 10's split_decode_kernel, and `prefill_kernel` flash_kernel.

Sources: Kwon et al. 2023, PagedAttention, section 4.1; Dao et al. 2023, Flash-Decoding; Dao 2023.
"""

from lessons.l12_paged_kv.kernels.hooks import causal, equal_split, paged_row, plain_load
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def tile_step(
    q,
    m_i,
    l_i,
    acc,
    query,
    key,
    in_use,
    held,
    token,
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
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_OF: tl.constexpr,
    LOAD: tl.constexpr,
    LOAD_V: tl.constexpr,
    SEES: tl.constexpr,
):
    """The running sums m_i, l_i: [M] and acc: [M, BLOCK_DV] of queries q: [M, BLOCK_D], after the
    keys key: [N] of a sequence, of which in_use: [N] count. query: [M, 1], the queries' positions.
    """
    column, v_column = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    page, row = ROW_OF(table_ptr, sequence, key, in_use, PAGE_SIZE)
    slot = page * PAGE_SIZE + row
    k_offset = (page * stride_kblock + row * stride_kn)[:, None]
    v_offset = (page * stride_vblock + row * stride_vn)[:, None]
    is_k, is_v = in_use[:, None] & (column < HEAD_DIM), in_use[:, None] & (v_column < V_HEAD_DIM)
    k = LOAD(k_ptr, k_offset, column, is_k, k_scale_ptr, slot)  # [N, BLOCK_D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e  # [M, N]
    sees = SEES(query, key[None, :], held, window, token, tree_ptr, stride_tree)
    scores = tl.where(sees & in_use[None, :], scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
    alpha = tl.exp2(m_i - m_safe)
    p = tl.exp2(scores - m_safe[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    v = LOAD_V(v_ptr, v_offset, v_column, is_v, v_scale_ptr, slot)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    context_lens_ptr,
    block_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_log2e,
    window,
    split_size,
    stride_qb,
    stride_qh,
    stride_kblock,
    stride_kn,
    stride_kh,
    stride_vblock,
    stride_vn,
    stride_vh,
    stride_table,
    stride_sh,
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
    LOAD_V: tl.constexpr = plain_load,
    SEES: tl.constexpr = causal,
    SPLIT_OF: tl.constexpr = equal_split,
):
    """One program per KV head and split: its GROUP query heads walk the split's keys."""
    kv_head, heads = tl.program_id(0), tl.num_programs(0) * GROUP
    sequence, length, begin, end, place = SPLIT_OF(
        items_ptr, context_lens_ptr, window, split_size, heads, BLOCK_N
    )
    if items_ptr is not None and sequence < 0:  # an idle item of the list
        return
    row, step = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    column, v_column = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    head = kv_head * GROUP + row
    in_group = row < GROUP  # the rows after the group belong to the next KV head's queries
    q = tl.load(
        q_ptr + sequence * stride_qb + head.to(tl.int64)[:, None] * stride_qh + column,
        mask=in_group[:, None] & (column < HEAD_DIM),
        other=0.0,
    )
    in_pool = kv_head.to(tl.int64)  # because a head's place in a large pool may pass 2^31
    k_ptr, v_ptr = k_ptr + in_pool * stride_kh, v_ptr + in_pool * stride_vh
    if k_scale_ptr is not None:  # known when it is compiled; lesson 19 has scales
        k_scale_ptr += in_pool * stride_sh
        v_scale_ptr += in_pool * stride_sh
    table_ptr = block_table_ptr + sequence * stride_table

    newest = length - 1  # the query's position; so many were held before it
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
            newest,
            key,
            key < end,
            newest,
            sequence,
            sequence,
            table_ptr,
            k_ptr,
            v_ptr,
            k_scale_ptr,
            v_scale_ptr,
            None,
            scale_log2e,
            window,
            stride_kblock,
            stride_kn,
            stride_vblock,
            stride_vn,
            0,
            HEAD_DIM,
            V_HEAD_DIM,
            PAGE_SIZE,
            BLOCK_D,
            BLOCK_DV,
            ROW_OF,
            LOAD,
            LOAD_V,
            SEES,
        )
    # A split without a key that counts: 0, and by log2(0) the weight −inf.
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # ln 2: lesson 10's combine expects base e
    partial = place + head * tl.num_programs(1)
    tl.store(
        out_ptr + partial[:, None] * V_HEAD_DIM + v_column,
        out.to(out_ptr.dtype.element_ty),
        mask=in_group[:, None] & (v_column < V_HEAD_DIM),
    )
    tl.store(lse_ptr + partial, lse, mask=in_group)


@triton.jit
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tree_ptr,
    scale_log2e,
    window,
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
    stride_sh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_OF: tl.constexpr = paged_row,
    LOAD: tl.constexpr = plain_load,
    LOAD_V: tl.constexpr = plain_load,
    SEES: tl.constexpr = causal,
):
    """One program: BLOCK_M new tokens of one head of one sequence over all that the sequence holds.
    out: [T, Hq, V_HEAD_DIM], dense.
    """
    head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    # Backwards, because a sequence's last tile sees most keys (lesson 9).
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    start_q = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - start_q
    if start_m < num_queries:  # the grid is made for the longest sequence
        num_keys = tl.load(context_lens_ptr + sequence).to(tl.int32)
        row, step = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        column, v_column = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
        in_chunk = (row < num_queries)[:, None]
        token = (start_q + row).to(tl.int64)[:, None]
        q = tl.load(
            q_ptr + token * stride_qm + head * stride_qh + column,
            mask=in_chunk & (column < HEAD_DIM),
            other=0.0,
        )
        k_ptr += head // GROUP * stride_kh
        v_ptr += head // GROUP * stride_vh
        if k_scale_ptr is not None:
            k_scale_ptr += head // GROUP * stride_sh
            v_scale_ptr += head // GROUP * stride_sh
        table_ptr = block_table_ptr + sequence * stride_table
        # Bottom-right aligned: the last new token belongs to the last key.
        held = num_keys - num_queries
        begin = tl.maximum(held + start_m - window + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(num_keys, held + start_m + BLOCK_M)

        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        for start in range(begin, end, BLOCK_N):
            key = start + step
            m_i, l_i, acc = tile_step(
                q,
                m_i,
                l_i,
                acc,
                (held + row)[:, None],
                key,
                key < num_keys,
                held,
                token,
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
                LOAD_V,
                SEES,
            )

        out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        tl.store(
            out_ptr + (token * tl.num_programs(0) + head) * V_HEAD_DIM + v_column,
            out.to(out_ptr.dtype.element_ty),
            mask=in_chunk & (v_column < V_HEAD_DIM),
        )
