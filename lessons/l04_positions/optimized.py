"""One kernel for all that positions need: it turns q in place, and turns k on its way into the
cache, beside v.

Each of q, k and v is read once and written once. Read `load_pairs` and `turn_into` in pairs.py,
then `rope_cache_kernel` beside lesson 3's `write`, which rotates first and then stores, then the
wrapper `rope_cache`. `rotate_rows` rotates alone. stand_ins.py is the same idea in PyTorch, for
machines where kernels would be interpreted.

The names positions, cos_sin_cache and slot_mapping are those of vLLM, SGLang and FlashInfer, which
fuse the same.
"""

from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.optimized import LESSON_03, append_rows
from lessons.l04_positions.arguments import check_rope_cache, check_rotate_rows
from lessons.l04_positions.pairs import load_cos_sin, load_pairs, turn_into
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.toolbox.kernels.triton_ import tl, triton

# of q: 64 for each of 64 threads, 16-byte loads enough to keep the memory busy
VALUES_PER_PROGRAM = 4096


# ---------------------------------------------------------------- kernels


@triton.jit
def rope_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cos_sin_ptr,
    num_positions,
    num_kv_heads,
    stride_qt,
    stride_kt,
    stride_vt,
    stride_slot,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program per token and BLOCK_KV of its KV heads, with the GROUP query heads of each:
    everything loaded, then stored.
    """
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK_KV
    num_heads = tl.minimum(num_kv_heads - first_head, BLOCK_KV)
    cos, sin = load_cos_sin(
        cos_sin_ptr, tl.load(positions_ptr + token), num_positions, HEAD_DIM, PAIRS
    )
    slot = tl.load(slot_mapping_ptr + token)

    q_ptr += token * stride_qt + first_head * GROUP * HEAD_DIM
    q_first, q_second = load_pairs(
        q_ptr, HEAD_DIM, num_heads * GROUP, HEAD_DIM, PAIRS, BLOCK_Q, LAYOUT
    )
    k_ptr += token * stride_kt + first_head * HEAD_DIM
    k_first, k_second = load_pairs(k_ptr, HEAD_DIM, num_heads, HEAD_DIM, PAIRS, BLOCK_KV, LAYOUT)
    column = tl.arange(0, BLOCK_KV * 2 * PAIRS)  # v does not turn, so its heads are one row
    inside = column < num_heads * HEAD_DIM
    v = tl.load(v_ptr + token * stride_vt + first_head * HEAD_DIM + column, mask=inside, other=0.0)

    turn_into(
        q_ptr,
        HEAD_DIM,
        num_heads * GROUP,
        q_first,
        q_second,
        cos,
        sin,
        HEAD_DIM,
        PAIRS,
        BLOCK_Q,
        LAYOUT,
    )
    # -1 marks a token that is not kept: none of its heads is stored
    kept = tl.where(slot >= 0, num_heads, 0)
    row = slot * stride_slot + first_head * HEAD_DIM
    turn_into(
        k_cache_ptr + row,
        HEAD_DIM,
        kept,
        k_first,
        k_second,
        cos,
        sin,
        HEAD_DIM,
        PAIRS,
        BLOCK_KV,
        LAYOUT,
    )
    tl.store(v_cache_ptr + row + column, v, mask=column < kept * HEAD_DIM)


@triton.jit
def rotate_kernel(
    x_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_positions,
    num_heads,
    stride_xt,
    stride_xh,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program per token and BLOCK of its heads: turn them in place."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * BLOCK
    cos, sin = load_cos_sin(
        cos_sin_ptr, tl.load(positions_ptr + token), num_positions, HEAD_DIM, PAIRS
    )
    x_ptr += token * stride_xt + first_head * stride_xh
    first, second = load_pairs(
        x_ptr, stride_xh, num_heads - first_head, HEAD_DIM, PAIRS, BLOCK, LAYOUT
    )
    turn_into(
        x_ptr,
        stride_xh,
        num_heads - first_head,
        first,
        second,
        cos,
        sin,
        HEAD_DIM,
        PAIRS,
        BLOCK,
        LAYOUT,
    )


# ---------------------------------------------------------------- launches


def blocks_for(num_kv_heads: int, group: int, head_dim: int) -> tuple[dict[str, int], int]:
    """rope_cache_kernel's blocks and num_warps: as many KV heads a program as VALUES_PER_PROGRAM of
    their query heads allow.
    """
    pairs = triton.next_power_of_2(head_dim // 2)
    block_kv = triton.next_power_of_2(num_kv_heads)
    while block_kv > 1 and block_kv * group * 2 * pairs > VALUES_PER_PROGRAM:
        block_kv //= 2
    block_q = triton.next_power_of_2(block_kv * group)
    return {"PAIRS": pairs, "BLOCK_KV": block_kv, "BLOCK_Q": block_q}, warps_for(
        block_q * 2 * pairs
    )


def warps_for(values: int) -> int:
    """64 values a thread, two of 32 threads each for VALUES_PER_PROGRAM; more only where one KV
    head has many query heads.
    """
    return min(16, max(1, values // 2048))


def rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    last_position: int,
    layout: str = "half",
) -> None:
    """Turn q: [T, Hq, D] in place; write k, turned, and v: [T, Hkv, D] to slot_mapping: [T] of
    k_cache, v_cache: [slots, Hkv, D].

    positions: [T] int64, rows of cos_sin_cache: [num_positions, D] float32. slot_mapping: int64,
    distinct, -1 skips a token's k and v. last_position: the largest of `positions`, which the host
    knows as it made them: to look would wait for the GPU. Raises ValueError. Slots are not checked,
    for the same reason; a position that belies last_position gives NaN.
    """
    check_rope_cache(
        q, k, v, k_cache, v_cache, positions, slot_mapping, cos_sin_cache, last_position, layout
    )
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    if num_tokens:
        blocks, num_warps = blocks_for(num_kv_heads, num_heads // num_kv_heads, head_dim)
        rope_cache_kernel[num_tokens, triton.cdiv(num_kv_heads, blocks["BLOCK_KV"])](
            q,
            k,
            v,
            k_cache,
            v_cache,
            positions,
            slot_mapping,
            cos_sin_cache,
            len(cos_sin_cache),
            num_kv_heads,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            k_cache.stride(0),
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            LAYOUT=layout,
            num_warps=num_warps,
            **blocks,
        )


def rotate_rows(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, last_position: int, layout: str = "half"
) -> Tensor:
    """Turn x: [T, H, D] in place and return it. The rest as in `rope_cache`, but heads may be
    apart: x[..., :rotary_dim].
    """
    check_rotate_rows(x, positions, cos_sin_cache, last_position, layout)
    num_tokens, num_heads, head_dim = x.shape
    if x.numel():
        pairs = triton.next_power_of_2(head_dim // 2)
        block = min(triton.next_power_of_2(num_heads), max(1, VALUES_PER_PROGRAM // (2 * pairs)))
        rotate_kernel[num_tokens, triton.cdiv(num_heads, block)](
            x,
            positions,
            cos_sin_cache,
            len(cos_sin_cache),
            num_heads,
            x.stride(0),
            x.stride(1),
            HEAD_DIM=head_dim,
            PAIRS=pairs,
            BLOCK=block,
            LAYOUT=layout,
            num_warps=warps_for(block * 2 * pairs),
        )
    return x


# ---------------------------------------------------------------- the rung


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    batch: Batch,
    cos_sin_cache: Tensor,
) -> Tensor:
    """Rotate q in place, k on its way into its slot. Shapes as in AttentionOps; returns q."""
    last = batch.max_context_len - 1
    if batch.tree is not None:  # siblings share a position, so its nodes take more slots
        last = min(last, len(cos_sin_cache) - 1)
    rope_dim = cos_sin_cache.shape[-1]
    if q.shape[-1] == v.shape[-1] == rope_dim:
        rope_cache(
            q,
            k,
            v,
            k_slots,
            v_slots,
            batch.positions,
            batch.slot_mapping,
            cos_sin_cache,
            last_position=last,
        )
    else:  # DeepSeek's expanded heads (lesson 6): only a part of each turns, and v is narrower
        rotate_rows(q[..., -rope_dim:], batch.positions, cos_sin_cache, last)
        rotate_rows(k[..., -rope_dim:], batch.positions, cos_sin_cache, last)
        append_rows(k, v, k_slots, v_slots, batch.slot_mapping)
    return q


LESSON_04 = LESSON_03._replace(write=write)
ROTATED_ON_THE_WAY = Rung("rotated on the way into the cache", LESSON_04, LESSON_04_TORCH)
