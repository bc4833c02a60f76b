"""Softmax of rows: right, and slower than it has to be. Yours to make faster.

`softmax` is what is checked and counted. Whatever it launches counts.
"""

import torch

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """x, out: [R, columns], contiguous. A program takes a row, BLOCK columns at a time."""
    row = tl.program_id(0) * columns
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf"))
        largest = tl.maximum(largest, x)
    m = tl.max(largest)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf"))
        total += tl.exp(x - m)
    l = tl.sum(total)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf"))
        tl.store(out_ptr + row + at, tl.exp(x - m) / l, mask=at < columns)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """x: [R, C] float32, contiguous, 1 to 4096 columns -> the same, each row's softmax."""
    out = torch.empty_like(x)
    softmax_kernel[(len(x),)](x, out, x.shape[1], BLOCK=128, num_warps=4)
    return out
