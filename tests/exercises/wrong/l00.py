"""Wrong answers to lesson 00's puzzles: real slips, each with a hint. The products and CUDA C++ are
in l00_tiles.py.
"""

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l00_gpu_and_triton import add_kernel, copy_rows_kernel, outer_kernel
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()


# ---------------------------------------------------------------- 0.1 and 0.2

answers.slips(
    "0.1",
    """
    no_mask: There is no mask: the last program has 16 places, whatever n is.
    - x = tl.load(x_ptr + at, mask=inside)
    - tl.store(out_ptr + at, x, mask=inside)
    + x = tl.load(x_ptr + at)
    + tl.store(out_ptr + at, x)

    load_without_mask: The load needs the mask as well as the store.
    - tl.load(x_ptr + at, mask=inside)
    + tl.load(x_ptr + at)

    store_without_mask: The store needs the mask as well as the load.
    - tl.store(out_ptr + at, x, mask=inside)
    + tl.store(out_ptr + at, x)

    one_too_many: n elements have the places 0 to n − 1: at < n, not at <= n.
    - at < n
    + at <= n

    one_too_few: The last place, n − 1, belongs to x: at < n.
    - tl.store(out_ptr + at, x, mask=inside)
    + tl.store(out_ptr + at, x, mask=at < n - 1)

    mask_of_the_block: `at` counts from the start of x, so compare it with n, not with BLOCK.
    - at < n
    + at < BLOCK

    copied_by_pytorch: PyTorch copies here, and no kernel stores anything.
    - copy_kernel[(triton.cdiv(len(x), 16),)](x, out, len(x), BLOCK=16)
    + out.copy_(x)
    """,
)


@triton.jit
def mirrored_copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = n - 1 - tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at >= 0, other=1.0), mask=at >= 0)


@answers.alternative("0.1")
def copied_from_the_end(x):
    out = torch.empty_like(x)
    mirrored_copy_kernel[(triton.cdiv(len(x), 8),)](x, out, len(x), BLOCK=8)
    return out


answers.slips(
    "0.2",
    """
    no_program_id: All programs work on the first block. Where does program p begin?
    - tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    + tl.arange(0, BLOCK)

    program_not_times_block: Program p begins at p · BLOCK, not at p.
    - tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    + tl.program_id(0) + tl.arange(0, BLOCK)

    no_store: A kernel returns nothing. Write the sum to out_ptr with tl.store.
    - tl.store(out_ptr + at, x + y, mask=inside)

    x_twice: You load x twice, and y not at all.
    - tl.load(y_ptr + at, mask=inside)
    + tl.load(x_ptr + at, mask=inside)

    no_mask_for_y: The load of y needs the mask too.
    - tl.load(y_ptr + at, mask=inside)
    + tl.load(y_ptr + at)
    """,
)


@answers.alternative("0.2")
def added_in_two_launches(x, y):
    out = torch.empty_like(x)
    for first in (0, len(x) // 2):
        end = len(x) // 2 if first == 0 else len(x)
        if end > first:
            grid = (triton.cdiv(end - first, 4),)
            add_kernel[grid](x[first:end], y[first:end], out[first:end], end - first, BLOCK=4)
    return out


# ---------------------------------------------------------------- 0.3 and 0.4

answers.slips(
    "0.3",
    """
    rows_of_block: Row r begins at r · columns. BLOCK is longer than a row.
    - x_ptr + row * columns + column
    + x_ptr + row * BLOCK + column

    first_row_only: Every program sums the first row. Which row is program r's?
    - x_ptr + row * columns + column
    + x_ptr + column

    mask_of_the_place: The mask compares the place in x with `columns`. Compare the column.
    - mask=column < columns
    + mask=row * columns + column < columns

    no_mask: Without a mask a block reads on into the next row.
    - mask=column < columns
    + mask=column >= 0

    no_other: Places after the row have no `other`, so they hold garbage, and you add it.
    - mask=column < columns, other=0.0
    + mask=column < columns

    other_1: Padding of 1 is added too. Which number changes no sum?
    - other=0.0
    + other=1.0

    loads_twice: Each element is needed once: keep the block in a variable.
    - tl.store
    + x = 0.5 * x
    + x += 0.5 * tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
    + tl.store

    mean: You divide by the row's length. The sum is asked for.
    - tl.sum(x, axis=0)
    + tl.sum(x, axis=0) / columns
    """,
)


@answers.alternative("0.3")
def sums_by_a_mask(x):
    """No `other`: what was masked is replaced afterwards."""
    out = torch.empty(len(x), device=x.device)
    block = 2 * triton.next_power_of_2(x.shape[1])
    where_kernel[(len(x),)](x, out, x.shape[1], BLOCK=block)
    return out


@triton.jit
def where_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * columns + column, mask=column < columns)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.where(column < columns, x, 0.0), axis=0))


