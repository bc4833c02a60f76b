"""The same five programs in Triton. The loop over the grid became `kernel[grid](…)`.

A kernel sees no tensors. It gets the address of the first element (x_ptr), numbers, and constants
that are known when it is compiled (tl.constexpr).
"""

import torch
from torch import Tensor

from lessons.toolbox.kernels.triton_ import tl, triton

SMALLEST_DOT = 16  # tl.dot takes no side that is shorter


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    """out = factor · x. x, out: [n]. Program p has the elements p · BLOCK to (p + 1) · BLOCK − 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, factor * values, mask=inside)


def scale(x: Tensor, factor: float, block: int = 1024) -> Tensor:
    """factor · x. x: [n], contiguous -> [n]. Raises ValueError for anything else."""
    _check(x, "x", 1, contiguous=True)
    out = torch.empty_like(x)
    if len(x):
        scale_kernel[(triton.cdiv(len(x), block),)](x, out, len(x), factor, BLOCK=block)
    return out


@triton.jit
def row_max_kernel(x_ptr, out_ptr, columns, stride_row, stride_column, BLOCK: tl.constexpr):
    """out[r] = max of x[r]. x: [R, columns], any strides; out: [R]. Program r has row r."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * stride_row + column * stride_column
    values = tl.load(x_ptr + at, mask=inside, other=-float("inf"))
    tl.store(out_ptr + row, tl.max(values, axis=0))


def row_max(x: Tensor) -> Tensor:
    """The largest element of each row. x: [R, C], C from 1 to 65536 -> [R]. Raises ValueError for
    anything else.
    """
    _check(x, "x", 2)
    rows, columns = x.shape
    if not 1 <= columns <= 65536:
        raise ValueError(f"x has {columns} columns; accepted: 1 to 65536, one program holds a row")
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(columns)
        row_max_kernel[(rows,)](x, out, columns, *x.stride(), BLOCK=block)
    return out


@triton.jit
def column_sums_kernel(
    x_ptr, out_ptr, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """out[c] = sum of x[:, c]. x: [rows, columns], contiguous; out: [columns], float32. A program
    has BLOCK_COLUMNS columns and walks down all rows.
    """
    column = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        # 64 bits, because a row number times a row's length may pass 2^31
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        tile = tl.load(x_ptr + at, mask=inside, other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    tl.store(out_ptr + column, total, mask=column < columns)


def column_sums(x: Tensor, block_rows: int = 32, block_columns: int = 64) -> Tensor:
    """The sum of each column in float32. x: [R, C], contiguous -> [C]. Raises ValueError for
    anything else.
    """
    _check(x, "x", 2, contiguous=True)
    rows, columns = x.shape
    out = torch.empty(columns, dtype=torch.float32, device=x.device)
    if columns:
        grid = (triton.cdiv(columns, block_columns),)
        column_sums_kernel[grid](
            x, out, rows, columns, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns
        )
    return out


@triton.jit
def every_nth_kernel(x_ptr, out_ptr, count, stride, BLOCK: tl.constexpr):
    """out[i] = x[i · stride]. out: [count]. With stride 1 the lanes of a warp read neighbours."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x_ptr + at * stride, mask=inside, other=0.0)
    tl.store(out_ptr + at, values, mask=inside)


def every_nth(x: Tensor, stride: int, count: int, block: int = 1024) -> Tensor:
    """x[0], x[stride], x[2 · stride], … : [count]. x: [n], contiguous. Raises ValueError if x is
    shorter than that.
    """
    _check(x, "x", 1, contiguous=True)
    if stride < 1 or count < 0 or (count and len(x) <= (count - 1) * stride):
        raise ValueError(
            f"stride is {stride}, count {count}; accepted: stride >= 1 and (count - 1) * stride "
            f"below len(x) = {len(x)}"
        )
    out = torch.empty(count, dtype=x.dtype, device=x.device)
    if count:
        every_nth_kernel[(triton.cdiv(count, block),)](x, out, count, stride, BLOCK=block)
    return out


@triton.jit
def tile_product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """out = a · b in one program. a: [M, K], b: [K, N], out: [M, N], all contiguous."""
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    out = tl.dot(a, b, input_precision=INPUT_PRECISION)
    tl.store(out_ptr + m[:, None] * N + n[None, :], out)


def tile_product(a: Tensor, b: Tensor, input_precision: str = "ieee") -> Tensor:
    """a · b of one tile each. a: [M, K], b: [K, N], float32, contiguous; M, K, N powers of two from
    16 to 128 -> [M, N]. input_precision: "ieee" or "tf32". Raises ValueError for anything else.
    """
    if input_precision not in ("ieee", "tf32"):
        raise ValueError(f"input_precision is {input_precision!r}; accepted: 'ieee', 'tf32'")
    for name, x in (("a", a), ("b", b)):
        _check(x, name, 2, contiguous=True)
        if x.dtype != torch.float32 or any(side not in (16, 32, 64, 128) for side in x.shape):
            raise ValueError(
                f"{name} is {list(x.shape)} of {x.dtype}; accepted: float32, sides 16, 32, 64, 128"
            )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has {a.shape[1]} columns, b {b.shape[0]} rows; accepted: as many as each other"
        )
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=torch.float32, device=a.device)
    tile_product_kernel[(1,)](a, b, out, M=m, K=k, N=n, INPUT_PRECISION=input_precision)
    return out


def _check(x: Tensor, name: str, dimensions: int, contiguous: bool = False) -> None:
    if x.dim() != dimensions or not x.is_floating_point() or x.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{name} is {list(x.shape)} of {x.dtype} on {x.device}; accepted: {dimensions} "
            "dimensions of a float, on a GPU or, interpreted, on the CPU"
        )
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}; accepted: contiguous")
