"""Decode over DeepSeek's latents in FP8, and the kernel that writes them.

`coded_mla_kernel` is lesson 12's grouped_mla_kernel (few_heads.py) over the rows of naive.py, and
each of its groups of channels has a scale. What is new is the arithmetic of decode.py, where a key
has one scale. Here it has one for each group g of channels:

    q · number[n]         =  Σ_g scale[n, g] · (q_g · code_g[n])  +  q_pe · k_pe[n]
    Σ_n p[n] · number[n]  =  Σ_n (p[n] · scale[n, g]) · code_g[n]      in the columns of group g

A code is loaded once and used twice. It is multiplied in float16, in which all codes are exact. A
row begins at a multiple of 16 bytes, so the strides count such units.
"""

from lessons.l12_paged_kv.kernels.few_heads import in_all_groups, sum_of_groups
from lessons.l12_paged_kv.kernels.hooks import equal_split, paged_row
from lessons.l19_kv_quantization.kernels.decode import exponent_of, two_to
from lessons.l19_kv_quantization.optimized import larger, smaller
from lessons.toolbox.kernels.triton_ import tl, triton

UP = tl.constexpr(14)  # the largest weight becomes 2^14, near the end of float16


@triton.jit
def load_rows(
    words_ptr,
    scales_ptr,
    pe_ptr,
    place,
    in_split,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROPE: tl.constexpr,
):
    """A tile of rows, at `place`: [N] in units of 16 bytes. Returns words: [GROUPS, N, WORDS],
    scales: [GROUPS, N], k_pe: [GROUPS, N, ROPE / GROUPS].
    """
    PER_UNIT: tl.constexpr = 128 // pe_ptr.dtype.element_ty.primitive_bitwidth
    PE: tl.constexpr = ROPE // GROUPS
    group = tl.arange(0, GROUPS)[:, None, None]
    used = in_split[None, :, None]
    word = group * WORDS + tl.arange(0, WORDS)[None, None, :]
    words = tl.load(words_ptr + (place * 8)[None, :, None] + word, mask=used, other=0)
    rope = group * PE + tl.arange(0, PE)[None, None, :]
    k_pe = tl.load(pe_ptr + (place * PER_UNIT)[None, :, None] + rope, mask=used, other=0.0)
    at = (place * 4)[None, :] + tl.arange(0, GROUPS)[:, None]
    return words, tl.load(scales_ptr + at, mask=in_split[None, :], other=0.0), k_pe


@triton.jit
def query_groups(q_row, is_row, WORDS: tl.constexpr, PARTS: tl.constexpr, NUMBER: tl.constexpr):
    """decode.py's query_parts for each group of channels: PARTS tiles of [G, H, WORDS], and what
    undoes their power of two: [G, H]. q_row: [G, H, 1], where the channels of a group begin.
    """
    word = tl.arange(0, WORDS)[None, None, :] * PARTS
    parts = ()
    for j in tl.static_range(PARTS):
        parts += (tl.load(q_row + word + j, mask=is_row, other=0.0).to(tl.float32),)
    largest = tl.abs(parts[0])
    for j in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.abs(parts[j]))
    up = tl.minimum(-exponent_of(tl.max(largest, axis=2)) + UP, 126)
    scaled = ()
    for j in tl.static_range(PARTS):
        scaled += ((parts[j] * two_to(up)[:, :, None]).to(NUMBER),)
    return scaled, two_to(-up)


