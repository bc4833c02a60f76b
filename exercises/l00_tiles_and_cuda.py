# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=00
# Generated from solutions/l00_tiles_and_cuda.py, checksum 8157c29845df. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 00, the second half: tiles and loops in Triton, and two kernels in CUDA C++.

As in the first half you write the kernel, and the function that launches it is given.
"""

import torch
from torch import Tensor

from lessons.l00_gpu_and_triton.cuda_source import run_cuda
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton

# ---------------------------------------------------------------- 0.8


@triton.jit
def long_row_max_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """x: [R, columns], contiguous; out: [R]. Program r walks along row r, BLOCK columns at a
    time.
    """
    raise NotImplementedError("Exercise 0.8: The maximum of a long row, tile by tile")


@exercise("0.8", "The maximum of a long row, tile by tile", minutes=10, difficulty=2)
def long_row_max(x: Tensor) -> Tensor:
    """The largest element of each row. x: [R, C], contiguous -> [R]. Write the body of
    `long_row_max_kernel`.

    A row is longer than a block. Keep a block of the largest values so far, begun with
    `tl.full([BLOCK], value, tl.float32)`, walk along the row with `for first in range(0, columns,
    BLOCK)`, and take `tl.maximum(a, b)` of two blocks. One `tl.max` after the loop is enough. Aim:
    load each element once, at most BLOCK at a time. Errors: none to raise.

    Example, BLOCK = 16: a row of 20 values takes two steps. The second one loads 4 of them.
    """
    out = torch.empty(len(x), device=x.device)
    long_row_max_kernel[(len(x),)](x, out, x.shape[1], BLOCK=16)
    return out


# ---------------------------------------------------------------- 0.9


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, K, N, BLOCK: tl.constexpr):
    """a: [M, K], b: [K, N], out: [M, N], contiguous. Program (i, j) has a square tile of out, and
    walks along a row of tiles of a and down a column of tiles of b.
    """
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    raise NotImplementedError("Exercise 0.9: A matrix product in tiles")


@exercise("0.9", "A matrix product in tiles", minutes=10, difficulty=3)
def product(a: Tensor, b: Tensor) -> Tensor:
    """a · b in float32. a: [M, K], b: [K, N], contiguous; M, K, N are multiples of 16 -> [M, N].
    Finish `product_kernel`: the loop over K, and the store.

    `tl.dot(a, b, input_precision="ieee")` multiplies two tiles. Without the last argument a tensor
    core keeps only 10 of the 23 mantissa bits of a float32. No side of a tile may be shorter
    than 16. All sides are multiples of BLOCK, so no mask is needed. Errors: none to raise.

    Example: [2, 32] would be too small for `tl.dot`. With M = N = 16 and K = 32 there is one
    program, and it adds up two products of tiles. a = all 1, b = all 1 -> all 32.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, device=a.device)
    product_kernel[(rows // 16, columns // 16)](a, b, out, inner, columns, BLOCK=16)
    return out


# ---------------------------------------------------------------- 0.10


@triton.jit
def any_product_kernel(a_ptr, b_ptr, out_ptr, M, K, N, BLOCK: tl.constexpr):
    """a: [M, K], b: [K, N], out: [M, N], contiguous. As `product_kernel`, for any M, K and N."""
    raise NotImplementedError("Exercise 0.10: A matrix product with tails on three sides")


@exercise("0.10", "A matrix product with tails on three sides", minutes=10, difficulty=3)
def any_product(a: Tensor, b: Tensor) -> Tensor:
    """a · b in float32. a: [M, K], b: [K, N], contiguous, any sizes from 1 on -> [M, N]. Write the
    body of `any_product_kernel`; begin with a copy of yours of 0.9.

    Three sides have a tail now, and each tensor has two of them. The tail of K is the one that can
    spoil a result: both tiles have it, and what is loaded there is multiplied and added.
    Errors: none to raise.

    Example: a: [1, 3] = [[1, 2, 3]], b: [3, 1] = all 1 -> [[6]]. The one program loads 3 of the 256
    places of a's tile, 3 of b's, and stores 1.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, device=a.device)
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 16))
    any_product_kernel[grid](a, b, out, rows, inner, columns, BLOCK=16)
    return out


# ---------------------------------------------------------------- CUDA C++


@exercise("0.11", "CUDA C++: shared memory needs barriers", minutes=10, difficulty=2)
def block_sum(x: Tensor) -> Tensor:
    """The sum of x: [256] -> [1], by one block of 256 threads.

    Each thread puts one element into shared memory. Then half of the threads add the other half's
    elements to theirs, then a quarter, and so on: 256 -> 128 -> … -> 1. A thread reads what
    *another* thread has written, so it has to wait. `__syncthreads()` is a barrier: no thread of
    the block goes on before all have arrived. *All* must arrive, so a barrier inside `if (thread <
    …)` hangs. Put barriers where they are needed, and nothing else. Errors: none to raise.

    Example: x = all 1: after the first step the places 0 to 127 hold 2, after the eighth place 0
    holds 256.
    """
    raise NotImplementedError("Exercise 0.11: CUDA C++: shared memory needs barriers")
    source = r"""
    extern "C" __global__ void block_sum(const float* x, float* out) {
        __shared__ float part[256];
        int thread = threadIdx.x;
        part[thread] = x[thread];
        for (int half = 128; half > 0; half /= 2) {
            if (thread < half) part[thread] += part[thread + half];
        }
        if (thread == 0) out[0] = part[0];
    }
    """
    out = torch.empty(1, device=x.device)
    run_cuda(source, "block_sum", 1, 256, x, out)
    return out


@exercise("0.12", "CUDA C++: a warp adds up without memory", minutes=10, difficulty=2)
def warp_sums(x: Tensor) -> Tensor:
    """The sum of each row, in every place of the row. x: [R, 32] -> [R, 32], one warp a row.

    The 32 lanes of a warp can read each other's registers. `__shfl_xor_sync(0xffffffff, sum,
    distance)` gives lane l the `sum` of lane l ^ distance (exclusive or): with distance 1 the lanes
    0 and 1 swap, 2 and 3 swap, and so on. No shared memory and no barrier is needed. Write the
    loop: five steps, after which every lane holds the sum of all 32. Errors: none to raise.

    Example: lanes 0 to 3 hold 1, 2, 3, 4. Distance 2: 4, 6, 4, 6. Distance 1: 10, 10, 10, 10.
    """
    raise NotImplementedError("Exercise 0.12: CUDA C++: a warp adds up without memory")
    source = r"""
    extern "C" __global__ void warp_sums(const float* x, float* out) {
        int at = blockIdx.x * 32 + threadIdx.x;
        float sum = x[at];
        // your loop
        out[at] = sum;
    }
    """
    out = torch.empty_like(x)
    run_cuda(source, "warp_sums", len(x), 32, x, out)
    return out
