"""Launches the kernels of optimized.cu: the same softmax as optimized.softmax, one block of 1024
threads a row. On CPU tensors `lessons.toolbox.gpu` runs them.
"""

from pathlib import Path

import torch
from torch import Tensor

from lessons.l08_online_softmax.optimized import check_rows, empty_results
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

SOURCE = Path(__file__).with_name("optimized.cu")
THREADS = 1024
VECTOR_BYTES = 16  # the widest load of a thread
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SOFTMAX = {
    name: CudaKernel(SOURCE, f"softmax_{name}") for name in ("bf16x8", "bf16x1", "fp32x4", "fp32x1")
}


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """softmax of each row and its log-sum-exp. scores: [R, N] float32 or bfloat16 -> probs [R, N]
    like scores, lse [R] float32.

    Raises ValueError as optimized.softmax does, and CompileError where NVRTC is missing.
    """
    check_rows(scores, tuple(TYPES))
    probs, lse = empty_results(scores)
    if scores.numel():
        kernel = SOFTMAX[f"{TYPES[scores.dtype]}x{numbers_at_once(scores, probs)}"]
        kernel[len(scores), THREADS](scores, probs, lse, scores.shape[1], scores.stride(0))
    return probs, lse if scores.shape[1] else lse.fill_(-torch.inf)


def numbers_at_once(*matrices: Tensor) -> int:
    """How many numbers a thread loads at once, [R, N] each: 16 bytes' worth if every row starts and
    ends on 16 bytes, else 1.
    """

    def aligned(x: Tensor) -> bool:
        row_bytes = [x.shape[1] * x.element_size()] + (
            [x.stride(0) * x.element_size()] if len(x) > 1 else []
        )
        return all(size % VECTOR_BYTES == 0 for size in [x.data_ptr(), *row_bytes])

    return VECTOR_BYTES // matrices[0].element_size() if all(map(aligned, matrices)) else 1