@triton.jit
def coded_mla_kernel(
    q_ptr,
    words_ptr,
    scales_ptr,
    pe_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    context_lens_ptr,
    block_table_ptr,
    scale_log2e,
    num_heads,
    window,
    split_size,
    stride_qb,
    stride_qh,
    stride_kblock,
    stride_kn,
    stride_table,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    UNIT: tl.constexpr,
    UNPACK: tl.constexpr,
    NUMBER: tl.constexpr,
    SPLIT_OF: tl.constexpr = equal_split,
):
    """One program per block of heads and split. UNIT: what UNPACK's numbers have to be multiplied
    by; NUMBER: the type of the products; PARTS: codes of a word of 16 bits.
    """
    sequence, length, begin, end, place = SPLIT_OF(
        items_ptr, context_lens_ptr, window, split_size, num_heads, BLOCK_N
    )
    if items_ptr is not None and sequence < 0:  # an idle item of the list
        return
    GROUPS: tl.constexpr = RANK // GROUP
    WORDS: tl.constexpr = GROUP // PARTS
    PE: tl.constexpr = ROPE // GROUPS
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    group = tl.arange(0, GROUPS)[:, None, None]
    q_row = (q_ptr + sequence * stride_qb + head * stride_qh)[None, :, None]
    is_row = is_head[None, :, None]
    q, q_scale = query_groups(q_row + group * GROUP, is_row, WORDS, PARTS, NUMBER)
    q_scale *= scale_log2e * UNIT
    rope = RANK + group * PE + tl.arange(0, PE)[None, None, :]
    q_pe = tl.load(q_row + rope, mask=is_row, other=0.0)
    table_ptr = block_table_ptr + sequence * stride_table

    m_i = tl.full((GROUPS, BLOCK_H), float("-inf"), tl.float32)
    l_i = tl.zeros((GROUPS, BLOCK_H), tl.float32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc += (tl.zeros((GROUPS, BLOCK_H, WORDS), tl.float32),)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        in_split = key < end
        page, row = paged_row(table_ptr, sequence, key, in_split, PAGE_SIZE)
        at = page * stride_kblock + row * stride_kn
        words, scales, k_pe = load_rows(
            words_ptr, scales_ptr, pe_ptr, at, in_split, WORDS, GROUPS, ROPE
        )
        codes = UNPACK(words, PARTS)
        part = tl.zeros((GROUPS, BLOCK_H, BLOCK_N), tl.float32)
        for j in tl.static_range(PARTS):
            k_j = tl.permute(codes[j].to(NUMBER), (0, 2, 1))
            part = tl.dot(q[j], k_j, part, input_precision="ieee")
        part = part * (q_scale[:, :, None] * scales[:, None, :])
        in_pe = tl.dot(q_pe, tl.permute(k_pe, (0, 2, 1)), input_precision="ieee")
        part += in_pe * scale_log2e
        total = tl.where(in_split[None, :], sum_of_groups(part), float("-inf"))
        scores = in_all_groups(total, part)
        # As in decode.py, the exponent of a key's scale joins its score before the maximum is
        # subtracted, so that no weight leaves float16. Each group has a maximum of its own then.
        e = tl.minimum(tl.maximum(exponent_of(scales), -100), 126)
        shifted = scores + e.to(tl.float32)[:, None, :]
        m_new = tl.maximum(m_i, tl.max(shifted, axis=2) - UP)
        alpha = tl.exp2(m_i - m_new)
        w = tl.exp2(shifted - m_new[:, :, None])  # p · 2^e
        down = two_to(-e)
        l_i = l_i * alpha + tl.sum(w * down[:, None, :], axis=2)
        w = (w * (scales * down)[:, None, :]).to(NUMBER)
        new = ()
        for j in tl.static_range(PARTS):
            old = acc[j] * alpha[:, :, None]
            new += (tl.dot(w, codes[j].to(NUMBER), old, input_precision="ieee"),)
        acc = new
        m_i = m_new

    share = UNIT / l_i[:, :, None]
    partial = place + head * tl.num_programs(1)
    for j in tl.static_range(PARTS):
        column = group * GROUP + tl.arange(0, WORDS)[None, None, :] * PARTS + j
        out = tl.where(begin < length, acc[j] * share, 0.0).to(out_ptr.dtype.element_ty)
        out_at = out_ptr + (partial * RANK)[None, :, None] + column
        tl.store(out_at, out, mask=is_head[None, :, None])
    # the same in all groups, but for rounding
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # ln 2
    first = is_head[None, :] & (tl.arange(0, GROUPS)[:, None] == 0)
    tl.store(lse_ptr + partial[None, :] + tl.zeros_like(lse).to(tl.int32), lse, mask=first)


@triton.jit
def write_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    pe_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_slot,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program per token: the scale of each group, its codes, and the rotary values as they are.
    stride_slot: in units of 16 bytes; BLOCK_R: ROPE or the next power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:  # −1 marks a token that is not kept
        GROUPS: tl.constexpr = RANK // GROUP
        PER_UNIT: tl.constexpr = 128 // pe_ptr.dtype.element_ty.primitive_bitwidth
        at, x_row = slot * stride_slot, x_ptr + token * stride_xt
        group, column = tl.arange(0, GROUPS), tl.arange(0, GROUP)[None, :]
        inside = group[:, None] * GROUP + column
        x = tl.load(x_row + inside).to(tl.float32)
        largest = tl.reduce(tl.abs(x), 1, larger)
        scale = larger(tl.div_rn(largest, tl.zeros_like(largest) + LARGEST), LEAST)
        tl.store(scales_ptr + at * 4 + group, scale)
        ratio = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
        # A NaN stays one: plain minimum and maximum would turn it into a number.
        ratio = smaller(larger(ratio, -LARGEST), LARGEST)
        tl.store(codes_ptr + at * 16 + inside, ratio.to(codes_ptr.dtype.element_ty))
        rope = tl.arange(0, BLOCK_R)
        k_pe = tl.load(x_row + RANK + rope, mask=rope < ROPE, other=0.0)
        tl.store(pe_ptr + at * PER_UNIT + rope, k_pe, mask=rope < ROPE)
