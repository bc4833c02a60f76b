"""QK-norm: RMSNorm over each head of q and of k, all of them in one launch.

A head is a short row, 64 to 256 values, so a program takes several. q and k come from two
projections (or from one merged one, as strided views) and have different head counts; the first
programs take q's rows, the others k's.

Source: Qwen3 technical report (2025), section 2; one launch for both, as in vLLM's
csrc/fused_qknorm_rope_kernel.cu, which also rotates them.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l07_kernel_fusion.rows import DTYPES, MAX_ROW, check_weight, tile_of, weighted
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def qk_norm_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    num_tokens,
    q_heads,
    k_heads,
    q_programs,
    size,
    eps,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per ROWS heads: the first q_programs norm rows of q [T, Hq, D], the others rows
    of k [T, Hkv, D].
    """
    program = tl.program_id(0)
    is_q = program < q_programs
    heads = tl.where(is_q, q_heads, k_heads)
    row = tl.where(is_q, program, program - q_programs) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_tokens * heads) & (column < size)
    # int64, because token · stride may pass 2^31, and head · stride where a head's tokens are
    # beside each other
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    at = (
        token * tl.where(is_q, stride_qt, stride_kt)
        + head * tl.where(is_q, stride_qh, stride_kh)
        + column
    )
    x = tl.load(tl.where(is_q, q_ptr, k_ptr) + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(
        tl.where(is_q, q_weight_ptr, k_weight_ptr) + column, mask=column < size, other=0.0
    )
    mean_square = tl.sum(x * x, axis=1, keep_dims=True) / size
    out = weighted(x, mean_square, weight, eps, q_out_ptr.dtype.element_ty, False)
    tl.store(
        tl.where(is_q, q_out_ptr, k_out_ptr) + row.to(tl.int64) * size + column, out, mask=inside
    )


def qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As naive.qk_norm, in one launch. q: [T, Hq, D], k: [T, Hkv, D], q_weight, k_weight: [D] ->
    like q, like k.

    The last dimension is dense, the other strides are free; D at most MAX_ROW. Raises ValueError.
    """
    if q.ndim != 3 or k.ndim != 3 or q.shape[::2] != k.shape[::2] or not 1 <= q.shape[2] <= MAX_ROW:
        raise ValueError(
            f"q, k: got {tuple(q.shape)}, {tuple(k.shape)}; accepted: [T, Hq, D], [T, Hkv, D], D 1 "
            f"to {MAX_ROW}"
        )
    if q.dtype != k.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"q, k: got {q.dtype}, {k.dtype}; accepted: both float32, float16 or bfloat16"
        )
    check_one_device(q=q, k=k)
    if q.shape[2] > 1 and {q.stride(2), k.stride(2)} != {1}:
        raise ValueError(
            f"q, k: got strides {q.stride()}, {k.stride()}; accepted: a dense last dimension, "
            f"stride 1"
        )
    check_weight(q, q_weight=q_weight, k_weight=k_weight)
    (num_tokens, q_heads, size), k_heads = q.shape, k.shape[1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    rows, block, warps = tile_of(size)
    q_programs, k_programs = (triton.cdiv(num_tokens * heads, rows) for heads in (q_heads, k_heads))
    if q_programs + k_programs:
        qk_norm_kernel[q_programs + k_programs,](
            q,
            k,
            q_weight,
            k_weight,
            q_out,
            k_out,
            num_tokens,
            q_heads,
            k_heads,
            q_programs,
            size,
            eps,
            *q.stride()[:2],
            *k.stride()[:2],
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return q_out, k_out
