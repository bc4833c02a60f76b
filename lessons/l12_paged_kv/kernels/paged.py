"""The two kernels of paged attention, one for steps and one for prompts, over one walk of the keys.

`tile_step` is the walk: where are these keys (ROW_OF), load them (LOAD, and LOAD_V for their
values), mask what a query does not see (SEES), and take them into lesson 8's running sums.
Around it, `decode_kernel` is lesson 10's split_decode_kernel, and `prefill_kernel` flash_kernel.

Sources: Kwon et al. 2023, PagedAttention, section 4.1; Dao et al. 2023, Flash-Decoding; Dao 2023.
"""

from collections import namedtuple

from lessons.l12_paged_kv.kernels.hooks import causal, equal_split, paged_row, plain_load
from lessons.toolbox.kernels.triton_ import tl, triton

# Where a program finds its keys: its sequence's row of the block table, and its KV head's rows in
# the pool. The scales are None, but for a cache that stores some (lesson 19).
Keys = namedtuple(
    "Keys",
    "sequence table_ptr k_ptr v_ptr k_scale_ptr v_scale_ptr "
    "stride_kblock stride_kn stride_vblock stride_vn",
)


@triton.jit
def tile_step(
    q,
    sums,
    query,
    key,
    in_use,
    keys,
    view,
    scale_log2e,
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
    """The running sums (m_i: [M], l_i: [M], acc: [M, BLOCK_DV]) of queries q: [M, BLOCK_D], after
    the keys key: [N], of which in_use: [N] count. query: [M, 1], the queries' positions. keys:
    where they are, `Keys`. view: what SEES asks beside positions.
    """
    m_i, l_i, acc = sums
    column, v_column = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    page, row = ROW_OF(keys.table_ptr, keys.sequence, key, in_use, PAGE_SIZE)
    slot = page * PAGE_SIZE + row
    k_offset = (page * keys.stride_kblock + row * keys.stride_kn)[:, None]
    v_offset = (page * keys.stride_vblock + row * keys.stride_vn)[:, None]
    is_k, is_v = in_use[:, None] & (column < HEAD_DIM), in_use[:, None] & (v_column < V_HEAD_DIM)
    k = LOAD(keys.k_ptr, k_offset, column, is_k, keys.k_scale_ptr, slot)  # [N, BLOCK_D]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e  # [M, N]
    scores = tl.where(SEES(query, key[None, :], view) & in_use[None, :], scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
    alpha = tl.exp2(m_i - m_safe)
    p = tl.exp2(scores - m_safe[:, None])
    l_i = l_i * alpha + tl.sum(p, axis=1)
    v = LOAD_V(keys.v_ptr, v_offset, v_column, is_v, keys.v_scale_ptr, slot)
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
    strides = stride_kblock, stride_kn, stride_vblock, stride_vn
    keys = Keys(sequence, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, *strides)

    newest = length - 1  # the query's position; so many were held before it
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    sums = m_i, l_i, acc
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        key = start + step
        sums = tile_step(
            q,
            sums,
            newest,
            key,
            key < end,
            keys,
            window,
            scale_log2e,
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
    m_i, l_i, acc = sums
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
        strides = stride_kblock, stride_kn, stride_vblock, stride_vn
        keys = Keys(sequence, table_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, *strides)
        # Bottom-right aligned: the last new token belongs to the last key.
        held = num_keys - num_queries
        begin = tl.maximum(held + start_m - window + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(num_keys, held + start_m + BLOCK_M)

        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        sums = m_i, l_i, acc
        for start in range(begin, end, BLOCK_N):
            key = start + step
            sums = tile_step(
                q,
                sums,
                (held + row)[:, None],
                key,
                key < num_keys,
                keys,
                window,
                scale_log2e,
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

        m_i, l_i, acc = sums
        out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        tl.store(
            out_ptr + (token * tl.num_programs(0) + head) * V_HEAD_DIM + v_column,
            out.to(out_ptr.dtype.element_ty),
            mask=in_chunk & (v_column < V_HEAD_DIM),
        )
