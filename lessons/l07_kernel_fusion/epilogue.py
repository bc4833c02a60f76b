"""A matrix product that finishes its result before it leaves the registers: its *epilogue*.

A product adds up a tile of its result in registers, in float32. Whatever comes next for each value
alone, such as a ReLU or SwiGLU's silu(gate) · up, can be done there. Then the product writes the
finished value, and what stood between, one or two tensors as wide as the MLP, never exists.

Read `relu_linear_kernel`, then `swiglu_kernel`: the same loop with two sums, because a tile of x is
loaded once for both weights. This is a product to read, not one to ship: it has no TMA, no split of
the long dimension, no order of tiles for an x that exceeds the L2 cache (tutorial 03 walks in
groups for that), and tiles that were never timed. Expect cuBLAS's own to be faster.

Sources: the tiled product of Triton's tutorial 03; fused epilogues: NVIDIA CUTLASS, "Efficient GEMM
in CUDA", section Epilogue; SwiGLU: Shazeer 2020, section 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l07_kernel_fusion.rows import DTYPES
from lessons.toolbox.kernels.triton_ import tl, triton


class GemmTiles(NamedTuple):
    """Rows and columns of the result that a program owns, values of a row that it adds at a time,
    and how it is launched.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Chosen by the compiler, for no spills; timed on an H200 and not tuned there. Tensor cores take the
# larger one. float32 has none here, because its products shall not be rounded to tf32, and neither
# has a T4 (sm_75) for Triton.
TENSOR_CORES, PLAIN = GemmTiles(64, 64, 32, 4, 3), GemmTiles(32, 32, 32, 4, 2)


@triton.jit
def load_tile(
    ptr, start, num_rows, row_stride, column, size, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Rows start … of a matrix [num_rows, size], columns column … -> [BLOCK, BLOCK_K], zeros where
    it ends: zeros add nothing to a product.
    """
    row, k = start + tl.arange(0, BLOCK)[:, None], column + tl.arange(0, BLOCK_K)[None, :]
    # int64, because row · stride may pass 2^31
    pointers = ptr + row.to(tl.int64) * row_stride + k
    return tl.load(pointers, mask=(row < num_rows) & (k < size), other=0.0)


@triton.jit
def store_tile(
    out_ptr,
    out,
    start_m,
    start_n,
    num_rows,
    num_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out: [BLOCK_M, BLOCK_N] float32 into a dense [num_rows, num_columns], rounded here for the
    only time.
    """
    row, column = start_m + tl.arange(0, BLOCK_M)[:, None], start_n + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    pointers = out_ptr + row.to(tl.int64) * num_columns + column
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def relu_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of relu(x · weightᵀ). x: [R, K], weight: [I, K] -> out: [R, I]."""
    start_m, start_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # "ieee", because Triton's default rounds float32 to tf32; 16-bit inputs are not changed by it
    for k in range(0, size, BLOCK_K):
        x = load_tile(x_ptr, start_m, num_rows, stride_x, k, size, BLOCK_M, BLOCK_K)
        w = load_tile(weight_ptr, start_n, num_columns, stride_weight, k, size, BLOCK_N, BLOCK_K)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    # The epilogue. A NaN stays one, as in torch.relu: a comparison with it is false.
    out = tl.where(acc < 0, 0.0, acc)
    store_tile(out_ptr, out, start_m, start_n, num_rows, num_columns, BLOCK_M, BLOCK_N)


@triton.jit
def swiglu_kernel(
    x_ptr,
    gate_weight_ptr,
    up_weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    stride_x,
    stride_gate,
    stride_up,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of silu(x · gateᵀ) · (x · upᵀ). x: [R, K], weights: [I, K] -> out: [R,
    I].
    """
    start_m, start_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, size, BLOCK_K):
        x = load_tile(x_ptr, start_m, num_rows, stride_x, k, size, BLOCK_M, BLOCK_K)
        w = load_tile(gate_weight_ptr, start_n, num_columns, stride_gate, k, size, BLOCK_N, BLOCK_K)
        gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
        w = load_tile(up_weight_ptr, start_n, num_columns, stride_up, k, size, BLOCK_N, BLOCK_K)
        up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
    # The epilogue: in float32, where the eager chain rounds gate, up and silu(gate) to 16 bits.
    out = gate * tl.sigmoid(gate) * up
    store_tile(out_ptr, out, start_m, start_n, num_rows, num_columns, BLOCK_M, BLOCK_N)


def relu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As naive.relu_linear, in one launch. x: [R, K], weight: [I, K], rows dense -> [R, I]. Raises
    ValueError.
    """
    check_product(x, weight=weight)
    return launch(relu_linear_kernel, x, weight)


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """As naive.swiglu, in one launch; the halves of a merged weight will do. x: [R, K],
    gate_weight, up_weight: [I, K], rows dense -> [R, I].

    It rounds once, at the end; the eager chain rounds four times. Raises ValueError.
    """
    check_product(x, gate_weight=gate_weight, up_weight=up_weight)
    return launch(swiglu_kernel, x, gate_weight, up_weight)


def launch(kernel, x: Tensor, *weights: Tensor) -> Tensor:
    """Run a kernel of this file. x: [R, K], weights: [I, K] each -> [R, I]."""
    (num_rows, size), num_columns = x.shape, len(weights[0])
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    tiles = tiles_for(x)
    if out.numel():
        # Rows first: programs that run together then share a few tiles of the weights, which are
        # the larger operand, so each weight leaves memory about once. Each of these programs reads
        # rows of x of its own, which come from the L2 cache while x fits there. The second axis
        # holds 65535 programs: two million columns, more than any weight has.
        grid = triton.cdiv(num_rows, tiles.block_m), triton.cdiv(num_columns, tiles.block_n)
        kernel[grid](
            x,
            *weights,
            out,
            num_rows,
            num_columns,
            size,
            x.stride(0),
            *(weight.stride(0) for weight in weights),
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out


def tiles_for(x: Tensor) -> GemmTiles:
    """Tiles for the dtype of x: [R, K] and the chip that it is on."""
    has_tensor_cores = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return TENSOR_CORES if x.itemsize == 2 and has_tensor_cores else PLAIN


def check_product(x: Tensor, **weights: Tensor) -> None:
    """Raise ValueError unless x: [R, K] and the weights: [I, K], the same I for all, have one of
    DTYPES, dense rows and one device.
    """
    check_one_device(x=x, **weights)
    first = next(iter(weights.values()))
    if x.ndim != 2 or x.dtype not in DTYPES or not x.shape[1]:
        raise ValueError(
            f"x: got {x.dtype} {tuple(x.shape)}; accepted: [R, K], K at least 1, in float32, "
            "float16 or bfloat16"
        )
    for name, weight in weights.items():
        accepted = (*first.shape[:1], x.shape[1])
        if weight.ndim != 2 or weight.shape != accepted or weight.dtype != x.dtype:
            raise ValueError(
                f"{name}: got {weight.dtype} {tuple(weight.shape)}; accepted: {x.dtype} [I, "
                f"{x.shape[1]}], the same I for all weights"
            )
    for name, tensor in {"x": x, **weights}.items():
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name}: got strides {tensor.stride()}; accepted: dense rows")
