"""Exercises of lesson 00, the first half: seven small Triton kernels on vectors and rows.

Each kernel is written above the function that launches it. You write the kernel, the launch is
given. Read the launch first: it says how many programs run and which constants they get.
"""

import torch
from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton

# ---------------------------------------------------------------- 0.1


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """x, out: [n]. `at` are the BLOCK places of this program; some of them may be n or more."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # SOLUTION 0.1
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    tl.store(out_ptr + at, x, mask=inside)
    # END


@exercise("0.1", "A copy with a mask", minutes=5, difficulty=1)
def copy(x: Tensor) -> Tensor:
    """A copy of x: [n] -> [n]. Write the body of `copy_kernel`: one load, one store.

    Any n from 1 on. The last program has places after the end, and must neither read nor write
    there. Errors: none to raise.

    Example, BLOCK = 16: n = 50 takes 4 programs. Program 3 has the places 48 to 63, and copies two:
    48 and 49.
    """
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(len(x), 16),)](x, out, len(x), BLOCK=16)
    return out


# ---------------------------------------------------------------- 0.2


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """x, y, out: [n]."""
    # SOLUTION 0.2
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x + y, mask=inside)
    # END


@exercise("0.2", "Add two vectors that have a tail", minutes=5, difficulty=1)
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y: [n], [n] -> [n]. Write the body of `add_kernel`, this time from the first line on.

    Any n from 1 on. Errors: none to raise.

    Example, BLOCK = 16: n = 20. Program 0 adds the elements 0 to 15, program 1 the elements 16 to
    19.
    """
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(len(x), 16),)](x, y, out, len(x), BLOCK=16)
    return out


# ---------------------------------------------------------------- 0.3


@triton.jit
def row_sums_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """x: [R, columns], contiguous; out: [R]. Program r has row r."""
    # SOLUTION 0.3
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, axis=0))
    # END


@exercise("0.3", "The sum of each row", minutes=8, difficulty=1)
def row_sums(x: Tensor) -> Tensor:
    """The sum of each row. x: [R, C], contiguous -> [R]. Write the body of `row_sums_kernel`.

    One program a row. BLOCK is the next power of two, because `tl.arange` takes no other length.
    So some places are after the end of the row: give them a value that does not change a sum
    (`other=`). `tl.sum(values, axis=0)` adds up a block. Aim: load each element once. Errors: none
    to raise.

    Example: x = [[1, 2, 3], [4, 5, 6]]: BLOCK = 4, two programs -> [6, 15].
    """
    out = torch.empty(len(x), device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    row_sums_kernel[(len(x),)](x, out, x.shape[1], BLOCK=block)
    return out


# ---------------------------------------------------------------- 0.4


@triton.jit
def copy_rows_kernel(x_ptr, out_ptr, columns, stride_row, stride_column, BLOCK: tl.constexpr):
    """x: [R, columns], with any strides; out: [R, columns], contiguous. Program r has row r."""
    # SOLUTION 0.4
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * stride_row + column * stride_column, mask=inside)
    tl.store(out_ptr + row * columns + column, x, mask=inside)
    # END


@exercise("0.4", "Copy rows that are not contiguous", minutes=8, difficulty=2)
def copy_rows(x: Tensor) -> Tensor:
    """A contiguous copy of a view. x: [R, C], any strides -> [R, C]. Write the body of
    `copy_rows_kernel`.

    x[r, c] is stride_row · r + stride_column · c elements after x_ptr. The result is contiguous, so
    out[r, c] is C · r + c elements after out_ptr. Errors: none to raise.

    Example: whole = [[0, 1, 2, 3], [4, 5, 6, 7]], x = whole[:, ::2] has the strides (4, 2)
        x[1, 1] is 4 · 1 + 2 · 1 = 6 elements after the first -> [[0, 2], [4, 6]].
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    copy_rows_kernel[(len(x),)](x, out, x.shape[1], x.stride(0), x.stride(1), BLOCK=block)
    return out


# ---------------------------------------------------------------- 0.5


@triton.jit
def outer_kernel(x_ptr, y_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    """x: [rows], y: [columns], out: [rows, columns], contiguous. Program (i, j) has a square tile
    of out.
    """
    # SOLUTION 0.5
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row, mask=row < rows)
    y = tl.load(y_ptr + column, mask=column < columns)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, x[:, None] * y[None, :], mask=inside)
    # END


@exercise("0.5", "An outer product, tile by tile", minutes=10, difficulty=2)
def outer(x: Tensor, y: Tensor) -> Tensor:
    """out[i, j] = x[i] · y[j]. x: [R], y: [C] -> [R, C]. Write the body of `outer_kernel`.

    The grid has two dimensions: `tl.program_id(0)` counts tiles of rows, `tl.program_id(1)` tiles
    of columns. `row[:, None]` turns a block [BLOCK] into a column [BLOCK, 1], and `column[None, :]`
    into a row [1, BLOCK]; combined they give a tile [BLOCK, BLOCK], as in PyTorch. Join two masks
    with `&`. Errors: none to raise.

    Example: x = [1, 2], y = [3, 4, 5] -> [[3, 4, 5], [6, 8, 10]].
    """
    out = torch.empty(len(x), len(y), device=x.device)
    grid = (triton.cdiv(len(x), 8), triton.cdiv(len(y), 8))
    outer_kernel[grid](x, y, out, len(x), len(y), BLOCK=8)
    return out


# ---------------------------------------------------------------- 0.6


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    """x: [rows, columns], out: [columns, rows], both contiguous. Program (i, j) has a square tile
    of x.
    """
    # SOLUTION 0.6
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * columns + column, mask=inside)
    tl.store(out_ptr + column * rows + row, x, mask=inside)
    # END


@exercise("0.6", "A transpose", minutes=8, difficulty=2)
def transpose(x: Tensor) -> Tensor:
    """x transposed. x: [R, C], contiguous -> [C, R], contiguous. Write the body of
    `transpose_kernel`.

    No function of Triton is needed to turn the tile. What is at row r and column c of x belongs to
    row c and column r of out, and only the address has to know it. Errors: none to raise.

    Example: x = [[1, 2, 3], [4, 5, 6]] -> [[1, 4], [2, 5], [3, 6]]
        6 is x[1, 2], 3 · 1 + 2 = 5 elements after x_ptr; it becomes out[2, 1], which is
          2 · 2 + 1 = 5 elements after out_ptr. And 3 moves from place 2 to place 4.
    """
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, 8), triton.cdiv(columns, 8))
    transpose_kernel[grid](x, out, rows, columns, BLOCK=8)
    return out


# ---------------------------------------------------------------- 0.7


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """x, out: [R, columns], contiguous. Program r has row r, which fits into a block."""
    # SOLUTION 0.7
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + column
    inside = column < columns
    x = tl.load(x_ptr + at, mask=inside, other=-float("inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + at, weights / tl.sum(weights, axis=0), mask=inside)
    # END


@exercise("0.7", "The softmax of a short row", minutes=10, difficulty=2)
def softmax(x: Tensor) -> Tensor:
    """exp(x) over the sum of exp(x), row by row. x: [R, C], contiguous -> [R, C]. Write the body of
    `softmax_kernel`.

    Subtract the row's maximum before `tl.exp`, because exp(100) does not fit float32. Which `other`
    changes neither the maximum nor the sum? Infinity is written `float("inf")`. Aim: load each
    element once; the block stays in registers. Errors: none to raise.

    Example: [1000, 1000, -1000] -> [0.5, 0.5, 0].
    """
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    softmax_kernel[(len(x),)](x, out, x.shape[1], BLOCK=block)
    return out
