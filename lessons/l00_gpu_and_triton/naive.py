"""What a GPU does, as loops in PyTorch: the grid of programs becomes a Python loop, and each
program works on whole blocks of indices.

Read it beside optimized.py. There the loop over programs is gone, because the GPU runs all of them
at once, in any order. Everything inside the loop stays, line by line.
"""

import math

import torch
from torch import Tensor


def scale(x: Tensor, factor: float, block: int = 16) -> Tensor:
    """factor · x, one program for each block. x: [n] -> [n]."""
    n = len(x)
    out = torch.empty_like(x)
    for program in range(math.ceil(n / block)):
        start = program * block
        at = start + torch.arange(block)
        inside = at < n
        values = load(x, at, inside, other=0.0)
        result = factor * values
        store(out, at, result, inside)
    return out


def row_max(x: Tensor) -> Tensor:
    """The largest element of each row, one program for each row. x: [R, C] -> [R]."""
    rows, columns = x.shape
    stride_row, stride_column = x.stride()
    memory = flat(x)
    block = next_power_of_2(columns)
    out = torch.empty(rows, dtype=x.dtype)
    for row in range(rows):
        column = torch.arange(block)
        inside = column < columns
        start = row * stride_row
        at = start + column * stride_column
        values = load(memory, at, inside, other=-math.inf)
        out[row] = values.max()
    return out


def column_sums(
    x: Tensor,
    block_rows: int = 16,
    block_columns: int = 16,
) -> Tensor:
    """The sum of each column in float32. A program has a few columns and walks down all rows, tile
    by tile. x: [R, C], contiguous -> [C].
    """
    rows, columns = x.shape
    memory = x.view(-1)
    out = torch.empty(columns)
    for program in range(math.ceil(columns / block_columns)):
        start = program * block_columns
        column = start + torch.arange(block_columns)
        in_columns = column < columns
        total = torch.zeros(block_columns)
        for first in range(0, rows, block_rows):
            row = first + torch.arange(block_rows)
            in_rows = row < rows
            inside = in_rows[:, None] & in_columns[None, :]
            row_start = row * columns
            at = row_start[:, None] + column[None, :]
            tile = load(memory, at, inside, other=0.0)
            wide = tile.float()
            total += wide.sum(dim=0)
        store(out, column, total, in_columns)
    return out


def every_nth(
    x: Tensor,
    stride: int,
    count: int,
    block: int = 1024,
) -> Tensor:
    """x[0], x[stride], x[2 · stride], … : [count]. x: [n], n > (count − 1) · stride."""
    out = torch.empty(count, dtype=x.dtype)
    for program in range(math.ceil(count / block)):
        start = program * block
        at = start + torch.arange(block)
        inside = at < count
        source = at * stride
        values = load(x, source, inside, other=0.0)
        store(out, at, values, inside)
    return out


def tile_product(
    a: Tensor,
    b: Tensor,
    input_precision: str = "ieee",
) -> Tensor:
    """a · b of one tile each, in one program. a: [M, K], b: [K, N], contiguous, float32, 16 or more
    everywhere -> [M, N]. With "tf32" the inputs lose their last 13 bits, as in a tensor core.
    """
    if input_precision == "tf32":
        a = without_low_bits(a)
        b = without_low_bits(b)
    exact = a.double() @ b.double()
    return exact.float()


# ---------------------------------------------------------------- memory, as a kernel sees it


def load(
    memory: Tensor,
    at: Tensor,
    inside: Tensor,
    other: float,
) -> Tensor:
    """memory[at] where inside, else `other`. memory: [n]; at, inside: [...] -> [...]."""
    values = torch.full(at.shape, other, dtype=memory.dtype)
    places = at[inside]
    values[inside] = memory[places]
    return values


def store(
    memory: Tensor,
    at: Tensor,
    values: Tensor,
    inside: Tensor,
) -> None:
    """memory[at] = values where inside. memory: [n]; at, values, inside: [...]."""
    places = at[inside]
    memory[places] = values[inside]


def flat(x: Tensor) -> Tensor:
    """All memory from a view's first element on: [n]. A kernel gets the same address."""
    storage = x.untyped_storage()
    in_storage = storage.nbytes() // x.itemsize
    remaining = in_storage - x.storage_offset()
    return x.as_strided((remaining,), (1,))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: the length of a block that holds a row."""
    power = 1
    while power < n:
        power *= 2
    return power


def without_low_bits(x: Tensor) -> Tensor:
    """float32 as tf32 sees it: 10 of the 23 mantissa bits are kept. x: [...] -> [...]."""
    bits = x.view(torch.int32)
    kept = bits & ~0x1FFF
    return kept.view(torch.float32)
