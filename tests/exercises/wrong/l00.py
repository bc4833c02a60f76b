"""Wrong answers to lesson 00's puzzles: real slips, and the hint for whoever made them. The products
and CUDA C++ stand in l00_tiles.py.
"""

from functools import partial

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers

answers = Answers()


def slips(exercise_id, function, hints):
    """Register function(…, slip=name) for each {name: hint}."""
    for name, hint in hints.items():
        answers.wrong(exercise_id, hint, name)(partial(function, slip=name))


# ---------------------------------------------------------------- 0.1 and 0.2


@triton.jit
def slipped_copy_kernel(x_ptr, out_ptr, n, SLIP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    load_inside = at < n
    if SLIP == "one_too_many":
        load_inside = at <= n
    if SLIP == "mask_of_the_block":
        load_inside = at < BLOCK
    store_inside = load_inside
    if SLIP == "no_mask" or SLIP == "load_without_mask":
        load_inside = at >= 0
    if SLIP == "no_mask" or SLIP == "store_without_mask":
        store_inside = at >= 0
    if SLIP == "one_too_few":
        store_inside = at < n - 1
    x = tl.load(x_ptr + at, mask=load_inside)
    tl.store(out_ptr + at, x, mask=store_inside)


def slipped_copy(x, *, slip):
    out = torch.empty_like(x)
    slipped_copy_kernel[(triton.cdiv(len(x), 16),)](x, out, len(x), SLIP=slip, BLOCK=16)
    return out


slips(
    "0.1",
    slipped_copy,
    {
        "no_mask": "There is no mask: the last program has 16 places, whatever n is.",
        "load_without_mask": "The load needs the mask as well as the store.",
        "store_without_mask": "The store needs the mask as well as the load.",
        "one_too_many": "n elements have the places 0 to n − 1: at < n, not at <= n.",
        "one_too_few": "The last place, n − 1, belongs to x: at < n.",
        "mask_of_the_block": "`at` counts from the start of x, so compare it with n, not with BLOCK.",
    },
)


@answers.wrong("0.1", "PyTorch copies here, and no kernel stores anything.")
def copied_by_pytorch(x):
    return x.clone()


@triton.jit
def mirrored_copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = n - 1 - tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at >= 0, other=1.0), mask=at >= 0)


@answers.alternative("0.1")
def copied_from_the_end(x):
    out = torch.empty_like(x)
    mirrored_copy_kernel[(triton.cdiv(len(x), 8),)](x, out, len(x), BLOCK=8)
    return out


