"""Launches the kernels of optimized.cu: a product with 4-bit codes for few rows, in CUDA C++, for
reading beside quantized_matmul_kernel. On CPU tensors `lessons.toolbox.gpu` runs them.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import MAX_GRID
from lessons.l18_weight_quantization.optimized import check_matmul
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

SOURCE = Path(__file__).parents[1] / "optimized.cu"
THREADS, OUTPUTS, LOAD_BYTES = 128, 4, 16  # as in optimized.cu
W4A16 = {
    dtype: CudaKernel(SOURCE, f"w4a16_{name}")
    for dtype, name in (
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float32, "fp32"),
    )
}


def w4a16_cuda(x: Tensor, weight: GroupedInt, bias: Tensor | None = None) -> Tensor:
    """x: [M, K]; weight: [N, K], 4 bits, float16 scales; bias: [N] or None -> [M, N] in x's dtype.

    Made for M = 1: every row of x reads the codes again. Raises ValueError, and CompileError where
    NVRTC is missing.
    """
    check_matmul(x, weight, bias)
    check_layout(weight)
    if weight.order is not None:
        x = x[:, weight.order]
    x = x.contiguous()
    check_rows(x, weight.codes)
    (num_rows, _), (num_outputs, row_bytes) = x.shape, weight.codes.shape
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if out.numel():
        zeros = weight.codes if weight.zeros is None else weight.zeros
        W4A16[x.dtype][(-(-num_outputs // OUTPUTS), num_rows), THREADS](
            x,
            weight.codes,
            weight.scales,
            zeros,  # not read without zeros
            x if bias is None else bias,  # not read without a bias
            out,
            np.int32(num_outputs),
            np.int32(row_bytes),
            np.int32(weight.group_size // 2),
            np.int32(weight.zeros is not None),
            np.int32(bias is not None),
            x.stride(0),
            weight.codes.stride(0),
            weight.scales.stride(0),
            zeros.stride(0),
        )
    return out


def check_layout(weight: GroupedInt) -> None:
    """Raise ValueError unless the matrix has 4 bits, float16 scales, dense rows, and groups of
    whole loads: a lane's 32 codes share a scale.
    """
    if not isinstance(weight, GroupedInt) or weight.bits != 4:
        raise ValueError(f"weight: got {describe(weight)}; accepted: GroupedInt of 4 bits")
    if weight.scales.dtype != torch.float16:
        raise ValueError(f"weight: got {weight.scales.dtype} scales; accepted: torch.float16")
    if weight.group_size % (2 * LOAD_BYTES):
        raise ValueError(
            f"weight: got groups of {weight.group_size}; accepted: multiples of {2 * LOAD_BYTES}"
        )
    for name, tensor in weight.tensors().items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"weight: got {name} with strides {tensor.stride()}; accepted: dense rows"
            )


def check_rows(x: Tensor, codes: Tensor) -> None:
    """Raise ValueError unless every row of x: [M, K] and of codes: [N, bytes] starts at a multiple
    of 16 bytes, because a lane loads 16 bytes at once, and a grid holds the rows of x.
    """
    for name, tensor in dict(x=x, codes=codes).items():
        stride = tensor.stride(0) * tensor.element_size()
        if tensor.data_ptr() % LOAD_BYTES or (len(tensor) > 1 and stride % LOAD_BYTES):
            raise ValueError(
                f"{name}: got rows {stride} bytes apart from address {tensor.data_ptr()}; "
                f"accepted: multiples of {LOAD_BYTES}"
            )
    if len(x) > MAX_GRID:
        raise ValueError(f"x: got {len(x)} rows; accepted: up to {MAX_GRID}")


def describe(weight) -> str:
    bits = getattr(weight, "bits", None)
    return type(weight).__name__ + (f" of {bits} bits" if bits else "")