answers.slips(
    "0.4",
    """
    no_strides: You read x as if it were contiguous: both strides are missing.
    - row * stride_row + column * stride_column
    + row * columns + column

    row_stride_only: Neighbours in a row are stride_column apart, not 1.
    - row * stride_row + column * stride_column
    + row * stride_row + column

    column_stride_only: Rows of x are stride_row apart, not `columns`.
    - row * stride_row + column * stride_column
    + row * columns + column * stride_column

    strides_swapped: The row goes with stride_row, the column with stride_column.
    - row * stride_row + column * stride_column
    + row * stride_column + column * stride_row

    strides_of_x_for_out: The strides are x's. The result is contiguous.
    - out_ptr + row * columns + column
    + out_ptr + row * stride_row + column * stride_column

    contiguous_by_pytorch: PyTorch makes the copy here, and no kernel stores anything.
    - copy_rows_kernel[(len(x),)](x, out, x.shape[1], x.stride(0), x.stride(1), BLOCK=block)
    + out.copy_(x)
    """,
)


@answers.alternative("0.4")
def row_after_row(x):
    """A launch for each row, on views."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    for row, to in zip(x, out):
        copy_rows_kernel[(1,)](row, to, len(row), 0, row.stride(0), BLOCK=block)
    return out


# ---------------------------------------------------------------- 0.5 and 0.6

answers.slips(
    "0.5",
    """
    programs_swapped: program_id(0) counts tiles of rows, program_id(1) tiles of columns.
    - row = tl.program_id(0)
    + row = tl.program_id(1)
    - column = tl.program_id(1)
    + column = tl.program_id(0)

    rows_masked_only: The columns have a tail too: mask both sides.
    - (column[None, :] < columns)
    + (column[None, :] >= 0)

    steps_of_rows: A row of out has `columns` elements: that is the step from row to row.
    - row[:, None] * columns + column
    + row[:, None] * rows + column

    sum: You add; the product is asked for.
    - x[:, None] * y[None, :]
    + x[:, None] + y[None, :]
    """,
)


@answers.alternative("0.5")
def outer_by_rows(x, y):
    out = torch.empty(len(x), len(y), device=x.device)
    for at in range(len(x)):
        grid = (1, triton.cdiv(len(y), 8))
        outer_kernel[grid](x[at:], y, out[at], 1, len(y), BLOCK=8)
    return out


answers.slips(
    "0.6",
    """
    no_mask: The tiles at the edges have places outside x: mask rows and columns.
    - (row < rows) & (column < columns)
    + (row >= 0) & (column >= 0)

    not_transposed: Load and store use the same address, so nothing moves.
    - out_ptr + column * rows + row
    + out_ptr + row * columns + column

    rows_and_columns_swapped: You load from the place in out. x[r, c] is r · columns + c after
        x_ptr.
    - x_ptr + row * columns + column
    + x_ptr + column * rows + row

    steps_of_x: A row of out has `rows` elements, so the step between its rows is `rows`.
    - out_ptr + column * rows + row
    + out_ptr + column * columns + row

    both_swapped: Load and store have changed places: x is read by r · columns + c.
    = not_transposed, rows_and_columns_swapped
    """,
)


@answers.alternative("0.6")
def transposed_in_registers(x):
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, 4), triton.cdiv(columns, 4))
    turning_kernel[grid](x, out, rows, columns, BLOCK=4)
    return out


@triton.jit
def turning_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside)
    to = column[:, None] * rows + row[None, :]
    tl.store(out_ptr + to, tl.trans(x), mask=(column[:, None] < columns) & (row[None, :] < rows))


# ---------------------------------------------------------------- 0.7

answers.slips(
    "0.7",
    """
    no_other: Without `other` the padding is garbage, and whatever you do over the row sees it.
    - mask=inside, other=-float("inf")
    + mask=inside

    other_0: Padding of 0 counts as exp(0 − max). Which value has an exponential of 0?
    - other=-float("inf")
    + other=0.0

    other_very_small: A row may be smaller still: nothing but minus infinity is below every number.
    - other=-float("inf")
    + other=-1e9

    no_maximum: exp(1000) is infinite. Subtract the row's maximum first.
    - x - tl.max(x, axis=0)
    + x

    not_divided: The weights are not divided by their sum.
    - weights / tl.sum(weights, axis=0)
    + weights

    loads_twice: The row is in a variable already: do not load it a second time.
    - tl.store(out_ptr + at, weights / tl.sum(weights, axis=0), mask=inside)
    + again = tl.exp(tl.load(x_ptr + at, mask=inside, other=0.0) - tl.max(x, axis=0))
    + tl.store(out_ptr + at, again / tl.sum(weights, axis=0), mask=inside)
    """,
)


@answers.alternative("0.7")
def softmax_in_base_two(x):
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    base_two_kernel[(len(x),)](x, out, x.shape[1], BLOCK=block)
    return out


@triton.jit
def base_two_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + column
    x = tl.load(x_ptr + at, mask=column < columns, other=-1e38)
    weights = tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)
    share = 1.0 / tl.sum(weights, axis=0)
    tl.store(out_ptr + at, weights * share, mask=column < columns)


# ---------------------------------------------------------------- without a kernel

attacks(answers, "0.1", lambda x: x.clone())
attacks(answers, "0.2", lambda x, y: x + y)
attacks(answers, "0.3", lambda x: x.sum(dim=1))
attacks(answers, "0.4", lambda x: x.clone(memory_format=torch.contiguous_format))
attacks(answers, "0.5", lambda x, y: x[:, None] * y[None, :])
attacks(answers, "0.6", lambda x: x.T.contiguous())
attacks(answers, "0.7", lambda x: torch.softmax(x, dim=1))


from tests.exercises.wrong import l00_tiles  # noqa: E402, F401  registers the rest