@triton.jit
def slipped_add_kernel(x_ptr, y_ptr, out_ptr, n, SLIP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if SLIP == "no_program_id":
        at = tl.arange(0, BLOCK)
    if SLIP == "program_not_times_block":
        at = tl.program_id(0) + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load((x_ptr if SLIP == "x_twice" else y_ptr) + at, mask=inside)
    if SLIP == "no_mask_for_y":
        y = tl.load(y_ptr + at)
    if SLIP != "no_store":
        tl.store(out_ptr + at, x + y, mask=inside)


def slipped_add(x, y, *, slip):
    out = torch.empty_like(x)
    slipped_add_kernel[(triton.cdiv(len(x), 16),)](x, y, out, len(x), SLIP=slip, BLOCK=16)
    return out


slips(
    "0.2",
    slipped_add,
    {
        "no_program_id": "All programs work on the first block. Where does program p begin?",
        "program_not_times_block": "Program p begins at p · BLOCK, not at p.",
        "no_store": "A kernel returns nothing. Write the sum to out_ptr with tl.store.",
        "x_twice": "You load x twice, and y not at all.",
        "no_mask_for_y": "The load of y needs the mask too.",
    },
)


@answers.alternative("0.2")
def added_in_two_launches(x, y):
    out = torch.empty_like(x)
    for first in (0, len(x) // 2):
        end = len(x) // 2 if first == 0 else len(x)
        if end > first:
            grid = (triton.cdiv(end - first, 4),)
            slipped_add_kernel[grid](
                x[first:end], y[first:end], out[first:end], end - first, SLIP="", BLOCK=4
            )
    return out


# ---------------------------------------------------------------- 0.3 and 0.4


@triton.jit
def slipped_sums_kernel(x_ptr, out_ptr, columns, SLIP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = row * columns + column
    if SLIP == "rows_of_block":
        at = row * BLOCK + column
    if SLIP == "first_row_only":
        at = column
    inside = column < columns
    if SLIP == "mask_of_the_place":
        inside = at < columns
    if SLIP == "no_mask":
        inside = column >= 0
    if SLIP == "no_other":
        x = tl.load(x_ptr + at, mask=inside)
    else:
        x = tl.load(x_ptr + at, mask=inside, other=1.0 if SLIP == "other_1" else 0.0)
    if SLIP == "loads_twice":
        x = 0.5 * x + 0.5 * tl.load(x_ptr + at, mask=inside, other=0.0)
    total = tl.sum(x, axis=0)
    if SLIP == "mean":
        total = total / columns
    tl.store(out_ptr + row, total)


def slipped_sums(x, *, slip):
    out = torch.empty(len(x), device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    slipped_sums_kernel[(len(x),)](x, out, x.shape[1], SLIP=slip, BLOCK=block)
    return out


slips(
    "0.3",
    slipped_sums,
    {
        "rows_of_block": "Row r begins at r · columns. BLOCK is longer than a row.",
        "first_row_only": "Every program sums the first row. Which row is program r's?",
        "mask_of_the_place": "The mask compares the place in x with `columns`. Compare the column.",
        "no_mask": "Without a mask a block reads on into the next row.",
        "no_other": "Places after the row have no `other`, so they hold garbage, and you add it.",
        "other_1": "Padding of 1 is added too. Which number changes no sum?",
        "loads_twice": "Each element is needed once: keep the block in a variable.",
        "mean": "You divide by the row's length. The sum is asked for.",
    },
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


@triton.jit
def slipped_rows_kernel(
    x_ptr,
    out_ptr,
    columns,
    stride_row,
    stride_column,
    SLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * stride_row + column * stride_column
    to = row * columns + column
    if SLIP == "no_strides":
        at = to
    if SLIP == "row_stride_only":
        at = row * stride_row + column
    if SLIP == "column_stride_only":
        at = row * columns + column * stride_column
    if SLIP == "strides_swapped":
        at = row * stride_column + column * stride_row
    if SLIP == "strides_of_x_for_out":
        to = at
    tl.store(out_ptr + to, tl.load(x_ptr + at, mask=inside), mask=inside)


def slipped_rows(x, *, slip):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    strides = x.stride(0), x.stride(1)
    slipped_rows_kernel[(len(x),)](x, out, x.shape[1], *strides, SLIP=slip, BLOCK=block)
    return out


slips(
    "0.4",
    slipped_rows,
    {
        "no_strides": "You read x as if it were contiguous: both strides are missing.",
        "row_stride_only": "Neighbours in a row are stride_column apart, not 1.",
        "column_stride_only": "Rows of x are stride_row apart, not `columns`.",
        "strides_swapped": "The row goes with stride_row, the column with stride_column.",
        "strides_of_x_for_out": "The strides are x's. The result is contiguous.",
    },
)


@answers.wrong("0.4", "PyTorch makes the copy here, and no kernel stores anything.")
def contiguous_by_pytorch(x):
    return x.contiguous()


@answers.alternative("0.4")
def row_after_row(x):
    """A launch for each row, on views."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    for row, to in zip(x, out):
        slipped_rows_kernel[(1,)](row, to, len(row), 0, row.stride(0), SLIP="", BLOCK=block)
    return out


# ---------------------------------------------------------------- 0.5 and 0.6


@triton.jit
def slipped_outer_kernel(
    x_ptr, y_ptr, out_ptr, rows, columns, SLIP: tl.constexpr, BLOCK: tl.constexpr
):
    i, j = tl.program_id(0), tl.program_id(1)
    if SLIP == "programs_swapped":
        i, j = tl.program_id(1), tl.program_id(0)
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row, mask=row < rows)
    y = tl.load(y_ptr + column, mask=column < columns)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    if SLIP == "rows_masked_only":
        inside = (row[:, None] < rows) & (column[None, :] >= 0)
    at = row[:, None] * columns + column[None, :]
    if SLIP == "steps_of_rows":
        at = row[:, None] * rows + column[None, :]
    values = x[:, None] * y[None, :]
    if SLIP == "sum":
        values = x[:, None] + y[None, :]
    tl.store(out_ptr + at, values, mask=inside)


def slipped_outer(x, y, *, slip):
    out = torch.empty(len(x), len(y), device=x.device)
    grid = (triton.cdiv(len(x), 8), triton.cdiv(len(y), 8))
    slipped_outer_kernel[grid](x, y, out, len(x), len(y), SLIP=slip, BLOCK=8)
    return out


slips(
    "0.5",
    slipped_outer,
    {
        "programs_swapped": "program_id(0) counts tiles of rows, program_id(1) tiles of columns.",
        "rows_masked_only": "The columns have a tail too: mask both sides.",
        "steps_of_rows": "A row of out has `columns` elements: that is the step from row to row.",
        "sum": "You add; the product is asked for.",
    },
)


@answers.alternative("0.5")
def outer_by_rows(x, y):
    out = torch.empty(len(x), len(y), device=x.device)
    for at in range(len(x)):
        grid = (1, triton.cdiv(len(y), 8))
        slipped_outer_kernel[grid](x[at:], y, out[at], 1, len(y), SLIP="", BLOCK=8)
    return out


@triton.jit
def slipped_transpose_kernel(
    x_ptr, out_ptr, rows, columns, SLIP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    if SLIP == "no_mask":
        inside = (row >= 0) & (column >= 0)
    at, to = row * columns + column, column * rows + row
    if SLIP == "not_transposed":
        to = at
    if SLIP == "rows_and_columns_swapped":
        at = column * rows + row
    if SLIP == "steps_of_x":
        to = column * columns + row
    if SLIP == "both_swapped":
        at, to = column * rows + row, row * columns + column
    tl.store(out_ptr + to, tl.load(x_ptr + at, mask=inside), mask=inside)


def slipped_transpose(x, *, slip):
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, 8), triton.cdiv(columns, 8))
    slipped_transpose_kernel[grid](x, out, rows, columns, SLIP=slip, BLOCK=8)
    return out


slips(
    "0.6",
    slipped_transpose,
    {
        "no_mask": "The tiles at the edges have places outside x: mask rows and columns.",
        "not_transposed": "Load and store use the same address, so nothing moves.",
        "rows_and_columns_swapped": "You load from the place in out. x[r, c] is r · columns + c "
        "after x_ptr.",
        "steps_of_x": "A row of out has `rows` elements, so the step between its rows is `rows`.",
        "both_swapped": "Load and store have changed places: x is read by r · columns + c.",
    },
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


@triton.jit
def slipped_softmax_kernel(x_ptr, out_ptr, columns, SLIP: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + column
    inside = column < columns
    if SLIP == "no_other":
        x = tl.load(x_ptr + at, mask=inside)
    else:
        x = tl.load(x_ptr + at, mask=inside, other=0.0 if SLIP == "other_0" else -float("inf"))
    largest = tl.max(x, axis=0)
    if SLIP == "no_maximum":
        largest = 0.0
    weights = tl.exp(x - largest)
    total = tl.sum(weights, axis=0)
    if SLIP == "not_divided":
        total = 1.0
    if SLIP == "loads_twice":
        weights = tl.exp(tl.load(x_ptr + at, mask=inside, other=0.0) - largest)
    tl.store(out_ptr + at, weights / total, mask=inside)


def slipped_softmax(x, *, slip):
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    slipped_softmax_kernel[(len(x),)](x, out, x.shape[1], SLIP=slip, BLOCK=block)
    return out


slips(
    "0.7",
    slipped_softmax,
    {
        "no_other": "Without `other` the padding is garbage, and whatever you do over the row sees it.",
        "other_0": "Padding of 0 counts as exp(0 − max). Which value has an exponential of 0?",
        "no_maximum": "exp(1000) is infinite. Subtract the row's maximum first.",
        "not_divided": "The weights are not divided by their sum.",
        "loads_twice": "The row is in a variable already: do not load it a second time.",
    },
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


from tests.exercises.wrong import l00_tiles  # noqa: E402, F401  registers the rest
