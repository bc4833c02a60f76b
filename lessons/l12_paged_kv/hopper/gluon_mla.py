"""Paged MLA decode for Hopper, in Gluon: two warpgroups share 64 heads, each with half of the
output's columns, and the weights go from one to the other through shared memory.

Its compiled code for sm_90 runs on a CPU (`lessons.toolbox.gpu`); it has NOT RUN on a GPU yet.
Read README.md, then `compute_half` beside latents.paged_mla_kernel. What is new:

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

from lessons.l09_flash_attention.hopper.rings import (
    allocate_ring,
    fill,
    release,
    tile_of,
    wait_for,
)
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
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
def keys_of_program(
    items_ptr, context_lens_ptr, split_size, num_heads, LISTED: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(sequence, begin, end, place, step) of a program, as lesson 12's equal_split and listed_split
    give them: its keys, and that head h's partial result is at place + h · step.
    """
    step = gl.num_programs(1)
    if LISTED:
        item = items_ptr + gl.program_id(1) * 4
        sequence = gl.load(item).to(gl.int64)
        begin, end = gl.load(item + 1), gl.load(item + 2)
        place = gl.load(item + 3).to(gl.int64)
    else:
        split, sequence = gl.program_id(1), gl.program_id(2).to(gl.int64)
        length = gl.load(context_lens_ptr + sequence).to(gl.int32)
        tiles = (length + BLOCK_N - 1) // BLOCK_N
        share = (tiles + step - 1) // step * BLOCK_N
        size = gl.where(split_size * step >= length, split_size, share)
        begin = split * size
        end = gl.minimum(begin + size, length)
        place = sequence * num_heads * step + split
    return sequence, begin, end, place, step


@gluon.jit
def num_tiles_of(begin, end, BLOCK_N: gl.constexpr):
    """Tiles of a program, an even number: the last one may hold no key of its own."""
    return (gl.maximum(end - begin, 0) + 2 * BLOCK_N - 1) // (2 * BLOCK_N) * 2


@gluon.jit
def allocate_pages(desc, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, READERS: gl.constexpr):
    """A ring as rings.py has it, of tiles that are filled by pieces of pages."""
    COLUMNS: gl.constexpr = desc.block_type.shape[1]
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, BLOCK_N, COLUMNS], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=READERS)
    return tiles, ready, free


@gluon.jit
def allocate_flags():
    """An mbarrier for each warpgroup, at which it arrives when it has left something."""
    flags = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for side in gl.static_range(2):
        mbarrier.init(flags.index(side), count=1)
    return flags


@gluon.jit
def fill_pages(ring, i, desc, rows, column):
    """The producer asks for tile i, piece after piece of its pages, once its buffer is free. rows:
    where in the pool each piece begins.
    """
    tiles, ready, free = ring
    STAGES: gl.constexpr = tiles.shape[0]
    PIECE: gl.constexpr = desc.block_type.shape[0]
    PIECES: gl.constexpr = tiles.shape[1] // PIECE
    stage, phase = i % STAGES, (i // STAGES) & 1
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), PIECES * desc.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        part = tiles.index(stage).slice(piece * PIECE, PIECE)
        tma.async_copy_global_to_shared(desc, [rows[piece], column], ready.index(stage), part)


