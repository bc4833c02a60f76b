"""FP8 attention over pages: prompts by products of codes, read where they are stored.

naive.py has the formula. Three things are the kernel's own.

- **V is turned on its way.** The 8-bit matrix instruction of Hopper reads both operands along the
  summed dimension: along the keys, for V. Pages hold a token's channels side by side. So a thread
  loads the same channels of four keys, and puts together the four codes of each channel.
- **The order of the keys.** The result of the first product is spread over threads in another way
  than the second one wants p. Both agree if keys change places: key 16·a + 8·h + 2·t + i goes to
  place 16·a + 4·t + 2·h + i, in p and in V. Then no thread sends p to another one.
- **Products of their own.** Hopper adds 8-bit products with few bits, so a tile's product starts
  from zero, and float32 adds it to the sum (lesson 9).

Sources: Shah et al. 2024, FlashAttention-3, section 3.3 (the layout of V, and of p); pages: lesson
12.
"""

from lessons.l12_paged_kv.kernels.hooks import causal, paged_row
from lessons.l19_kv_quantization.kernels.decode import exponent_of
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def codes_of_rows(x):
    """What `Float8.quantize` makes of rows x: [M, D]: codes [M, D], and scales [M] in float32. Done
    here and not before, because no other program has these rows.
    """
    wide = x.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(wide), axis=1), 448.0).to(x.dtype)
    scale = tl.where(scale == 0.0, 1.0, scale).to(x.dtype).to(tl.float32)
    ratio = tl.div_rn(wide, tl.zeros_like(wide) + scale[:, None])
    # Clamped, because a rounded scale may be too small; a NaN stays one.
    ratio = tl.maximum(ratio, -448.0, propagate_nan=tl.PropagateNan.ALL)
    ratio = tl.minimum(ratio, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return ratio.to(tl.float8e4nv), scale


@triton.jit
def two_scales(words, kind: tl.constexpr):
    """The scales of dtype `kind` in words of 32 bits, as float32. words: [W] int32 -> [2 · W], or
    [W] if a scale is as wide as a word.
    """
    if kind == tl.float32:
        scales = words.to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
        scales = tl.reshape(tl.join(low, high), (2 * words.shape[0],))
    return scales


@triton.jit
def row_load(row, at, count, MASKED: tl.constexpr):
    """Rows of codes. row: [R, D] pointers; at: [R], their keys; those from `count` on are 0."""
    if MASKED:
        codes = tl.load(row, mask=(at < count)[:, None], other=0.0)
    else:
        codes = tl.load(row)
    return codes


@triton.jit
def values_of(row, key, count, stride, MASKED: tl.constexpr):
    """V of a tile, turned. row: [N / 4, D] pointers to rows of the keys key: [N / 4] -> [N, D], the
    keys in their new order, channel 16 · i + j of a row in column j · (D / 16) + i.

    The four rows of a group are 0, 1, 8 and 9 after `row`.
    """
    QUADS: tl.constexpr = row.shape[0]
    DIM: tl.constexpr = row.shape[1]
    a = row_load(row, key, count, MASKED)
    b = row_load(row + stride, key + 1, count, MASKED)
    c = row_load(row + 8 * stride, key + 8, count, MASKED)
    d = row_load(row + 9 * stride, key + 9, count, MASKED)
    four = tl.join(tl.join(a, b), tl.join(c, d))  # [N / 4, D, 2, 2]
    # Channels change places as well, so that the threads of a warp write to different banks.
    four = tl.permute(tl.reshape(four, (QUADS, DIM // 16, 16, 2, 2)), (0, 4, 3, 2, 1))
    return tl.reshape(four, (4 * QUADS, DIM)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def keys_in_order(p):
    """p: [M, N] with its keys in the order of `values_of`."""
    ROWS: tl.constexpr = p.shape[0]
    KEYS: tl.constexpr = p.shape[1]
    parts = tl.reshape(p, (ROWS, KEYS // 16, 2, 4, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), (ROWS, KEYS))


@triton.jit
def channels_in_order(out):
    """out: [M, D] with its channels in their own order again."""
    ROWS: tl.constexpr = out.shape[0]
    DIM: tl.constexpr = out.shape[1]
    return tl.reshape(tl.permute(tl.reshape(out, (ROWS, 16, DIM // 16)), (0, 2, 1)), (ROWS, DIM))


@triton.jit
def fp8_prefill_kernel(
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
    SEES: tl.constexpr = causal,
):
    """One program: BLOCK_M new tokens of one head of one sequence over all that the sequence holds.
    k_ptr: codes; v_ptr: their bytes; out: [T, Hq, V_HEAD_DIM], dense.
    """
    head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    # Backwards, because a sequence's last tile sees most keys (lesson 9).
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    start_q = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - start_q
    if start_m < num_queries:
        num_keys = tl.load(context_lens_ptr + sequence).to(tl.int32)
        row, step = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        column, v_column = tl.arange(0, HEAD_DIM)[None, :], tl.arange(0, V_HEAD_DIM)[None, :]
        in_chunk = row < num_queries
        token = (start_q + row).to(tl.int64)
        q_row = q_ptr + token[:, None] * stride_qm + head * stride_qh
        q = tl.load(q_row + column, mask=in_chunk[:, None], other=0.0)
        q, q_scale = codes_of_rows(q)
        q_scale *= scale_log2e
        kv_head = head // GROUP
        k_ptr += kv_head * stride_kh
        v_ptr += kv_head * stride_vh
        # Words of 32 bits: narrower loads cannot be under way while earlier tiles are computed.
        kind: tl.constexpr = k_scale_ptr.dtype.element_ty
        each: tl.constexpr = 32 // kind.primitive_bitwidth
        k_words = (k_scale_ptr + kv_head * stride_sh).to(tl.pointer_type(tl.int32))
        v_words = (v_scale_ptr + kv_head * stride_sh).to(tl.pointer_type(tl.int32))
        word_step, quad = tl.arange(0, BLOCK_N // each) * each, tl.arange(0, BLOCK_N // 4)
        table_ptr = block_table_ptr + sequence * stride_table
        # Bottom-right aligned: the last new token belongs to the last key.
        held = num_keys - num_queries
        begin = tl.maximum(held + start_m - window + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(num_keys, held + start_m + BLOCK_M)
        # Until `full` every query sees every key, unless a window hides some.
        full = tl.minimum(held + start_m + 1, num_keys) // BLOCK_N * BLOCK_N
        full = tl.where(window < num_keys, begin, full)

        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, V_HEAD_DIM), tl.float32)
        for masked in tl.static_range(2):
            for start in tl.range(
                full if masked else begin,
                end if masked else full,
                BLOCK_N,
                num_stages=1 if masked else None,
            ):
                key = start + step
                in_use = key < num_keys
                page, at = paged_row(table_ptr, sequence, key, in_use, PAGE_SIZE)
                k_row = k_ptr + (page * stride_kblock + at * stride_kn)[:, None] + column
                k = row_load(k_row, key, num_keys, masked == 1)
                word = start + word_step
                page, at = paged_row(table_ptr, sequence, word, word < num_keys, PAGE_SIZE)
                at = page * (PAGE_SIZE // each) + at // each
                k_scale = tl.load(k_words + at, mask=word < num_keys, other=0)
                v_scale = tl.load(v_words + at, mask=word < num_keys, other=0)
                # The first of the four keys of a group; all 16 that change places share a page.
                first = start + quad // 4 * 16
                page, at = paged_row(table_ptr, sequence, first, first < num_keys, PAGE_SIZE)
                first, at = first + quad % 4 * 2, at + quad % 4 * 2
                v_row = v_ptr + (page * stride_vblock + at * stride_vn)[:, None] + v_column
                v = values_of(v_row, first, num_keys, stride_vn, masked == 1)
                k_scale, v_scale = two_scales(k_scale, kind), two_scales(v_scale, kind)
                if masked:  # because the scale of an unused slot may be NaN
                    v_scale = tl.where(in_use, v_scale, 0.0)
                # V's largest scale of the tile is below 2^(up + 1)
                up = tl.minimum(tl.maximum(exponent_of(tl.max(v_scale, axis=0)), -100), 100)

                scores = tl.dot(q, tl.trans(k)) * k_scale[None, :]
                if masked:
                    sees = SEES((held + row)[:, None], key[None, :], window) & in_use[None, :]
                    scores = tl.where(sees, scores, float("-inf"))
                # The unit of the weights is part of the maximum, and so of every sum.
                top = tl.ceil(tl.max(scores, axis=1) * q_scale) + (up - 7)
                m_new = tl.maximum(m_i, top)
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if masked else m_new
                alpha = tl.exp2(m_i - m_safe)
                p = tl.exp2(scores * q_scale[:, None] - m_safe[:, None])
                l_i = l_i * alpha + tl.sum(p, axis=1)
                p = keys_in_order((p * v_scale[None, :]).to(tl.float8e4nv))
                acc = acc * alpha[:, None] + tl.dot(p, v)
                m_i = m_new

        out = channels_in_order(acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None])
        tl.store(
            out_ptr + (token[:, None] * tl.num_programs(0) + head) * V_HEAD_DIM + v_column,
            out.to(out_ptr.dtype.element_ty),
            mask=in_chunk[:, None],
        )
