"""One kernel for each chain of naive.py: every input is read once, every output written once, all
else stays in registers.

Read `rms_norm_kernel` (rounding: `weighted` in rows.py), `add_rms_norm_kernel`, `silu_mul_kernel`,
then qk_norm.py. Softmax is lesson 2's kernel. A row lives in the registers of one program; one
longer than MAX_ROW is read twice (`rms_norm_long_kernel`).

Sources: as naive.py; fusing the residual addition into the norm: vLLM's fused_add_rms_norm
(csrc/layernorm_kernels.cu).
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.optimized import fused_softmax
from lessons.l03_kv_cache.arguments import check_apart
from lessons.l07_kernel_fusion.qk_norm import qk_norm
from lessons.l07_kernel_fusion.rows import (
    MAX_ROW,
    SHORTEST_TILE,
    check_weight,
    rows_of,
    tile_of,
    warps_of_a_row,
    weighted,
)
from lessons.toolbox.kernels.triton_ import tl, triton

__all__ = [
    "add_rms_norm",
    "qk_norm",
    "rms_norm",
    "rms_norm_gemma",
    "silu_mul",
    "softmax",
]


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    size,
    eps,
    stride_x,
    GEMMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per ROWS rows of x [R, N] -> out [R, N], contiguous."""
    # int64, because row · stride may pass 2^31
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < size)
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    # before the sum, so that both loads overlap
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0)
    # by size, not BLOCK: the padding holds zeros, which add nothing
    mean_square = tl.sum(x * x, axis=1, keep_dims=True) / size
    out = weighted(x, mean_square, weight, eps, out_ptr.dtype.element_ty, GEMMA)
    tl.store(out_ptr + row * size + column, out, mask=inside)


@triton.jit
def rms_norm_long_kernel(
    x_ptr, weight_ptr, out_ptr, size, eps, stride_x, GEMMA: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row that no program can hold: a pass for its squares, and a second one that
    reads it again.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    squares = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(
            x_ptr + row * stride_x + start + column, mask=start + column < size, other=0.0
        ).to(tl.float32)
        squares += x * x
    mean_square = tl.sum(squares, axis=1, keep_dims=True) / size
    for start in range(0, size, BLOCK):
        inside = start + column < size
        x = tl.load(x_ptr + row * stride_x + start + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + column, mask=inside, other=0.0)
        out = weighted(x, mean_square, weight, eps, out_ptr.dtype.element_ty, GEMMA)
        tl.store(out_ptr + row * size + start + column, out, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As naive.rms_norm, in one pass. x: [..., N], rows dense, one stride apart; weight: [N] ->
    [..., N]. Raises ValueError.
    """
    return _rms_norm(x, weight, eps, gemma=False)


def rms_norm_gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As naive.rms_norm_gemma, in one pass. x: [..., N], rows dense, one stride apart; weight: [N]
    -> [..., N].
    """
    return _rms_norm(x, weight, eps, gemma=True)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    (rows,), out = rows_of(x=x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_weight(x, weight=weight)
    num_rows, size = rows.shape
    if num_rows and size > MAX_ROW:
        rms_norm_long_kernel[num_rows,](
            rows,
            weight,
            out,
            size,
            eps,
            rows.stride(0),
            GEMMA=gemma,
            BLOCK=MAX_ROW // 2,
            num_warps=16,
        )
    elif num_rows:
        at_once, block, warps = tile_of(size)
        rms_norm_kernel[triton.cdiv(num_rows, at_once),](
            rows,
            weight,
            out,
            num_rows,
            size,
            eps,
            rows.stride(0),
            GEMMA=gemma,
            ROWS=at_once,
            BLOCK=block,
            num_warps=warps,
        )
    return out


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    size,
    eps,
    stride_x,
    stride_residual,
    BLOCK: tl.constexpr,
):
    """One program per row: residual += x, out = rms_norm(residual). x, residual, out: [R, N]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < size
    residual_row = residual_ptr + row * stride_residual + column
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_row, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    # rounded here, so that what is normed is what is kept
    total = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_row, total, mask=inside)
    wide = total.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1, keep_dims=True) / size
    out = weighted(wide, mean_square, weight, eps, out_ptr.dtype.element_ty, False)
    tl.store(out_ptr + row * size + column, out, mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As naive.add_rms_norm: residual += x in place, returns its norm. x, residual: [..., N],
    weight: [N] -> [..., N].

    A row longer than MAX_ROW takes two kernels, the addition and the norm: six passes over memory
    in place of four. Raises ValueError.
    """
    (x_rows, rows), out = (
        rows_of(x=x, residual=residual),
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
    )
    check_weight(x, weight=weight)
    check_apart(residual=residual)
    num_rows, size = rows.shape
    if size > MAX_ROW:
        return rms_norm(residual.add_(x), weight, eps)
    if num_rows:
        block = triton.next_power_of_2(size)
        add_rms_norm_kernel[num_rows,](
            x_rows,
            rows,
            weight,
            out,
            size,
            eps,
            x_rows.stride(0),
            rows.stride(0),
            BLOCK=block,
            num_warps=warps_of_a_row(block),
        )
    return out


@triton.jit
def silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, size, num_tiles, stride_gate, stride_up, BLOCK: tl.constexpr
):
    """One program per tile of a row: out = silu(gate) · up. gate, up, out: [R, I]."""
    program = tl.program_id(0)
    row = (program // num_tiles).to(tl.int64)
    column = program % num_tiles * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    # rounded here, because eager PyTorch stores it here
    silu = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(
        out_ptr + row * size + column,
        (silu.to(tl.float32) * up).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As naive.silu_mul, in one pass; the two halves of a merged projection will do. gate, up:
    [..., I] -> [..., I].

    Raises ValueError.
    """
    (gate_rows, up_rows), out = (
        rows_of(gate=gate, up=up),
        torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
    )
    num_rows, size = gate_rows.shape
    block = min(SHORTEST_TILE, triton.next_power_of_2(size))
    num_tiles = triton.cdiv(size, block)
    if num_rows:
        silu_mul_kernel[num_rows * num_tiles,](
            gate_rows,
            up_rows,
            out,
            size,
            num_tiles,
            gate_rows.stride(0),
            up_rows.stride(0),
            BLOCK=block,
            num_warps=warps_of_a_row(block),
        )
    return out


def softmax(x: Tensor) -> Tensor:
    """As naive.softmax, with lesson 2's kernel: one row a program, read once. x: [..., N],
    contiguous, N at most 16384 -> like x.

    Raises ValueError.
    """
    (rows,) = rows_of(x=x)
    return fused_softmax(rows[None], 1.0, causal=False).view(x.shape)
