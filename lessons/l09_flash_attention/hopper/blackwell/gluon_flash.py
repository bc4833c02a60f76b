"""FlashAttention for Blackwell, in Gluon: one warp fetches tiles, one starts the matrix products,
and two groups of four warps compute softmax, each for 128 queries of its own.

Its compiled code for sm_100 runs on a CPU (`lessons.toolbox.gpu`); it has NOT RUN on a GPU yet.
Read it beside hopper/gluon_flash.py. What is new:

- the sums of a product are no registers. They are columns of tensor memory (tiles.py), so a warp
  of its own can start all products: `multiply_tiles`;
- the weights go back into tensor memory, to where their scores were;
- a row's maximum is replaced only once it has grown by more than 8, so `out` is rarely rescaled;
- a quarter of the exponentials is a polynomial, because Blackwell's tensor cores are twice as fast
  as Hopper's, and its special function unit is not.

Limits, to stay readable: those of hopper/gluon_flash.py. Source: Zadouri et al. 2026,
FlashAttention-4, of which this leaves out the group of warps that only rescales `out`, and programs
in pairs.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l09_flash_attention.hopper.blackwell.tiles import (
    allocate_barriers,
    exp2,
    part_of,
    rescale,
    weights_of,
)
from lessons.l09_flash_attention.hopper.gluon_flash import load_tiles, tile_range
from lessons.l09_flash_attention.hopper.launch import check_launch, tiles_of
from lessons.l09_flash_attention.hopper.rings import allocate_ring, tile_of, wait_for
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.blackwell import (
        TensorMemoryLayout,
        allocate_tensor_memory,
        fence_async_shared,
        get_tmem_reg_layout,
        mbarrier,
        tcgen05_commit,
        tcgen05_mma,
        tma,
    )
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language

ROWS, BLOCK_N = 128, 128  # queries of a softmax group, keys of a tile
STAGES = 2  # tiles in a ring
GROUPS = 2  # of softmax, as many as flash_blackwell_kernel lists
BLOCK_M = GROUPS * ROWS  # queries of a program
NUM_WARPS = 4  # of a group: each warp has a quarter of the lanes of tensor memory
COLUMNS = 32  # that a thread loads at once; the last of a tile are left to the polynomial
LOG2_E = 1.4426950408889634


@gluon.jit
def start_scores(q, k, i, scores, ready, GROUP: gl.constexpr):
    """q · kᵀ of tile i in flight, for one group. Its mbarrier `ready` tells the end."""
    tcgen05_mma(
        wait_for(q, GROUP),
        wait_for(k, i).permute((1, 0)),
        scores.index(GROUP),
        use_acc=False,
        mbarriers=[ready.index(GROUP)],
    )


@gluon.jit
def free_tile(ring, i):
    """Tile i may be overwritten once all products that were started so far have ended."""
    tiles, _ready, free = ring
    tcgen05_commit(free.index(i % tiles.shape[0]))


@gluon.jit
def multiply_tiles(memory, rings, barriers, num_queries, num_keys, CAUSAL: gl.constexpr):
    """Start every product. The groups take turns: while the tensor core works for one of them, the
    other computes its softmax.
    """
    scores, out = memory
    q, k, v = rings
    scores_ready, weights_ready, out_ready = barriers
    GROUPS: gl.constexpr = scores.shape[0]
    _start_m, _first, num_tiles, _num_masked = tile_range(
        num_queries, num_keys, CAUSAL, GROUPS * scores.shape[1], scores.shape[2]
    )
    for group in gl.static_range(GROUPS):
        start_scores(q, k, 0, scores, scores_ready, group)
    free_tile(k, 0)
    for i in range(num_tiles):
        v_tile = wait_for(v, i)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(weights_ready.index(group), i & 1)
            weights = weights_of(scores.index(group), 0, scores.shape[2])
            done = out_ready.index(group)
            tcgen05_mma(weights, v_tile, out.index(group), use_acc=i > 0, mbarriers=[done])
            if i + 1 < num_tiles:
                mbarrier.wait(done, i & 1)  # the next scores overwrite the weights
                start_scores(q, k, i + 1, scores, scores_ready, group)
        free_tile(v, i)
        if i + 1 < num_tiles:
            free_tile(k, i + 1)


@gluon.jit
def softmax_step(
    tile,
    m_i,
    l_i,
    qk_scale,
    first,
    start_n,
    num_keys,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    COLUMNS: gl.constexpr,
    PART: gl.constexpr,
):
    """Replace a tile of scores by its weights. Returns the new maximum and sum of each row, and
    what older sums are worth.
    """
    ROWS: gl.constexpr = tile.shape[0]
    PARTS: gl.constexpr = tile.shape[1] // COLUMNS
    parts = ()
    m_new = m_i
    for j in gl.static_range(PARTS):
        scores = part_of(tile, j, COLUMNS).load(PART)
        if MASKED:
            query = first + gl.arange(0, ROWS, gl.SliceLayout(1, PART))
            key = start_n + j * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, PART))
            sees = gl.expand_dims(key < num_keys, 0) & gl.full([ROWS, COLUMNS], True, gl.int1, PART)
            if CAUSAL:
                sees = sees & (gl.expand_dims(key, 0) <= gl.expand_dims(query, 1))
            scores = gl.where(sees, scores, float("-inf"))
        parts = parts + (scores,)  # noqa: RUF005  Triton knows no star here
        m_new = gl.maximum(m_new, gl.max(scores, 1) * qk_scale)
    # A weight may be up to 2^8, because `out` and l have the same factor, which division removes.
    m_new = gl.where(m_new - m_i > 8.0, m_new, m_i)
    m_safe = m_new
    if MASKED:  # without a mask every row has seen a key
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    l_i = l_i * alpha
    for j in gl.static_range(PARTS):
        p = exp2(parts[j] * qk_scale - gl.expand_dims(m_safe, 1), j == PARTS - 1)
        l_i += gl.sum(p, 1)
        weights_of(tile, j, COLUMNS).store(p.to(gl.bfloat16))
    return m_new, l_i, alpha


@gluon.jit
def compute_softmax(
    GROUP: gl.constexpr,
    shared,
    CAUSAL: gl.constexpr,
    COLUMNS: gl.constexpr,
    PART: gl.constexpr,
    OUT: gl.constexpr,
):
    """The softmax of ROWS queries, and their rows of the output."""
    out_desc, lse_ptr, memory, q, barriers, num_queries, num_keys, qk_scale = shared
    scores_ready, weights_ready, out_ready = barriers
    tile, out = memory[0].index(GROUP), memory[1].index(GROUP)
    GROUPS: gl.constexpr = memory[0].shape[0]
    ROWS: gl.constexpr = tile.shape[0]
    BLOCK_N: gl.constexpr = tile.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, PART)
    start_m, first, num_tiles, num_masked = tile_range(
        num_queries, num_keys, CAUSAL, GROUPS * ROWS, BLOCK_N
    )
    start_m += GROUP * ROWS
    first += GROUP * ROWS
    m_i = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l_i = gl.full([ROWS], 0.0, gl.float32, ROW)
    for part in gl.static_range(2):  # the tiles with a mask, then the many without
        begin = 0 if part == 0 else num_masked
        end = num_masked if part == 0 else num_tiles
        for i in range(begin, end):
            mbarrier.wait(scores_ready.index(GROUP), i & 1)
            start_n = (num_tiles - 1 - i) * BLOCK_N
            m_i, l_i, alpha = softmax_step(
                tile, m_i, l_i, qk_scale, first, start_n, num_keys, CAUSAL, part == 0, COLUMNS, PART
            )
            # p · v of the tile before has ended, because these scores were started after it
            if (i > 0) & (gl.min(alpha, 0) < 1.0):
                rescale(out, alpha, COLUMNS, PART)
            mbarrier.arrive(weights_ready.index(GROUP), count=1)
    mbarrier.wait(out_ready.index(GROUP), (num_tiles - 1) & 1)

    row, head = start_m + gl.arange(0, ROWS, ROW), gl.program_id(0)
    lse = (m_i + gl.log2(l_i)) * 0.6931471805599453  # ln 2
    place = row.to(gl.int64) * gl.num_programs(0) + head
    gl.store(lse_ptr + place, lse, mask=row < num_queries)
    l_safe = gl.convert_layout(gl.where(l_i == 0.0, 1.0, l_i), gl.SliceLayout(1, OUT))
    q_tile = tile_of(q, GROUP)  # where q was: all products that read it have ended
    q_tile.store((out.load(OUT) / gl.expand_dims(l_safe, 1)).to(out_desc.dtype))
    fence_async_shared()
    # TMA drops rows beyond the last
    tma.async_copy_shared_to_global(out_desc, [start_m, head * out.shape[1]], q_tile)
    tma.store_wait(pendings=0)


@gluon.jit
def flash_blackwell_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    num_queries,
    num_keys,
    qk_scale,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: GROUPS · ROWS queries of one head. Descriptors of [T, H · HEAD_DIM] with tiles
    of [ROWS or BLOCK_N, HEAD_DIM].
    """
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    SCORES_AT: gl.constexpr = TensorMemoryLayout([ROWS, BLOCK_N], col_stride=1)
    OUT_AT: gl.constexpr = TensorMemoryLayout([ROWS, HEAD_DIM], col_stride=1)
    PART: gl.constexpr = get_tmem_reg_layout(
        gl.float32, [ROWS, COLUMNS], TensorMemoryLayout([ROWS, COLUMNS], col_stride=1), num_warps
    )
    OUT: gl.constexpr = get_tmem_reg_layout(gl.float32, [ROWS, HEAD_DIM], OUT_AT, num_warps)
    q = allocate_ring(q_desc, GROUPS, 1)
    k = allocate_ring(k_desc, STAGES, 1)  # 1: it is the tensor core that frees a tile
    v = allocate_ring(v_desc, STAGES, 1)
    barriers = allocate_barriers(GROUPS), allocate_barriers(GROUPS), allocate_barriers(GROUPS)
    # both together have 2 · (128 + HEAD_DIM) columns: all 512 with a head size of 128
    scores = allocate_tensor_memory(gl.float32, [GROUPS, ROWS, BLOCK_N], SCORES_AT)
    out = allocate_tensor_memory(gl.float32, [GROUPS, ROWS, HEAD_DIM], OUT_AT)
    memory, rings, descs = (scores, out), (q, k, v), (q_desc, k_desc, v_desc)
    shared = (out_desc, lse_ptr, memory, q, barriers, num_queries, num_keys, qk_scale)
    gl.warp_specialize(
        [
            (compute_softmax, (0, shared, CAUSAL, COLUMNS, PART, OUT)),
            (compute_softmax, (1, shared, CAUSAL, COLUMNS, PART, OUT)),
            (multiply_tiles, (memory, rings, barriers, num_queries, num_keys, CAUSAL)),
            (load_tiles, (descs, rings, num_queries, num_keys, CAUSAL, GROUP)),
        ],
        [num_warps, 1, 1],  # of the second to the fourth
        [224, 32, 24],  # registers a thread
    )


def flash_attention_blackwell(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """One sequence, on a Blackwell GPU or on a CPU that runs its code. q: [T, Hq, D], k, v: [Tk,
    Hkv, D] -> out: [T, Hq, D], lse: [T, Hq] float32.

    bfloat16, dense, D 64 or 128. Raises ValueError.
    """
    check_launch(q, k, v, softmax_scale, causal, 10)
    num_heads, head_dim = q.shape[1:]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        with nullcontext() if q.is_cuda else on_the_machine(100):
            flash_blackwell_kernel[num_heads, triton.cdiv(len(q), BLOCK_M)](
                tiles_of(q, ROWS),
                tiles_of(k, BLOCK_N),
                tiles_of(v, BLOCK_N),
                tiles_of(out, ROWS),
                lse,
                len(q),
                len(k),
                scale * LOG2_E,
                CAUSAL=causal,
                GROUP=num_heads // k.shape[1],
                STAGES=STAGES,
                GROUPS=GROUPS,
                COLUMNS=COLUMNS,
                num_warps=NUM_WARPS,
            )
    return out, lse
