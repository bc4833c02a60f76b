"""Paged MLA decode for Hopper, in Gluon: two warpgroups share 64 heads, each with half of the
output's columns, and the weights go from one to the other through shared memory.

Its compiled code for sm_90 runs on a CPU (`lessons.toolbox.gpu`); it has NOT RUN on a GPU yet.
Read README.md, then `step_left` beside latents.paged_mla_kernel. What is new:

- a tile of 64 latents is loaded once, by the copy engine (TMA), and read three times: as K, and
  each half of its columns as V;
- the sums of 64 heads, 512 numbers each, do not fit into one warpgroup's registers. So warpgroup 0
  has columns 0 to 255 and warpgroup 1 the others;
- scores are computed once: of even tiles by warpgroup 0, of odd ones by warpgroup 1. Their weights
  are left where the tile's rotary keys were, because nothing reads those any more;
- a row's maximum goes back and forth: each tile's is computed from the one before.

Limits, to stay readable: bfloat16, 64 rotary values, pages of 8, 16, 32 or a multiple of 64 tokens.
Source: DeepSeek, FlashMLA, docs/20250422-new-kernel-deep-dive.md (the "seesaw" schedule).
"""

from lessons.l09_flash_attention.hopper.rings import allocate_ring, release, tile_of, wait_for
from lessons.l12_paged_kv.kernels.hopper.tiles import (
    allocate_flags,
    allocate_numbers,
    allocate_pages,
    column,
    hear,
    keys_of_program,
    leave_weights,
    load_latents,
    num_tiles_of,
    tell,
    values_of,
)
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language

BLOCK_H = 64  # heads of a program: the rows of one wgmma
BLOCK_N = 64  # keys of a tile
STAGES = 2  # tiles in shared memory; as many as there are warpgroups, so tile i is in buffer i % 2
NUM_WARPS = 4  # of a consumer: one warpgroup


