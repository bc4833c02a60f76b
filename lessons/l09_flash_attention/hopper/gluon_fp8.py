"""FlashAttention with 8-bit products for Hopper, in Gluon: gluon_flash.py's order, with V turned
around inside the kernel and sums in two levels.

Its compiled code for sm_90 runs on a CPU (`lessons.toolbox.gpu`); it has NOT RUN on a GPU yet.
Read it beside gluon_flash.py. What is new:

- the producer is a warpgroup: it asks for tiles, and turns those of V around (transpose.py);
- the weights p stay in the registers in which q · kᵀ left their scores, as E4M3;
- a product of 8 bits adds in about 14 bits, so each tile's p · v is a sum of its own. It is added
  to `acc` in float32, at no cost: rescaling `acc` was a multiplication, and now adds as well.

One scale a head for q, k and v, as in fp8.py. Limits, to stay readable: those of gluon_flash.py,
but for strides. Source: Shah et al. 2024, FlashAttention-3, section 3.3; two levels: DeepSeek-AI
2024, DeepSeek-V3, section 3.3.2.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l09_flash_attention.hopper.fp8 import P_SHIFT, quantize
from lessons.l09_flash_attention.hopper.gluon_flash import column, start_scores, tile_range
from lessons.l09_flash_attention.hopper.launch import check_sizes, tiles_of
from lessons.l09_flash_attention.hopper.rings import (
    allocate_ring,
    allocate_written_ring,
    claim,
    fill,
    hand_over,
    release,
    tile_of,
    wait_for,
)
from lessons.l09_flash_attention.hopper.transpose import columns_in_order, turn
from lessons.l09_flash_attention.hopper.weights import (
    four_a_word,
    softmax_step,
    start_output,
    sums_of_threads,
)
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        tma,
        warpgroup_mma_wait,
    )
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language

ROWS, BLOCK_N = 64, 128  # queries of a consumer, keys of a tile
STAGES = 2  # tiles in a ring
CONSUMERS = 2  # as many as flash_fp8_hopper_kernel lists
BLOCK_M = CONSUMERS * ROWS  # queries of a program
NUM_WARPS = 4  # of a consumer, and of the producer
KEYS = 16  # of v that a producer's warp turns at a time; 32 spill its 24 registers
LOG2_E = 1.4426950408889634


@gluon.jit
def turn_tile(v, v_t, i, KEYS: gl.constexpr):
    """Tile i of V as it arrived becomes tile i as products read it."""
    v_tile = wait_for(v, i)
    turn(v_tile, claim(v_t, i), KEYS)
    release(v, i)
    hand_over(v_t, i)


@gluon.jit
def load_tiles(
    descs,
    rings,
    num_queries,
    num_keys,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Every consumer's q once, then the tiles of k and v. A tile of v is turned around after the
    next has been asked for.
    """
    q_desc, k_desc, v_desc = descs
    q, k, v, v_t = rings
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
        if i > 0:
            turn_tile(v, v_t, i - 1, KEYS)
    turn_tile(v, v_t, num_tiles - 1, KEYS)


@gluon.jit
def store_rows(acc, m_i, l_i, CONSUMER: gl.constexpr, shared, start_m, SHIFT: gl.constexpr):
    """Outputs and log-sum-exps of a consumer's queries, from start_m on."""
    out_desc, lse_ptr, _rings, out_tiles, num_queries, _num_keys, _qk_scale, v_scale = shared
    ROW: gl.constexpr = m_i.type.layout
    OUT: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = out_desc.block_type.shape[1]
    l_i = gl.convert_layout(gl.sum(l_i, 1), ROW)
    l_safe = gl.where(l_i == 0.0, 1.0, l_i)

    row, head = start_m + gl.arange(0, ROWS, ROW), gl.program_id(0)
    lse = (m_i + gl.log2(l_i) - SHIFT) * 0.6931471805599453  # ln 2
    place = row.to(gl.int64) * gl.num_programs(0) + head
    gl.store(lse_ptr + place, lse, mask=row < num_queries)
    out_tile = out_tiles.index(CONSUMER)
    out = columns_in_order(acc * column(v_scale / l_safe, OUT))
    out_tile.store(out.to(out_desc.dtype))
    fence_async_shared()
    # TMA drops rows beyond the last
    tma.async_copy_shared_to_global(out_desc, [start_m, head * HEAD_DIM], out_tile)
    tma.store_wait(pendings=0)


