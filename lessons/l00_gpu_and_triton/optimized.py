"""The same five programs in Triton. The loop over the grid became `kernel[grid](…)`.

A kernel sees no tensors. It gets the address of the first element (x_ptr), numbers, and constants
that are known when it is compiled (tl.constexpr).
"""

import torch
from torch import Tensor

from lessons.toolbox.kernels.triton_ import tl, triton

MOST_COLUMNS = 65536
DOT_SIDES = {16, 32, 64, 128}  # tl.dot takes no side below 16


@triton.jit
def scale_kernel(
    x_ptr,
    out_ptr,
    n,
    factor,
    BLOCK: tl.constexpr,
):
    """out = factor · x. x, out: [n]. Program p has BLOCK elements, from p · BLOCK on."""
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x_ptr + at, mask=inside, other=0.0)
    result = factor * values
    tl.store(out_ptr + at, result, mask=inside)


def scale(x: Tensor, factor: float, block: int = 1024) -> Tensor:
    """factor · x. x: [n], contiguous -> [n]. Raises ValueError for anything else."""
    check(x, "x", 1)
    check_contiguous(x, "x")
    n = len(x)
    if n >= 2**31:
        raise ValueError(
            f"x: got {n} elements; accepted: below 2**31, because the kernel counts in int32"
        )
    out = torch.empty_like(x)
    if n:
        grid = (triton.cdiv(n, block),)
        scale_kernel[grid](x, out, n, factor, block)
    return out


@triton.jit
def row_max_kernel(
    x_ptr,
    out_ptr,
    columns,
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,
):
    """out[r] = max of x[r]. x: [R, columns], any strides; out: [R]. Program r has row r."""
    # 64 bits, because a row number times a stride may pass 2^31
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    start = row * stride_row
    at = start + column * stride_column
    values = tl.load(x_ptr + at, mask=inside, other=-float("inf"))
    largest = tl.max(values, axis=0)
    tl.store(out_ptr + row, largest)


def row_max(x: Tensor) -> Tensor:
    """The largest element of each row. x: [R, C], C from 1 to 65536 -> [R]. Raises ValueError for
    anything else.
    """
    check(x, "x", 2)
    rows, columns = x.shape
    if not 1 <= columns <= MOST_COLUMNS:
        raise ValueError(
            f"x has {columns} columns; accepted: 1 to {MOST_COLUMNS}, one program holds a row"
        )
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    if rows:
        row_max_kernel[(rows,)](
            x,
            out,
            columns,
            x.stride(0),
            x.stride(1),
            BLOCK=triton.next_power_of_2(columns),
        )
    return out


