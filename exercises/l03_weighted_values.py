# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=03
# Generated from solutions/l03_weighted_values.py, checksum 061fcefe7da3. Generating again never overwrites your edits.
# ruff: noqa
"""Exercise 3.5: the first kernel with a loop, the second half of a decode step."""

from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def weighted_values_kernel(
    weights_ptr,
    v_ptr,
    out_ptr,
    context_lens_ptr,
    num_kv_heads,
    capacity,
    stride_sequence,
    stride_row,
    stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per KV head and sequence. Shapes and meaning as in `weighted_values` below; the
    strides are those of v_cache, the other tensors are dense.
    """
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_D)  # from HEAD_DIM on they belong to none
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    weights_row = weights_ptr + (sequence * num_kv_heads + head) * capacity
    out_row = out_ptr + (sequence * num_kv_heads + head) * HEAD_DIM
    raise NotImplementedError("Exercise 3.5: A kernel with a loop: the weighted values")


@exercise("3.5", "A kernel with a loop: the weighted values", minutes=20, difficulty=2)
def weighted_values(weights: Tensor, v_cache: Tensor, context_lens: Tensor) -> Tensor:
    """The sum of a sequence's rows of V, each times its weight: the end of a decode step, where the
    softmax is done. One query head reads each KV head.

    weights: [B, Hkv, capacity], v_cache: [B, capacity, Hkv, D], both float32; context_lens: [B]
    int64 -> [B, Hkv, D] float32. The first context_lens[b] rows of sequence b are in use; the
    weights and the rows after them were never written, and may be NaN. A sequence without rows
    gives zeros. weights is dense. v_cache has any strides, but its last dimension is dense; it may
    have more than 2³¹ numbers, so the place of a row needs 64 bits.

    The wrapper is done. The body of `weighted_values_kernel` above is yours: a loop over tiles of
    BLOCK_N rows of V, [BLOCK_N, BLOCK_D], and a sum that grows from tile to tile. D need not be a
    power of two, and the last tile need not be full. Aim: each row of V in use is loaded once, and
    no other row at all. Errors: none to raise.

    Example: B = Hkv = 1, D = 2, context_lens [3], weights [[[0.5, 0.25, 0.25, NaN]]]
        rows of V [2, 0], [4, 8], [0, 4], NaN: 0.5 · 2 + 0.25 · 4 = 2, 0.25 · 8 + 0.25 · 4 = 3
        -> [[[2, 3]]]
    """
    batch, num_kv_heads, capacity = weights.shape
    head_dim = v_cache.shape[3]
    out = weights.new_empty(batch, num_kv_heads, head_dim)
    weighted_values_kernel[num_kv_heads, batch](
        weights,
        v_cache,
        out,
        context_lens,
        num_kv_heads,
        capacity,
        *v_cache.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=16,
    )
    return out