@gluon.jit
def compute_tiles(
    CONSUMER: gl.constexpr,
    shared,
    CAUSAL: gl.constexpr,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """ROWS queries, and all tiles of keys that one of the program's queries sees."""
    out_desc, _lse_ptr, rings, _out_tiles, num_queries, num_keys, qk_scale, _v_scale = shared
    q, k, v_t = rings
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
    l_i = sums_of_threads(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)

    q_tile = wait_for(q, CONSUMER)
    pending = start_scores(q_tile, wait_for(k, 0), SCORES)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(k, 0)
    start_n = (num_tiles - 1) * BLOCK_N
    p, m_i, l_i, alpha = softmax_step(
        scores, m_i, l_i, qk_scale, first, start_n, num_keys, CAUSAL, True, SCORES, SHIFT
    )
    weights = four_a_word(p)
    wait_for(v_t, 0)
    # The other tiles with a mask, then the many without. In full attention only the first has one.
    for part in gl.static_range(0 if CAUSAL else 1, 2):
        begin = 1 if part == 0 else num_masked
        end = num_masked if part == 0 else num_tiles
        for i in range(begin, end):
            pending = start_scores(q_tile, wait_for(k, i), SCORES)
            adding = start_output(weights, tile_of(v_t, i - 1), OUT)
            scores = warpgroup_mma_wait(1, deps=(pending,))  # 1: p · v runs on beside the softmax
            release(k, i)
            # of the tile before: what `acc` held before that tile is worth
            acc = acc * column(alpha, OUT)
            start_n = (num_tiles - 1 - i) * BLOCK_N
            p, m_i, l_i, alpha = softmax_step(
                scores, m_i, l_i, qk_scale, first, start_n, num_keys, CAUSAL, part == 0, SCORES,
                SHIFT,
            )  # fmt: skip
            wait_for(v_t, i)  # here, because ptxas moves no exp past it, as in gluon_flash.py
            acc += warpgroup_mma_wait(0, deps=(adding,))
            release(v_t, i - 1)
            # after the wait, because the product read the last weights from these registers
            weights = four_a_word(p)
    adding = start_output(weights, tile_of(v_t, num_tiles - 1), OUT)
    acc = acc * column(alpha, OUT) + warpgroup_mma_wait(0, deps=(adding,))
    store_rows(acc, m_i, l_i, CONSUMER, shared, start_m, SHIFT)


@gluon.jit
def flash_fp8_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_queries,
    num_keys,
    softmax_scale,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SHIFT: gl.constexpr,
    KEYS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: CONSUMERS · ROWS queries of one head. Descriptors of [T, H · HEAD_DIM] with
    tiles of [ROWS or BLOCK_N, HEAD_DIM]; scales: [Hq], [Hkv], [Hkv] float32. softmax_scale: in
    base 2.
    """
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 32]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD_DIM, BLOCK_N], v_desc.dtype)
    q = allocate_ring(q_desc, CONSUMERS, 1)
    k = allocate_ring(k_desc, STAGES, CONSUMERS)
    v = allocate_ring(v_desc, STAGES, 1)
    v_t = allocate_written_ring(v_desc.dtype, HEAD_DIM, BLOCK_N, TURNED, STAGES, CONSUMERS)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], out_desc.layout)
    head = gl.program_id(0)
    qk_scale = softmax_scale * gl.load(q_scale_ptr + head) * gl.load(k_scale_ptr + head // GROUP)
    v_scale = gl.load(v_scale_ptr + head // GROUP)
    descs = (q_desc, k_desc, v_desc)
    shared = (out_desc, lse_ptr, (q, k, v_t), out, num_queries, num_keys, qk_scale, v_scale)
    gl.warp_specialize(
        [
            (compute_tiles, (0, shared, CAUSAL, SCORES, OUT, SHIFT)),
            (compute_tiles, (1, shared, CAUSAL, SCORES, OUT, SHIFT)),
            (load_tiles, (descs, (q, k, v, v_t), num_queries, num_keys, CAUSAL, GROUP, KEYS)),
        ],
        [num_warps, num_warps],  # of the second and the third
        [240, 24],  # registers a thread: most of the producer's go to the consumers
    )


def flash_attention_fp8_hopper(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """One sequence, rounded to E4M3 on the way in, on a Hopper GPU or on a CPU that runs its code.
    q: [T, Hq, D], k, v: [Tk, Hkv, D] -> out: [T, Hq, D], lse: [T, Hq] float32.

    bfloat16, D 64 or 128. Raises ValueError.
    """
    check_sizes(q, k, v, softmax_scale, causal, 9)
    num_heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(quantize, (q, k, v))
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        with nullcontext() if q.is_cuda else on_the_machine(90):
            flash_fp8_hopper_kernel[num_heads, triton.cdiv(len(q), BLOCK_M)](
                tiles_of(q8.contiguous(), ROWS),
                tiles_of(k8.contiguous(), BLOCK_N),
                tiles_of(v8.contiguous(), BLOCK_N),
                tiles_of(out, ROWS),
                lse,
                q_scale,
                k_scale,
                v_scale,
                len(q),
                len(k),
                scale * LOG2_E,
                CAUSAL=causal,
                GROUP=num_heads // k.shape[1],
                STAGES=STAGES,
                CONSUMERS=CONSUMERS,
                SHIFT=P_SHIFT.value,
                KEYS=KEYS,
                num_warps=NUM_WARPS,
            )
    return out, lse
