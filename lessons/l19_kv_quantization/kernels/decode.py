"""Decode over codes: the products are products of codes, and a key's scales come after them.

Lesson 12's kernel, with a hook of hooks.py, makes a number of each code before it multiplies. Here
K's scale goes to the score and V's to the weight: one multiplication for a key, not for each of its
values. With 4 bits a row has a low, too, which every code of a key shares.

    number[n] = scale[n] · code[n] + low[n]
    q · number[n]         =  scale[n] · (q · code[n]) + low[n] · Σ q
    Σ_n p[n] · number[n]  =  Σ_n (p[n] · scale[n]) · code[n] + Σ_n p[n] · low[n]

The products run in float16, in which all codes are exact (float32, if q is). q and the weights are
brought into its range by powers of two. For q it is one for each head. For the weights p · scale
the exponent of V's scale joins the score, before the maximum is subtracted, so the largest weight
is near 2^14; the sum of p divides it out again.

A row is loaded in words of 16 bits. codes.py takes them apart: part j of all words is every second
or fourth channel. It meets the same channels of q, and its sums are the same channels of the
result, so no code has to move to another thread.
"""

from lessons.l12_paged_kv.kernels.hooks import causal, equal_split, paged_row
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def exponent_of(x):
    """e of 2^e ≤ |x| < 2^(e + 1), x: float32; −127 for 0, 128 for NaN and infinity."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def two_to(e):
    """2^e in float32. e: int32 from −126 to 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_parts(
    q_row,
    is_row,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """The channels of q as words hold those of K, times a power of two for each row: PARTS tiles of
    [M, BLOCK_K]; what undoes it: [M]; and Σ q: [M].
    """
    parts = ()
    largest, total = tl.zeros_like(is_row.to(tl.float32)), tl.zeros_like(is_row.to(tl.float32))
    for j in tl.static_range(PARTS):
        column = tl.arange(0, BLOCK_K)[None, :] * PARTS + j
        part = tl.load(q_row + column, mask=is_row[:, None] & (column < HEAD_DIM), other=0.0)
        part = part.to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
        total += tl.sum(part, axis=1)
        parts += (part,)
    up = tl.minimum(14 - exponent_of(largest), 126)
    scaled = ()
    for j in tl.static_range(PARTS):
        scaled += ((parts[j] * two_to(up)[:, None]).to(NUMBER),)
    return scaled, two_to(-up), total


@triton.jit
def scale_words(ptr, slot, is_used, kind: tl.constexpr, PER_ROW: tl.constexpr):
    """The words of 32 bits that hold the scales of slots, numbers of `kind`: [N] int32, twice.

    They become numbers later, by `scales_in`. What is loaded in words of 32 bits and not touched at
    once can be under way while earlier tiles are computed; numbers of 16 bits cannot.
    """
    words = ptr.to(tl.pointer_type(tl.int32))
    if kind == tl.float32:
        first = tl.load(words + slot * PER_ROW, mask=is_used, other=0)
        second = first
        if PER_ROW == 2:
            second = tl.load(words + slot * PER_ROW + 1, mask=is_used, other=0)
    else:
        # one row's pair, or the scales of two slots side by side
        first = tl.load(words + slot * PER_ROW // 2, mask=is_used, other=0)
        second = first
    return first, second


@triton.jit
def scales_in(words, slot, kind: tl.constexpr, PER_ROW: tl.constexpr):
    """(scale, low) of those words, of dtype `kind`, as float32: [N] each; without a low the scale
    twice.
    """
    first, second = words
    if kind == tl.float32:
        scale, low = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
    else:
        if PER_ROW == 1:
            first = first >> (slot.to(tl.int32) % 2 * 16)
            second = first
        else:
            second = second >> 16
        scale = first.to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
        low = second.to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
    return scale, low


@triton.jit
def both(a, b, c, d):
    """Two sums, in one walk over a row."""
    return a + c, b + d


@triton.jit
def code_step(
    q,
    q_scale,
    q_low,
    m_i,
    l_i,
    low_i,
    acc,
    k_words,
    v_words,
    k_scale,
    k_low,
    v_scale,
    v_low,
    sees,
    PARTS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    UNPACK: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """The running sums m_i, l_i, low_i: [M] and acc: PARTS tiles of [M, W], after a tile of keys.

    k_words, v_words: [N, W]; the scales and lows: [N], float32; sees: [M or 1, N].
    """
    k = UNPACK(k_words, PARTS)
    scores = tl.zeros((q[0].shape[0], k_words.shape[0]), tl.float32)
    for j in tl.static_range(PARTS):
        scores = tl.dot(q[j], tl.trans(k[j].to(NUMBER)), scores, input_precision="ieee")
    # Clamped, because a scale of 0 (of a key that is not in use) has no reciprocal.
    e = tl.minimum(tl.maximum(exponent_of(v_scale), -100), 126)
    shift = e.to(tl.float32)[None, :]
    if HAS_LOW:
        shift = q_low[:, None] * k_low[None, :] + shift
    scores = scores * (q_scale[:, None] * k_scale[None, :]) + shift
    scores = tl.where(sees, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) - 14)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet
    alpha = tl.exp2(m_i - m_safe)
    w = tl.exp2(scores - m_safe[:, None])  # p · 2^e
    down = two_to(-e)
    p = w * down[None, :]
    if HAS_LOW:
        new_l, new_low = tl.reduce((p, p * v_low[None, :]), 1, both)
        low_i = low_i * alpha + new_low
    else:
        new_l = tl.sum(p, axis=1)
    l_i = l_i * alpha + new_l
    w = (w * (v_scale * down)[None, :]).to(NUMBER)
    v = UNPACK(v_words, PARTS)
    new = ()
    for j in tl.static_range(PARTS):
        old = acc[j] * alpha[:, None]
        new += (tl.dot(w, v[j].to(NUMBER), old, input_precision="ieee"),)
    return m_new, l_i, low_i, new


@triton.jit
def codes_decode_kernel(
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    UNPACK: tl.constexpr,
    NUMBER: tl.constexpr,
    SEES: tl.constexpr = causal,
    SPLIT_OF: tl.constexpr = equal_split,
):
    """One program per KV head and split, as lesson 12's decode_kernel. k_ptr, v_ptr: words of PARTS
    codes, in which their strides count.
    """
    kv_head, heads = tl.program_id(0), tl.num_programs(0) * GROUP
    sequence, length, begin, end, place = SPLIT_OF(
        items_ptr, context_lens_ptr, window, split_size, heads, BLOCK_N
    )
    if items_ptr is not None and sequence < 0:  # an idle item of the list
        return
    row, step = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    word, v_word = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    head, in_group = kv_head * GROUP + row, row < GROUP
    q_row = q_ptr + sequence * stride_qb + head.to(tl.int64)[:, None] * stride_qh
    q, q_down, q_low = query_parts(q_row, in_group, HEAD_DIM, BLOCK_K, PARTS, NUMBER)
    q_scale, q_low = q_down * (scale_log2e * UNIT), q_low * scale_log2e
    in_pool = kv_head.to(tl.int64)  # because a head's place in a large pool may pass 2^31
    k_ptr, v_ptr = k_ptr + in_pool * stride_kh, v_ptr + in_pool * stride_vh
    k_scale_ptr, v_scale_ptr = k_scale_ptr + in_pool * stride_sh, v_scale_ptr + in_pool * stride_sh
    kind: tl.constexpr = k_scale_ptr.dtype.element_ty
    table_ptr = block_table_ptr + sequence * stride_table

    newest = length - 1
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    low_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc += (tl.zeros((BLOCK_M, BLOCK_V), tl.float32),)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        key = start + step
        in_use = key < end
        page, in_page = paged_row(table_ptr, sequence, key, in_use, PAGE_SIZE)
        slot = page * PAGE_SIZE + in_page
        k_scales = scale_words(k_scale_ptr, slot, in_use, kind, PER_ROW)
        v_scales = scale_words(v_scale_ptr, slot, in_use, kind, PER_ROW)
        k_row = k_ptr + (page * stride_kblock + in_page * stride_kn)[:, None]
        v_row = v_ptr + (page * stride_vblock + in_page * stride_vn)[:, None]
        is_k = in_use[:, None] & (word < HEAD_DIM // PARTS)
        is_v = in_use[:, None] & (v_word < V_HEAD_DIM // PARTS)
        k_words = tl.load(k_row + word, mask=is_k, other=0)
        v_words = tl.load(v_row + v_word, mask=is_v, other=0)
        k_scale, k_low = scales_in(k_scales, slot, kind, PER_ROW)
        v_scale, v_low = scales_in(v_scales, slot, kind, PER_ROW)
        sees = in_use[None, :] & SEES(newest, key[None, :], window)
        m_i, l_i, low_i, acc = code_step(
            q,
            q_scale,
            q_low,
            m_i,
            l_i,
            low_i,
            acc,
            k_words,
            v_words,
            k_scale,
            k_low,
            v_scale,
            v_low,
            sees,
            PARTS,
            PER_ROW == 2,
            UNPACK,
            NUMBER,
        )

    # A split without a key that counts: 0, and by log2(0) the weight −inf.
    share = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # ln 2: lesson 10's combine expects base e
    partial = place + head * tl.num_programs(1)
    for j in tl.static_range(PARTS):
        column = v_word * PARTS + j
        out = (acc[j] * UNIT + low_i[:, None]) * share[:, None]
        tl.store(
            out_ptr + partial[:, None] * V_HEAD_DIM + column,
            out.to(out_ptr.dtype.element_ty),
            mask=in_group[:, None] & (column < V_HEAD_DIM),
        )
    tl.store(lse_ptr + partial, lse, mask=in_group)
