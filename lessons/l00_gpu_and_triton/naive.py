"""What a GPU does, as loops in PyTorch: the grid of programs becomes a Python loop, and each program
works on whole blocks of indices.

Read it beside optimized.py. There the loop over programs is gone, because the GPU runs all of them
at once, in any order. Everything inside the loop stays, line by line.
"""

import math

import torch
from torch import Tensor


def scale(x: Tensor, factor: float, block: int = 16) -> Tensor:
    """factor · x, one program for each block. x: [n] -> [n]."""
    out = torch.empty_like(x)
    for program in range(math.ceil(len(x) / block)):
        at = program * block + torch.arange(block)
        inside = at < len(x)
        values = load(x, at, inside, other=0.0)
        store(out, at, factor * values, inside)
    return out


def row_max(x: Tensor) -> Tensor:
    """The largest element of each row, one program for each row. x: [R, C] -> [R]."""
    out = torch.empty(len(x), dtype=x.dtype)
    rows, columns = x.shape
    memory, block = flat(x), next_power_of_2(columns)
    for program in range(rows):
        column = torch.arange(block)
        inside = column < columns
        at = program * x.stride(0) + column * x.stride(1)
        values = load(memory, at, inside, other=-math.inf)
        store(out, torch.tensor([program]), values.max(), torch.tensor([True]))
    return out


def column_sums(x: Tensor, block_rows: int = 16, block_columns: int = 16) -> Tensor:
    """The sum of each column in float32. A program has a few columns and walks down all rows, tile
    by tile. x: [R, C], contiguous -> [C].
    """
    rows, columns = x.shape
    memory, out = x.view(-1), torch.empty(columns)
    for program in range(math.ceil(columns / block_columns)):
        column = program * block_columns + torch.arange(block_columns)
        total = torch.zeros(block_columns)
        for first in range(0, rows, block_rows):
            row = first + torch.arange(block_rows)
            inside = (row[:, None] < rows) & (column[None, :] < columns)
            at = row[:, None] * columns + column[None, :]
            tile = load(memory, at, inside, other=0.0)
            total += tile.float().sum(dim=0)
        store(out, column, total, column < columns)
    return out


def every_nth(x: Tensor, stride: int, count: int, block: int = 1024) -> Tensor:
    """x[0], x[stride], x[2 · stride], … : [count]. x: [n], n > (count − 1) · stride."""
    out = torch.empty(count, dtype=x.dtype)
    for program in range(math.ceil(count / block)):
        at = program * block + torch.arange(block)
        inside = at < count
        values = load(x, at * stride, inside, other=0.0)
        store(out, at, values, inside)
    return out


def tile_product(a: Tensor, b: Tensor, input_precision: str = "ieee") -> Tensor:
    """a · b of one tile each, in one program. a: [M, K], b: [K, N], contiguous, float32, 16 or more
    everywhere -> [M, N]. With "tf32" the inputs lose their last 13 bits, as in a tensor core.
    """
    if input_precision == "tf32":
        a, b = without_low_bits(a), without_low_bits(b)
    return (a.double() @ b.double()).float()


# ---------------------------------------------------------------- memory, as a kernel sees it


def load(memory: Tensor, at: Tensor, inside: Tensor, other: float) -> Tensor:
    """memory[at] where inside, else `other`. memory: [n]; at, inside: [...] -> [...]."""
    values = torch.full(at.shape, other, dtype=memory.dtype)
    values[inside] = memory[at[inside]]
    return values


def store(memory: Tensor, at: Tensor, values: Tensor, inside: Tensor) -> None:
    """memory[at] = values where inside. memory: [n]; at, values, inside: [...]."""
    memory[at[inside]] = values.expand(at.shape)[inside]


def flat(x: Tensor) -> Tensor:
    """All memory behind a view, from its first element on: [n]. A kernel gets the same address."""
    size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.as_strided((size,), (1,))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: the length of a block that holds a row."""
    return 1 << max(n - 1, 0).bit_length()


def without_low_bits(x: Tensor) -> Tensor:
    """float32 as tf32 sees it: 10 bits behind the point in place of 23. x: [...] -> [...]."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