@gluon.jit
def hidden_zero():
    """0, which the compiler does not know. It computes the 72 descriptors of a tile's products in
    the loop then, with one addition each. Before the loop they would fill the registers, and spill.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def scores_of(rings, i, zero, start, end, scale_log2e, SCORES: gl.constexpr):
    """Scaled scores of tile i, [BLOCK_H, BLOCK_N], whose keys begin at `start`."""
    q, q_pe, left, right, pe = rings
    BLOCK_H: gl.constexpr = q[0].shape[1]
    BLOCK_N: gl.constexpr = left[0].shape[1]
    nothing = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    k = wait_for(left, i).permute((1, 0))
    adding = warpgroup_mma(tile_of(q, zero), k, nothing, use_acc=False, is_async=True)
    k = wait_for(right, i).permute((1, 0))
    adding = warpgroup_mma(tile_of(q, 1 + zero), k, adding, is_async=True)
    k = wait_for(pe, i).permute((1, 0))
    adding = warpgroup_mma(tile_of(q_pe, zero), k, adding, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(adding,))
    key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    is_key = gl.expand_dims(key < end, 0) & gl.full([BLOCK_H, BLOCK_N], True, gl.int1, SCORES)
    return gl.where(is_key, scores * scale_log2e, float("-inf"))


@gluon.jit
def step_left(rings, exchange, pair, keys, scale_log2e, state, SCORES: gl.constexpr):
    """Warpgroup 0 and a pair of tiles: the scores of the first, `a`. state: (m, l, acc)."""
    _q, _q_pe, v, _right, pe = rings
    maxima, flags = exchange
    begin, end = keys
    m_i, l_i, acc = state
    OUT: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = v[0].shape[1]
    zero, phase = hidden_zero(), pair & 1
    a, b = 2 * pair + zero, 2 * pair + 1 + zero
    start = begin + a * BLOCK_N
    scores = scores_of(rings, a, zero, start, end, scale_log2e, SCORES)
    m_a = gl.maximum(m_i, gl.max(scores, 1))
    tell(maxima, 0, m_a)
    p = gl.exp2(scores - gl.expand_dims(m_a, 1))
    weights = p.to(gl.bfloat16)
    leave_weights(pe, flags, 0, a, weights)
    alpha = gl.exp2(m_i - m_a)
    l_i = l_i * alpha + gl.sum(p, 1)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, OUT, 2))
    acc = acc * column(alpha, OUT)
    adding = warpgroup_mma(weights, values_of(v, a, start, end), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(adding,))
    release(v, a)
    m_b = hear(maxima, 1, phase, gl.SliceLayout(1, SCORES))
    beta = gl.exp2(m_a - m_b)
    acc = acc * column(beta, OUT)
    mbarrier.wait(flags.index(1), phase)
    values = values_of(v, b, start + BLOCK_N, end)
    adding = warpgroup_mma(tile_of(pe, b), values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(adding,))
    release(v, b)
    release(pe, b)
    return m_b, l_i * beta, acc


@gluon.jit
def step_right(rings, exchange, pair, keys, scale_log2e, state, SCORES: gl.constexpr):
    """Warpgroup 1 and a pair of tiles: the scores of the second, `b`, after the product of `a`, so
    that the buffers of `a` are filled again while `b` is used.
    """
    _q, _q_pe, _left, v, pe = rings
    maxima, flags = exchange
    begin, end = keys
    m_i, l_i, acc = state
    OUT: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = v[0].shape[1]
    zero, phase = hidden_zero(), pair & 1
    a, b = 2 * pair + zero, 2 * pair + 1 + zero
    start = begin + b * BLOCK_N
    m_a = hear(maxima, 0, phase, gl.SliceLayout(1, SCORES))
    alpha = gl.exp2(m_i - m_a)
    acc = acc * column(alpha, OUT)
    mbarrier.wait(flags.index(0), phase)
    values = values_of(v, a, start - BLOCK_N, end)
    adding = warpgroup_mma(tile_of(pe, a), values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(adding,))
    release(v, a)
    release(pe, a)
    scores = scores_of(rings, b, zero, start, end, scale_log2e, SCORES)
    m_b = gl.maximum(m_a, gl.max(scores, 1))
    tell(maxima, 1, m_b)
    p = gl.exp2(scores - gl.expand_dims(m_b, 1))
    weights = p.to(gl.bfloat16)
    leave_weights(pe, flags, 1, b, weights)
    beta = gl.exp2(m_a - m_b)
    l_i = l_i * alpha * beta + gl.sum(p, 1)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, OUT, 2))
    acc = acc * column(beta, OUT)
    adding = warpgroup_mma(weights, values_of(v, b, start, end), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(adding,))
    release(v, b)
    return m_b, l_i, acc


@gluon.jit
def compute_half(
    SIDE: gl.constexpr,
    shared,
    keys,
    scale_log2e,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
):
    """The left (SIDE 0) or right half of the output's columns, and every other tile's scores."""
    rings, exchange, sums, results = shared
    q, q_pe, left, _right, _pe = rings
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BLOCK_H: gl.constexpr = q[0].shape[1]
    HALF: gl.constexpr = left[0].shape[2]
    m_i = gl.full([BLOCK_H], float("-inf"), gl.float32, ROW)
    l_i = gl.full([BLOCK_H], 0.0, gl.float32, ROW)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUT)
    num_tiles = num_tiles_of(keys[0], keys[1], left[0].shape[1])
    if num_tiles > 0:
        wait_for(q, 0)
        wait_for(q, 1)
        wait_for(q_pe, 0)
    for pair in range(num_tiles // 2):
        state = m_i, l_i, acc
        if SIDE == 0:
            state = step_left(rings, exchange, pair, keys, scale_log2e, state, SCORES)
        else:
            state = step_right(rings, exchange, pair, keys, scale_log2e, state, SCORES)
        m_i, l_i, acc = state
    # each warpgroup has summed the weights of its own tiles
    tell(sums, SIDE, l_i)
    l_i += hear(sums, 1 - SIDE, 0, ROW)
    store_half(SIDE, results, m_i, l_i, acc)


@gluon.jit
def store_half(SIDE: gl.constexpr, results, m_i, l_i, acc):
    """Write what the program has found, float32 or bfloat16; no key: 0 and −inf."""
    out_ptr, lse_ptr, place, step, num_heads = results
    ROW: gl.constexpr = m_i.type.layout
    OUT: gl.constexpr = acc.type.layout
    BLOCK_H: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1]
    first = gl.program_id(0) * BLOCK_H
    if SIDE == 0:
        head = first + gl.arange(0, BLOCK_H, ROW)
        lse = (m_i + gl.log2(l_i)) * 0.6931471805599453  # ln 2
        gl.store(lse_ptr + place + head * step, lse, mask=head < num_heads)
    head = first + gl.arange(0, BLOCK_H, gl.SliceLayout(1, OUT))
    at = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    cell = gl.expand_dims((place + head * step) * (2 * HALF), 1) + gl.expand_dims(at, 0)
    is_head = gl.expand_dims(head < num_heads, 1) & gl.full([BLOCK_H, HALF], True, gl.int1, OUT)
    out = acc / column(gl.where(l_i == 0.0, 1.0, l_i), OUT)
    gl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=is_head)


@gluon.jit
def paged_mla_hopper_kernel(
    q_desc,
    q_pe_desc,
    kv_desc,
    pe_desc,
    out_ptr,
    lse_ptr,
    items_ptr,
    context_lens_ptr,
    block_table_ptr,
    scale_log2e,
    num_heads,
    split_size,
    stride_table,
    num_rows,
    PAGE_SIZE: gl.constexpr,
    LISTED: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: 64 heads of a sequence, and a split of its keys. Descriptors of [B · H, D] and
    of the pool's rows, [rows, D], with tiles of half of the latent's columns, or of the rotary
    ones.
    """
    sequence, begin, end, place, step = keys_of_program(
        items_ptr, context_lens_ptr, split_size, num_heads, LISTED, BLOCK_N
    )
    if sequence < 0:  # an idle item of the list
        return
    BLOCK_H: gl.constexpr = q_desc.block_type.shape[0]
    HALF: gl.constexpr = q_desc.block_type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, HALF, 16]
    )
    left = allocate_pages(kv_desc, STAGES, BLOCK_N)
    right = allocate_pages(kv_desc, STAGES, BLOCK_N)
    pe = allocate_pages(pe_desc, STAGES, BLOCK_N)
    rings = allocate_ring(q_desc, 2, 1), allocate_ring(q_pe_desc, 1, 1), left, right, pe
    exchange = allocate_numbers(BLOCK_H), allocate_flags()
    results = out_ptr, lse_ptr, place, step, num_heads
    shared = rings, exchange, allocate_numbers(BLOCK_H), results
    keys = begin, end
    descs = q_desc, q_pe_desc, kv_desc, pe_desc
    pages = block_table_ptr + sequence * stride_table, num_rows
    query = (sequence * num_heads).to(gl.int32) + gl.program_id(0) * BLOCK_H
    gl.warp_specialize(
        [
            (compute_half, (0, shared, keys, scale_log2e, SCORES, OUT)),
            (compute_half, (1, shared, keys, scale_log2e, SCORES, OUT)),
            (load_latents, (descs, rings, pages, keys, query, PAGE_SIZE)),
        ],
        [num_warps, 1],  # of the second and the third
        [240, 24],  # registers a thread: the producer's go to the consumers
    )
