"""A product of FP8 with FP8: both factors have 8 bits, so the tensor cores multiply FP8 themselves.

`matmul` of optimized.py stores the matrix in FP8 and multiplies in x's type. That halves the bytes,
which is all that counts for few rows. With many rows the FLOPs count, and Hopper multiplies FP8 at
twice the rate of BF16. For that x must be FP8 too: `quantize_rows` gives each row of x a scale of
its own, found when the row is there ("dynamic"), and the row's and the matrix's scales multiply the
finished sums.

Where sums are kept: Hopper's FP8 instruction adds up with fewer bits than float32 has (about 14 of
mantissa, as DeepSeek measured), and by default a kernel keeps adding in that register down the
whole row. Here every step of 128 columns starts from zero, and its sum is added to a float32
register, times its scales. So a scale for each 128 × 128 tile of the matrix costs nothing more.

It needs sm_89: an A100 has no FP8 instruction at all, whatever a guide says, and reads FP8 weights
by `matmul` only. Hopper and Blackwell multiply FP8 only in their tall instructions (WGMMA and
tcgen05), so the tile of 16 rows is converted to float16 there. It still reads half the bytes of
BF16.

Sources: DeepSeek-V3 technical report 2024, section 3.3.2 (fine-grained scales, promotion of sums);
Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""

import torch
from torch import Tensor

from lessons.l07_kernel_fusion.epilogue import GemmTiles
from lessons.l18_weight_quantization.optimized import check_matmul
from lessons.l18_weight_quantization.weights import TILE, Float8Weight
from lessons.toolbox.kernels.triton_ import tl, triton

LARGEST = 448.0  # of E4M3
ROW_BLOCK = 1024
# Steps of TILE columns, so that each has one scale of the matrix. Timed on an H200 and not tuned
# there.
FEW_ROWS, MORE_ROWS = GemmTiles(16, 64, TILE, 4, 4), GemmTiles(128, 128, TILE, 8, 3)


@triton.jit
def quantize_rows_kernel(
    x_ptr, values_ptr, scales_ptr, size, stride_x, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: a row of x: [M, K] becomes values: [M, K] float8 and its scale: [M] float32.

    The row is read twice; the second time it comes from the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row, column = x_ptr + row * stride_x, tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(x_row + start + column, mask=start + column < size, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    # div_rn, because on a GPU / may be off by two units in the last place, and PyTorch's is not.
    scale = tl.div_rn(tl.max(largest, axis=0), LARGEST)
    scale = tl.where(scale == 0.0, 1.0, scale)  # a row of zeros
    for start in range(0, size, BLOCK):
        is_x = start + column < size
        x = tl.load(x_row + start + column, mask=is_x, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.zeros_like(x) + scale)
        # Clamped, because the division may round up, and beyond 448 E4M3 has only NaN. A NaN in x
        # stays one: plain minimum and maximum would turn it into a number, and the answer would
        # look right.
        x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(values_ptr + row * size + start + column, x.to(tl.float8e4nv), mask=is_x)
    tl.store(scales_ptr + row, scale)


@triton.jit
def scaled_matmul_kernel(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    size,
    stride_x,
    stride_w,
    stride_scales_n,
    stride_scales_k,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: a tile of (x · x_scale) · (w · w_scale)ᵀ. x: [M, K], w: [N, K], both float8 or
    both int8; x_scales: [M]; w_scales: one for SCALE_ROWS rows and BLOCK_K columns -> out: [M, N].
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_m, is_n = m < num_rows, n < num_outputs
    x_row = x_ptr + m.to(tl.int64) * stride_x
    w_row = w_ptr + n.to(tl.int64) * stride_w
    w_scale = w_scales_ptr + n // SCALE_ROWS * stride_scales_n
    k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(size, BLOCK_K), num_stages=NUM_STAGES):
        column = step * BLOCK_K + k
        x = tl.load(x_row + column, mask=is_m & (column < size), other=0.0)
        w = tl.load(w_row + column, mask=is_n & (column < size), other=0.0)
        part = tl.dot(x, tl.trans(w), out_dtype=SUM)  # from zero: a step's own sum
        scale = tl.load(w_scale + step * stride_scales_k, mask=is_n, other=0.0).to(tl.float32)
        acc += part.to(tl.float32) * tl.trans(scale)
    acc *= tl.load(x_scales_ptr + m, mask=is_m, other=0.0)
    n, is_n = tl.trans(n), tl.trans(is_n)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m.to(tl.int64) * num_outputs + n, out, mask=is_m & is_n)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [M, K] -> values [M, K] float8_e4m3fn and scales [M] float32, x ≈ values · scales. The
    largest magnitude of each row becomes 448.
    """
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        quantize_rows_kernel[(num_rows,)](
            x, values, scales, size, x.stride(0), LARGEST=LARGEST, BLOCK=ROW_BLOCK
        )
    return values, scales


def fp8_matmul(
    x: Tensor, weight: Float8Weight, bias: Tensor | None = None, tiles: GemmTiles | None = None
) -> Tensor:
    """x: [M, K], quantized row by row; weight: [N, K], E4M3; bias: [N] or None -> [M, N] in x's
    dtype.

    Unlike `matmul`, it rounds x to 8 bits, so its result is less exact. Raises ValueError.
    """
    check_matmul(x, weight, bias)
    if getattr(weight, "values", x).dtype != torch.float8_e4m3fn:
        got = type(weight).__name__
        if isinstance(weight, Float8Weight):
            got += f" in {weight.values.dtype}"
        raise ValueError(f"weight: got {got}; accepted: Float8Weight in torch.float8_e4m3fn")
    values, x_scales = quantize_rows(x)
    return scaled_matmul(values, x_scales, weight.values, weight.scales, x.dtype, bias, tiles)


def scaled_matmul(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    tiles: GemmTiles | None = None,
) -> Tensor:
    """x: [M, K] and w: [N, K], both E4M3 or both int8, rows dense; x_scales: [M] float32; w_scales:
    [1, 1], [N, 1] or [⌈N / 128⌉, ⌈K / 128⌉] -> [M, N] in dtype. Lesson 19 multiplies INT8 with it.

    int8: products of 128 columns are added in int32, which is exact.
    """
    (num_rows, size), num_outputs = x.shape, len(w)
    is_tiled = w_scales.shape[1] > 1 or len(w_scales) not in (1, num_outputs)
    strides = w_scales.stride() if is_tiled else (w_scales.stride(0) * (len(w_scales) > 1), 0)
    tiles = tiles or (FEW_ROWS if num_rows <= FEW_ROWS.block_m else MORE_ROWS)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    if out.numel():
        grid = triton.cdiv(num_rows, tiles.block_m), triton.cdiv(num_outputs, tiles.block_n)
        scaled_matmul_kernel[grid](
            x,
            w,
            x_scales,
            w_scales,
            bias,
            out,
            num_rows,
            num_outputs,
            size,
            x.stride(0),
            w.stride(0),
            *strides,
            SCALE_ROWS=TILE if is_tiled else 1,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=TILE,
            NUM_STAGES=tiles.num_stages,
            num_warps=tiles.num_warps,
        )
    return out