@gluon.jit
def load_latents(
    descs, q_rings, rings, table_ptr, num_rows, begin, end, row, PAGE_SIZE: gl.constexpr
):
    """The queries once, then tiles of latents as buffers become free."""
    q_desc, q_pe_desc, kv_desc, pe_desc = descs
    q, q_pe = q_rings
    left, right, pe = rings
    HALF: gl.constexpr = q_desc.block_type.shape[1]
    PIECE: gl.constexpr = kv_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = left[0].shape[1]
    PIECES: gl.constexpr = BLOCK_N // PIECE
    num_tiles = num_tiles_of(begin, end, BLOCK_N)
    if num_tiles > 0:
        fill(q, 0, q_desc, row, 0)
        fill(q, 1, q_desc, row, HALF)
        fill(q_pe, 0, q_pe_desc, row, 2 * HALF)
    for i in range(num_tiles):
        rows = ()
        for piece in gl.static_range(PIECES):
            key = begin + i * BLOCK_N + piece * PIECE
            page = gl.load(table_ptr + key // PAGE_SIZE, mask=key < end, other=0)
            # TMA gives zeros for what is beyond the pool's last row
            rows = rows + (gl.where(key < end, page * PAGE_SIZE + key % PAGE_SIZE, num_rows),)
        fill_pages(left, i, kv_desc, rows, 0)
        fill_pages(right, i, kv_desc, rows, HALF)
        fill_pages(pe, i, pe_desc, rows, 2 * HALF)


@gluon.jit
def scores_of(q_rings, rings, i, zero, scale_log2e, start, end, SCORES: gl.constexpr):
    """Scaled scores of tile i, [BLOCK_H, BLOCK_N]; its keys begin at `start`. All of K is read."""
    q, q_pe = q_rings
    left, right, pe = rings
    BLOCK_H: gl.constexpr = q[0].shape[1]
    BLOCK_N: gl.constexpr = left[0].shape[1]
    k_left = wait_for(left, i).permute((1, 0))
    scores = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    adding = warpgroup_mma(tile_of(q, zero), k_left, scores, use_acc=False, is_async=True)
    k_right = wait_for(right, i).permute((1, 0))
    adding = warpgroup_mma(tile_of(q, 1 + zero), k_right, adding, is_async=True)
    k_pe = wait_for(pe, i).permute((1, 0))
    adding = warpgroup_mma(tile_of(q_pe, zero), k_pe, adding, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(adding,))
    release(left, i)
    release(right, i)
    key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    is_key = gl.expand_dims(key < end, 0) & gl.full([BLOCK_H, BLOCK_N], True, gl.int1, SCORES)
    return gl.where(is_key, scores * scale_log2e, float("-inf"))


@gluon.jit
def tell(numbers, ready, side, x):
    """Leave a number a row for the other warpgroup."""
    numbers.index(side).store(x)
    mbarrier.arrive(ready.index(side), count=1)


@gluon.jit
def hear(numbers, ready, side, phase, ROW: gl.constexpr):
    """The numbers that warpgroup `side` has left."""
    mbarrier.wait(ready.index(side), phase)
    return numbers.index(side).load(ROW)


@gluon.jit
def leave_weights(pe, weights_ready, side, i, weights):
    """The weights of tile i for the other warpgroup, where its rotary keys were."""
    tile_of(pe, i).store(weights)
    fence_async_shared()
    mbarrier.arrive(weights_ready.index(side), count=1)


@gluon.jit
def values_of(ring, i, start, end):
    """Tile i of V, this warpgroup's columns. Its rows from the sequence's end to the page's become
    0, because 0 · NaN is NaN. Eight rows of 64 columns, 1 KiB, lie together.
    """
    tile = tile_of(ring, i)
    BLOCK_N: gl.constexpr = tile.shape[0]
    GROUPS: gl.constexpr = BLOCK_N // 8
    PARTS: gl.constexpr = tile.shape[1] // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    if (start < end) & (start + BLOCK_N > end):
        groups = tile._reinterpret(tile.dtype, [PARTS * GROUPS, 8, 64], tile.layout)
        for group in range((end - start) // 8, GROUPS):
            row = start + group * 8 + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            is_key = gl.expand_dims(row < end, 1) & gl.full([8, 64], True, gl.int1, LAYOUT)
            for part in gl.static_range(PARTS):
                rows = groups.index(part * GROUPS + group)
                rows.store(gl.where(is_key, rows.load(LAYOUT), 0.0))
        fence_async_shared()
        gl.barrier()
    return tile


@gluon.jit
def hidden_zero():
    """0, and the compiler does not know it."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def column(x, OUT: gl.constexpr):
    """A number a row, [BLOCK_H], as a column for a tile in layout OUT."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, OUT)), 1)


@gluon.jit
def compute_half(
    SIDE: gl.constexpr,
    shared,
    num_heads,
    scale_log2e,
    keys,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
):
    """The left (SIDE 0) or right half of the output's columns, and the scores of every other tile.

    A pair of tiles: `a` has its scores from warpgroup 0, `b` from warpgroup 1.
    """
    out_ptr, lse_ptr, q_rings, rings, exchange = shared
    left, right, pe = rings
    maxima, max_ready, weights_ready, sums, sum_ready = exchange
    begin, end, place, step = keys
    v = left if SIDE == 0 else right
    BLOCK_N: gl.constexpr = left[0].shape[1]
    HALF: gl.constexpr = left[0].shape[2]
    BLOCK_H: gl.constexpr = q_rings[0][0].shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    m_i = gl.full([BLOCK_H], float("-inf"), gl.float32, ROW)
    l_i = gl.full([BLOCK_H], 0.0, gl.float32, ROW)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, OUT)
    num_tiles = num_tiles_of(begin, end, BLOCK_N)
    if num_tiles > 0:
        wait_for(q_rings[0], 0)
        wait_for(q_rings[0], 1)
        wait_for(q_rings[1], 0)
    for pair in range(num_tiles // 2):
        zero = hidden_zero()
        a, b, phase = 2 * pair + zero, 2 * pair + 1 + zero, pair & 1
        start_a = begin + a * BLOCK_N
        start_b = start_a + BLOCK_N
        if SIDE == 0:
            scores = scores_of(q_rings, rings, a, zero, scale_log2e, start_a, end, SCORES)
            m_a = gl.maximum(m_i, gl.max(scores, 1))
            tell(maxima, max_ready, 0, m_a)
            p = gl.exp2(scores - gl.expand_dims(m_a, 1))
            weights = p.to(gl.bfloat16)
            leave_weights(pe, weights_ready, 0, a, weights)
            alpha = gl.exp2(m_i - m_a)
            l_i = l_i * alpha + gl.sum(p, 1)
            acc = acc * column(alpha, OUT)
            values = values_of(v, a, start_a, end)
            weights = gl.convert_layout(weights, P)
            adding = warpgroup_mma(weights, values, acc, is_async=True)
            m_i = hear(maxima, max_ready, 1, phase, ROW)
            alpha = gl.exp2(m_a - m_i)
            l_i = l_i * alpha
            mbarrier.wait(weights_ready.index(1), phase)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            release(v, a)
            acc = acc * column(alpha, OUT)
            values = values_of(v, b, start_b, end)
            adding = warpgroup_mma(tile_of(pe, b), values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            release(v, b)
            release(pe, b)
        else:
            scores = scores_of(q_rings, rings, b, zero, scale_log2e, start_b, end, SCORES)
            m_a = hear(maxima, max_ready, 0, phase, ROW)
            m_b = gl.maximum(m_a, gl.max(scores, 1))
            tell(maxima, max_ready, 1, m_b)
            alpha = gl.exp2(m_i - m_a)
            acc = acc * column(alpha, OUT)
            mbarrier.wait(weights_ready.index(0), phase)
            values = values_of(v, a, start_a, end)
            adding = warpgroup_mma(tile_of(pe, a), values, acc, is_async=True)
            p = gl.exp2(scores - gl.expand_dims(m_b, 1))
            weights = p.to(gl.bfloat16)
            leave_weights(pe, weights_ready, 1, b, weights)
            beta = gl.exp2(m_a - m_b)
            l_i = l_i * alpha * beta + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            release(v, a)
            release(pe, a)
            acc = acc * column(beta, OUT)
            values = values_of(v, b, start_b, end)
            weights = gl.convert_layout(weights, P)
            adding = warpgroup_mma(weights, values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            release(v, b)
            m_i = m_b
    # each warpgroup has summed the weights of its own tiles
    tell(sums, sum_ready, SIDE, l_i)
    l_i += hear(sums, sum_ready, 1 - SIDE, 0, ROW)
    l_safe = gl.where(l_i == 0.0, 1.0, l_i)

    first = gl.program_id(0) * BLOCK_H
    if SIDE == 0:
        head = first + gl.arange(0, BLOCK_H, ROW)
        lse = (m_i + gl.log2(l_i)) * 0.6931471805599453  # ln 2
        gl.store(lse_ptr + place + head * step, lse, mask=head < num_heads)
    head = first + gl.arange(0, BLOCK_H, gl.SliceLayout(1, OUT))
    at = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    cell = gl.expand_dims((place + head * step) * (2 * HALF), 1) + gl.expand_dims(at, 0)
    out = (acc / column(l_safe, OUT)).to(out_ptr.dtype.element_ty)
    is_head = gl.expand_dims(head < num_heads, 1) & gl.full([BLOCK_H, HALF], True, gl.int1, OUT)
    gl.store(out_ptr + cell, out, mask=is_head)


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
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rings = allocate_ring(q_desc, 2, 1), allocate_ring(q_pe_desc, 1, 1)
    # free once the scores and the sums of its columns have read it; once its weights are read
    left = allocate_pages(kv_desc, STAGES, BLOCK_N, 2)
    right = allocate_pages(kv_desc, STAGES, BLOCK_N, 2)
    pe = allocate_pages(pe_desc, STAGES, BLOCK_N, 1)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], NUMBERS)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], NUMBERS)
    exchange = maxima, allocate_flags(), allocate_flags(), sums, allocate_flags()
    shared = out_ptr, lse_ptr, q_rings, (left, right, pe), exchange
    keys = begin, end, place, step
    descs = q_desc, q_pe_desc, kv_desc, pe_desc
    table_ptr = block_table_ptr + sequence * stride_table
    row = (sequence * num_heads).to(gl.int32) + gl.program_id(0) * BLOCK_H
    gl.warp_specialize(
        [
            (compute_half, (0, shared, num_heads, scale_log2e, keys, SCORES, OUT)),
            (compute_half, (1, shared, num_heads, scale_log2e, keys, SCORES, OUT)),
            (
                load_latents,
                (descs, q_rings, (left, right, pe), table_ptr, num_rows, begin, end, row, PAGE_SIZE),
            ),
        ],
        [num_warps, 1],  # of the second and the third
        [240, 24],  # registers a thread: the producer's go to the consumers
    )
