"""Launches the kernels of optimized.cu: attention of one sequence in CUDA C++, for reading beside
flash_kernel. On CPU tensors `lessons.toolbox.gpu` runs them.
"""

from pathlib import Path

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_grid
from lessons.l09_flash_attention.arguments import check_heads, check_options
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

SOURCE = Path(__file__).with_name("optimized.cu")
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
THREADS, BLOCK_M = 256, 16  # as in optimized.cu: 8 warps, 2 queries each
FLASH = {
    (dtype, head_dim): CudaKernel(SOURCE, f"flash_{name}_{head_dim}")
    for dtype, name in TYPES.items()
    for head_dim in (64, 128)
}


def flash_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """One sequence. q: [T, Hq, D], k, v: [Tk, Hkv, D], float32 or bfloat16, dense, D 64 or 128 ->
    out: [T, Hq, D], lse: [T, Hq].

    Raises ValueError, and RuntimeError where cuda.core is missing, on a CPU a C++ compiler.
    """
    check_heads(q, k, v, tuple(TYPES))
    check_options(q, softmax_scale, causal, None, None, None, None)
    if (
        (q.dtype, q.shape[2]) not in FLASH
        or v.shape[2] != q.shape[2]
        or not all(x.is_contiguous() for x in (q, k, v))
    ):
        raise ValueError(
            f"q, k, v: got head sizes {q.shape[2]} and {v.shape[2]}, strides "
            f"{[x.stride() for x in (q, k, v)]}; "
            "accepted: 64 or 128 for all, dense"
        )
    blocks = -(-len(q) // BLOCK_M)
    check_grid("q", blocks, f"blocks of {BLOCK_M} queries")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        FLASH[q.dtype, q.shape[2]][(q.shape[1], blocks), THREADS](
            q,
            k,
            v,
            out,
            lse,
            len(q),
            len(k),
            k.shape[1],
            float(q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale),
            int(causal),
        )
    return out, lse
