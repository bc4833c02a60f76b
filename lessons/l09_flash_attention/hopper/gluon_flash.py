"""FlashAttention for Hopper, in Gluon: one warp fetches tiles, two warpgroups of 64 rows each
compute, and each runs a matrix product beside its softmax.

Its compiled code for sm_90 runs on a CPU (`lessons.toolbox.gpu`); it has NOT RUN on a GPU yet.
Read `compute_tiles` beside flash_kernel. What is new:

- a producer partition, `load_tiles`, that only asks the TMA engine for the next tiles and hands
  them over through `rings.py`;
- the order of a step: q · kᵀ of this tile and p · v of the tile before are both started, then only
  q · kᵀ is waited for. While this tile's softmax runs, p · v goes on;
- two consumers with barriers of their own: while one computes exp, the other has the tensor cores.

Tiles are visited from the diagonal backwards, so that those that need a mask come first.

Limits, to stay readable: one sequence, bfloat16, head size 64 or 128, full or causal, grouped
heads. Source: Shah et al. 2024, FlashAttention-3, algorithms 1 (producer, consumer) and 2 (overlap
within a warpgroup).
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l09_flash_attention.hopper.launch import check_launch, tiles_of
from lessons.l09_flash_attention.hopper.rings import allocate_ring, fill, release, tile_of, wait_for
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language

ROWS, BLOCK_N = 64, 128  # queries of a consumer, keys of a tile
STAGES = 2  # tiles in a ring; not 1: a step holds a tile while it waits for the next
CONSUMERS = 2  # as many as flash_hopper_kernel lists
BLOCK_M = CONSUMERS * ROWS  # queries of a program
NUM_WARPS = 4  # of a consumer: one warpgroup
LOG2_E = 1.4426950408889634


@gluon.jit
def tile_range(
    num_queries, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(start_m, first, num_tiles, num_masked) of this program: its first query, the last key that
    this query sees, how many tiles of keys it visits, and how many of those, the first ones, are
    masked.
    """
    start_m = (gl.num_programs(1) - 1 - gl.program_id(1)) * BLOCK_M  # backwards: the heaviest first
    first = start_m + num_keys - num_queries
    end, full_end = num_keys, num_keys
    if CAUSAL:
        end = gl.minimum(end, gl.maximum(0, first + BLOCK_M))
        full_end = gl.minimum(full_end, gl.maximum(0, first + 1))
    # one at least, so that queries that see no key need no code of their own: all of it is masked
    num_tiles = gl.maximum(1, (end + BLOCK_N - 1) // BLOCK_N)
    # one at least, because the first tile is computed before the loops, by the code with a mask
    num_masked = gl.maximum(1, num_tiles - full_end // BLOCK_N)
    return start_m, first, num_tiles, num_masked


@gluon.jit
def load_tiles(descs, rings, num_queries, num_keys, CAUSAL: gl.constexpr, GROUP: gl.constexpr):
    """Every consumer's q once, then the tiles of k and v, as buffers become free."""
    q_desc, k_desc, v_desc = descs
    q, k, v = rings
    CONSUMERS: gl.constexpr = q[0].shape[0]
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    start_m, _first, num_tiles, _num_masked = tile_range(
        num_queries, num_keys, CAUSAL, CONSUMERS * ROWS, BLOCK_N
    )
    head = gl.program_id(0)
    column = head // GROUP * HEAD_DIM
    for consumer in gl.static_range(CONSUMERS):
        fill(q, consumer, q_desc, start_m + consumer * ROWS, head * HEAD_DIM)
    for i in range(num_tiles):
        start_n = (num_tiles - 1 - i) * BLOCK_N
        fill(k, i, k_desc, start_n, column)
        fill(v, i, v_desc, start_n, column)


@gluon.jit
def start_scores(q_tile, k_tile, SCORES: gl.constexpr):
    """q · kᵀ in flight: [ROWS, BLOCK_N] in layout SCORES."""
    ROWS: gl.constexpr = q_tile.shape[0]
    BLOCK_N: gl.constexpr = k_tile.shape[0]
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def softmax_step(
    scores,
    m_i,
    l_i,
    qk_scale,
    first,
    start_n,
    num_keys,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
):
    """The weights of a tile, the new maximum and sum, and what older sums are worth. scores:
    [ROWS, BLOCK_N] in layout SCORES; the weights are an operand of p · v in layout OUT.
    """
    ROWS: gl.constexpr = scores.shape[0]
    BLOCK_N: gl.constexpr = scores.shape[1]
    if MASKED:
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        key = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        sees = gl.expand_dims(key < num_keys, 0) & gl.full([ROWS, BLOCK_N], True, gl.int1, SCORES)
        if CAUSAL:
            sees = sees & (gl.expand_dims(key, 0) <= gl.expand_dims(query, 1))
        scores = gl.where(sees, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * qk_scale)
    m_safe = m_new
    if MASKED:  # without a mask every row has seen a key
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    p = gl.exp2(scores * qk_scale - gl.expand_dims(m_safe, 1))
    weights = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, OUT, 2))
    return weights, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def column(x, OUT: gl.constexpr):
    """A number a row, [ROWS], as a column for a tile in layout OUT."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, OUT)), 1)


@gluon.jit
def compute_tiles(
    CONSUMER: gl.constexpr, shared, CAUSAL: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr
):
    """ROWS queries, and all tiles of keys that one of the program's queries sees."""
    out_desc, lse_ptr, rings, num_queries, num_keys, qk_scale = shared
    q, k, v = rings
    CONSUMERS: gl.constexpr = q[0].shape[0]
    BLOCK_N: gl.constexpr = k[0].shape[1]
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = out_desc.block_type.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    start_m, first, num_tiles, num_masked = tile_range(
        num_queries, num_keys, CAUSAL, CONSUMERS * ROWS, BLOCK_N
    )
    start_m += CONSUMER * ROWS
    first += CONSUMER * ROWS
    m_i = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l_i = gl.full([ROWS], 0.0, gl.float32, ROW)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)

    q_tile = wait_for(q, CONSUMER)
    pending = start_scores(q_tile, wait_for(k, 0), SCORES)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(k, 0)
    start_n = (num_tiles - 1) * BLOCK_N
    weights, m_i, l_i, _alpha = softmax_step(
        scores, m_i, l_i, qk_scale, first, start_n, num_keys, CAUSAL, True, SCORES, OUT
    )
    wait_for(v, 0)
    for part in gl.static_range(2):  # the other tiles with a mask, then the many without
        begin = 1 if part == 0 else num_masked
        end = num_masked if part == 0 else num_tiles
        for i in range(begin, end):
            pending = start_scores(q_tile, wait_for(k, i), SCORES)
            adding = warpgroup_mma(weights, tile_of(v, i - 1), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(pending,))  # 1: p · v runs on beside the softmax
            release(k, i)
            start_n = (num_tiles - 1 - i) * BLOCK_N
            weights, m_i, l_i, alpha = softmax_step(
                scores, m_i, l_i, qk_scale, first, start_n, num_keys, CAUSAL, part == 0, SCORES, OUT
            )
            # Here, because ptxas moves no exp past this loop of tests: without it all of them
            # land after the next line, where no product is left to run beside them.
            wait_for(v, i)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            release(v, i - 1)
            acc = acc * column(alpha, OUT)
    adding = warpgroup_mma(weights, tile_of(v, num_tiles - 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(adding,))
    l_safe = gl.where(l_i == 0.0, 1.0, l_i)

    row, head = start_m + gl.arange(0, ROWS, ROW), gl.program_id(0)
    lse = (m_i + gl.log2(l_i)) * 0.6931471805599453  # ln 2
    place = row.to(gl.int64) * gl.num_programs(0) + head
    gl.store(lse_ptr + place, lse, mask=row < num_queries)
    # where q was: all products that read it have ended
    q_tile.store((acc / column(l_safe, OUT)).to(out_desc.dtype))
    fence_async_shared()  # Triton's compiler would add it; in CUDA C++ you have to
    # TMA drops rows beyond the last
    tma.async_copy_shared_to_global(out_desc, [start_m, head * HEAD_DIM], q_tile)
    tma.store_wait(pendings=0)


@gluon.jit
def flash_hopper_kernel(
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
    CONSUMERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: CONSUMERS · ROWS queries of one head. Descriptors of [T, H · HEAD_DIM] with
    tiles of [ROWS or BLOCK_N, HEAD_DIM].
    """
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    q = allocate_ring(q_desc, CONSUMERS, 1)
    k = allocate_ring(k_desc, STAGES, CONSUMERS)
    v = allocate_ring(v_desc, STAGES, CONSUMERS)
    descs, rings = (q_desc, k_desc, v_desc), (q, k, v)
    shared = (out_desc, lse_ptr, rings, num_queries, num_keys, qk_scale)
    gl.warp_specialize(
        [
            (compute_tiles, (0, shared, CAUSAL, SCORES, OUT)),
            (compute_tiles, (1, shared, CAUSAL, SCORES, OUT)),
            (load_tiles, (descs, rings, num_queries, num_keys, CAUSAL, GROUP)),
        ],
        [num_warps, 1],  # of the second and the third
        [240, 24],  # registers a thread: the producer's go to the consumers
    )


def flash_attention_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    stages: int = STAGES,
) -> tuple[Tensor, Tensor]:
    """One sequence, on a Hopper GPU or on a CPU that runs its code. q: [T, Hq, D], k, v: [Tk, Hkv,
    D] -> out: [T, Hq, D], lse: [T, Hq] float32.

    bfloat16, dense, D 64 or 128. stages: tiles in a ring, 2 or 3. Raises ValueError.
    """
    check_launch(q, k, v, softmax_scale, causal, 9)
    if stages not in (2, 3):  # four of 128 x 128 do not fit beside q
        raise ValueError(f"stages: got {stages!r}; accepted: 2 or 3")
    num_heads, head_dim = q.shape[1:]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        with nullcontext() if q.is_cuda else on_the_machine(90):
            flash_hopper_kernel[num_heads, triton.cdiv(len(q), BLOCK_M)](
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
                STAGES=stages,
                CONSUMERS=CONSUMERS,
                num_warps=NUM_WARPS,
            )
    return out, lse