@triton.jit
def column_sums_kernel(
    x_ptr,
    out_ptr,
    rows,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[c] = sum of x[:, c]. x: [rows, columns], contiguous; out: [columns], float32. A program
    has BLOCK_COLUMNS columns and walks down all rows.
    """
    start = tl.program_id(0) * BLOCK_COLUMNS
    column = start + tl.arange(0, BLOCK_COLUMNS)
    in_columns = column < columns
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        in_rows = row < rows
        inside = in_rows[:, None] & in_columns[None, :]
        row_start = row.to(tl.int64) * columns
        at = row_start[:, None] + column[None, :]
        tile = tl.load(x_ptr + at, mask=inside, other=0.0)
        wide = tile.to(tl.float32)
        total += tl.sum(wide, axis=0)
    tl.store(out_ptr + column, total, mask=in_columns)


def column_sums(
    x: Tensor,
    block_rows: int = 32,
    block_columns: int = 64,
) -> Tensor:
    """The sum of each column in float32. x: [R, C], contiguous -> [C]. Raises ValueError for
    anything else.
    """
    check(x, "x", 2)
    check_contiguous(x, "x")
    rows, columns = x.shape
    out = torch.empty(columns, device=x.device)
    if columns:
        grid = (triton.cdiv(columns, block_columns),)
        column_sums_kernel[grid](
            x,
            out,
            rows,
            columns,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
        )
    return out


@triton.jit
def every_nth_kernel(
    x_ptr,
    out_ptr,
    count,
    stride,
    BLOCK: tl.constexpr,
):
    """out[i] = x[i · stride]. out: [count]. With stride 1 the lanes of a warp read neighbours."""
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    source = at * stride
    values = tl.load(x_ptr + source, mask=inside, other=0.0)
    tl.store(out_ptr + at, values, mask=inside)


def every_nth(
    x: Tensor,
    stride: int,
    count: int,
    block: int = 1024,
) -> Tensor:
    """x[0], x[stride], x[2 · stride], … : [count]. x: [n], contiguous. Raises ValueError if x is
    shorter than that.
    """
    check(x, "x", 1)
    check_contiguous(x, "x")
    last = (count - 1) * stride
    if stride < 1 or count < 0 or last >= len(x):
        raise ValueError(
            f"stride is {stride}, count {count}; "
            "accepted: stride >= 1 and "
            f"(count - 1) * stride below len(x) = {len(x)}"
        )
    out = torch.empty(count, dtype=x.dtype, device=x.device)
    if count:
        grid = (triton.cdiv(count, block),)
        every_nth_kernel[grid](x, out, count, stride, block)
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
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    k_of_a = tl.arange(0, K)[None, :]
    k_of_b = tl.arange(0, K)[:, None]
    a = tl.load(a_ptr + m * K + k_of_a)
    b = tl.load(b_ptr + k_of_b * N + n)
    out = tl.dot(a, b, input_precision=INPUT_PRECISION)
    tl.store(out_ptr + m * N + n, out)


def tile_product(
    a: Tensor,
    b: Tensor,
    input_precision: str = "ieee",
) -> Tensor:
    """a · b of one tile each. a: [M, K], b: [K, N], float32, contiguous; M, K, N powers of two from
    16 to 128 -> [M, N]. input_precision: "ieee" or "tf32". Raises ValueError for anything else.
    """
    if input_precision not in ("ieee", "tf32"):
        raise ValueError(f"input_precision is {input_precision!r}; accepted: 'ieee', 'tf32'")
    check_tile(a, "a")
    check_tile(b, "b")
    m, k = a.shape
    rows, n = b.shape
    if rows != k:
        raise ValueError(f"a has {k} columns, b {rows} rows; accepted: as many as each other")
    out = torch.empty(m, n, device=a.device)
    tile_product_kernel[(1,)](
        a,
        b,
        out,
        M=m,
        K=k,
        N=n,
        INPUT_PRECISION=input_precision,
    )
    return out


# ---------------------------------------------------------------- arguments


def check(x: Tensor, name: str, dimensions: int) -> None:
    """Raise ValueError unless x has so many dimensions of a float, where a kernel can read it.
    x: [...].
    """
    is_here = x.device.type in ("cpu", "cuda")
    is_float = x.is_floating_point()
    if x.dim() != dimensions or not is_float or not is_here:
        raise ValueError(
            f"{name} is {list(x.shape)} of {x.dtype} on {x.device}; "
            f"accepted: {dimensions} dimensions of a float, "
            "on a GPU or, interpreted, on the CPU"
        )


def check_contiguous(x: Tensor, name: str) -> None:
    """Raise ValueError if the elements of x: [...] are not contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}; accepted: contiguous")


def check_tile(x: Tensor, name: str) -> None:
    """Raise ValueError unless x: [rows, columns] is what tile_product takes."""
    check(x, name, 2)
    check_contiguous(x, name)
    is_single = x.dtype == torch.float32
    if not is_single or not set(x.shape) <= DOT_SIDES:
        raise ValueError(
            f"{name} is {list(x.shape)} of {x.dtype}; accepted: float32, sides 16, 32, 64, 128"
        )
