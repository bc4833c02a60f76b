"""FlashAttention for Hopper, in Gluon: one warp fetches by TMA, eight compute, and matrix products
overlap with softmax.

Compiled for sm_90 by every test run; it has NOT RUN on a GPU yet. Read `compute_tiles` beside
flash_kernel. What is new: a producer warp that only asks the TMA engine for the next tiles;
barriers through which it and the eight computing warps hand the tiles to each other; and the order
of a step: p · v of this tile and q · kᵀ of the next are both on their way before anybody waits.
Tiles are visited from the diagonal backwards, so that those that need a mask come first.

Limits, to stay readable: one sequence, bfloat16, head size 64 or 128, full or causal, grouped
heads. Source: Shah et al. 2024, FlashAttention-3, algorithms 1 (producer, consumer) and 2 (overlap
within a warpgroup).
"""

import torch
from torch import Tensor

from lessons.l09_flash_attention.arguments import check_heads, check_options
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

BLOCK_M, BLOCK_N, STAGES, NUM_WARPS = 128, 128, 2, 8
LOG2_E = 1.4426950408889634


@gluon.jit
def tile_range(
    num_queries, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(start_m, first, num_tiles, num_full) of this program: of tiles 0 … num_tiles - 1 the first
    num_full need no mask.
    """
    start_m = (gl.num_programs(1) - 1 - gl.program_id(1)) * BLOCK_M  # backwards: the heaviest first
    first = start_m + num_keys - num_queries
    end, full_end = num_keys, num_keys
    if CAUSAL:
        end = gl.minimum(end, gl.maximum(0, first + BLOCK_M))
        full_end = gl.minimum(full_end, gl.maximum(0, first + 1))
    return start_m, first, (end + BLOCK_N - 1) // BLOCK_N, full_end // BLOCK_N


@gluon.jit
def load_tiles(
    q_desc,
    k_desc,
    v_desc,
    q_smem,
    k_smem,
    v_smem,
    q_ready,
    k_ready,
    k_free,
    v_ready,
    v_free,
    num_queries,
    num_keys,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """The producer warp: q once, then the tiles of k and v into a ring of STAGES buffers, as they
    become free.
    """
    start_m, _first, num_tiles, _num_full = tile_range(
        num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
    )
    head = gl.program_id(0)
    mbarrier.expect(q_ready, q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [start_m, head * HEAD_DIM], q_ready, q_smem)
    for i in range(num_tiles):
        start_n = (num_tiles - 1 - i) * BLOCK_N
        stage, turn = i % STAGES, (i // STAGES) & 1
        # ^ 1, because a fresh barrier counts as passed once: all buffers are free
        mbarrier.wait(k_free.index(stage), turn ^ 1)
        mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, [start_n, head // GROUP * HEAD_DIM], k_ready.index(stage), k_smem.index(stage)
        )
        mbarrier.wait(v_free.index(stage), turn ^ 1)
        mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, [start_n, head // GROUP * HEAD_DIM], v_ready.index(stage), v_smem.index(stage)
        )
    return None


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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """The new weights, maximum and sum, and what older sums are worth. scores: [BLOCK_M, BLOCK_N]
    in layout SCORES.
    """
    if MASKED:
        query = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES))
        key = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        sees = gl.expand_dims(key < num_keys, 0) & gl.full(
            [BLOCK_M, BLOCK_N], True, gl.int1, SCORES
        )
        if CAUSAL:
            sees = sees & (gl.expand_dims(key, 0) <= gl.expand_dims(query, 1))
        scores = gl.where(sees, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * qk_scale)
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    p = gl.exp2(scores * qk_scale - gl.expand_dims(m_safe, 1))
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def compute_tiles(
    out_desc,
    lse_ptr,
    q_smem,
    k_smem,
    v_smem,
    q_ready,
    k_ready,
    k_free,
    v_ready,
    v_free,
    num_queries,
    num_keys,
    qk_scale,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    """The computing warps: softmax of tile i while q · kᵀ of tile i + 1 is not needed yet, p · v of
    tile i beside it.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    start_m, first, num_tiles, num_full = tile_range(
        num_queries, num_keys, CAUSAL, BLOCK_M, BLOCK_N
    )
    m_i, l_i = (
        gl.full([BLOCK_M], float("-inf"), gl.float32, ROW),
        gl.full([BLOCK_M], 0.0, gl.float32, ROW),
    )
    acc, nothing = (
        gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, OUT),
        gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES),
    )
    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0, pred=num_tiles > 0)
    pending = warpgroup_mma(
        q_smem, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(pending,))
    mbarrier.arrive(k_free.index(0), count=1, pred=num_tiles > 0)
    for part in gl.static_range(2):  # the tiles with a mask, then the many without
        for i in range(
            0 if part == 0 else num_tiles - num_full,
            num_tiles - num_full if part == 0 else num_tiles,
        ):
            stage, turn = i % STAGES, (i // STAGES) & 1
            p, m_i, l_i, alpha = softmax_step(
                scores,
                m_i,
                l_i,
                qk_scale,
                first,
                (num_tiles - 1 - i) * BLOCK_N,
                num_keys,
                CAUSAL,
                part == 0,
                SCORES,
                BLOCK_M,
                BLOCK_N,
            )
            weights = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, OUT, 2))
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1)
            mbarrier.wait(v_ready.index(stage), turn)
            # p · v of this tile, and ...
            adding = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            after = i + 1
            there_is = after < num_tiles
            mbarrier.wait(k_ready.index(after % STAGES), (after // STAGES) & 1, pred=there_is)
            pending = warpgroup_mma(
                q_smem,
                k_smem.index(after % STAGES).permute((1, 0)),
                nothing,
                use_acc=False,
                # ... q · kᵀ of the next, in flight
                is_async=True,
            )
            acc = warpgroup_mma_wait(1, deps=(adding,))
            mbarrier.arrive(v_free.index(stage), count=1)
            scores = warpgroup_mma_wait(0, deps=(pending,))
            mbarrier.arrive(k_free.index(after % STAGES), count=1, pred=there_is)
    l_safe = gl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / gl.expand_dims(gl.convert_layout(l_safe, gl.SliceLayout(1, OUT)), 1)
    row, head = start_m + gl.arange(0, BLOCK_M, ROW), gl.program_id(0)
    gl.store(
        lse_ptr + row.to(gl.int64) * gl.num_programs(0) + head,
        (m_i + gl.log2(l_i)) * 0.6931471805599453,
        mask=row < num_queries,
    )
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M, HEAD_DIM], out_desc.layout)
    out_smem.store(acc.to(out_desc.dtype))
    fence_async_shared()
    # TMA drops rows beyond the last
    tma.async_copy_shared_to_global(out_desc, [start_m, head * HEAD_DIM], out_smem)
    tma.store_wait(pendings=0)
    return None


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
    num_warps: gl.constexpr,
):
    """One program: BLOCK_M queries of one head. Descriptors of [T, H · HEAD_DIM] with tiles of
    [BLOCK, HEAD_DIM].
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[0]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_M, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=1)
    gl.warp_specialize(
        [
            (
                compute_tiles,
                (
                    out_desc,
                    lse_ptr,
                    q_smem,
                    k_smem,
                    v_smem,
                    q_ready,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    num_queries,
                    num_keys,
                    qk_scale,
                    CAUSAL,
                    STAGES,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
                    num_warps,
                ),
            ),
            (
                load_tiles,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    q_smem,
                    k_smem,
                    v_smem,
                    q_ready,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    num_queries,
                    num_keys,
                    CAUSAL,
                    GROUP,
                    STAGES,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
                ),
            ),
        ],
        [1],
        [24],
    )


def flash_attention_hopper(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """One sequence on a Hopper GPU. q: [T, Hq, D], k, v: [Tk, Hkv, D] -> out: [T, Hq, D], lse: [T,
    Hq] float32.

    bfloat16, dense, D 64 or 128. Raises ValueError.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    check_heads(q, k, v, (torch.bfloat16,))
    check_options(q, softmax_scale, causal, None, None, None, None)
    head_dim = q.shape[2]
    if (
        head_dim not in (64, 128)
        or v.shape[2] != head_dim
        or not all(x.is_contiguous() for x in (q, k, v))
        or not len(k)
    ):
        raise ValueError(
            f"q, k, v: got {[tuple(x.shape) for x in (q, k, v)]} with strides "
            f"{[x.stride() for x in (q, k, v)]}; "
            "accepted: head size 64 or 128 for all, one key or more, dense"
        )
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        raise ValueError(f"q: got {q.device}; accepted: a GPU of compute capability 9.0 (Hopper)")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def tiles_of(x: Tensor, rows: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], gl.bfloat16)
        return TensorDescriptor.from_tensor(x.flatten(1), [rows, head_dim], layout)

    if out.numel():
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        flash_hopper_kernel[q.shape[1], triton.cdiv(len(q), BLOCK_M)](
            tiles_of(q, BLOCK_M),
            tiles_of(k, BLOCK_N),
            tiles_of(v, BLOCK_N),
            tiles_of(out, BLOCK_M),
            lse,
            len(q),
            len(k),
            scale * LOG2_E,
            CAUSAL=causal,
            GROUP=q.shape[1] // k.shape[1],
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
    return out, lse
