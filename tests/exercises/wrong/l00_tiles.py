"""Wrong answers to lesson 00's puzzles, continued: loops over tiles, products, CUDA C++."""

import torch

from lessons.l00_gpu_and_triton.cuda_source import run_cuda
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong.attacks import attacks, cuda_attacks
from tests.exercises.wrong.l00 import answers

# ---------------------------------------------------------------- 0.8

answers.slips(
    "0.8",
    """
    begins_at_0: You begin with 0, and 0 is larger than every negative number.
    - tl.full([BLOCK], -float("inf"), tl.float32)
    + tl.zeros([BLOCK], tl.float32)

    begins_at_minus_1e9: A row may be smaller still: only minus infinity is below every number.
    - tl.full([BLOCK], -float("inf"), tl.float32)
    + tl.full([BLOCK], -1e9, tl.float32)

    other_0: Padding of 0 wins over negative numbers. Which value never wins?
    - other=-float("inf")
    + other=0.0

    first_tile_only: The loop ends after the first tile.
    - range(0, columns, BLOCK):
    + range(0, BLOCK, BLOCK):

    last_tile_only: Each tile replaces the one before: take tl.maximum of both.
    - tl.maximum(largest, x)
    + x

    tail_forgotten: The loop skips the last columns, which fill no whole tile.
    - range(0, columns, BLOCK):
    + range(0, columns // BLOCK * BLOCK, BLOCK):

    no_mask: The last tile is longer than what is left of the row: mask it.
    - mask=column < columns
    + mask=column >= 0

    one_load: You load the whole row at once. Walk along it in steps of BLOCK.
    - BLOCK=16
    + BLOCK=64
    """,
)


@answers.alternative("0.8")
def one_number_at_a_time(x):
    out = torch.empty(len(x), device=x.device)
    scalar_kernel[(len(x),)](x, out, x.shape[1], BLOCK=8)
    return out


@triton.jit
def scalar_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    largest = -float("inf")
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(x, axis=0))
    tl.store(out_ptr + row, largest)


# ---------------------------------------------------------------- 0.9 and 0.10

answers.slips(
    "0.9",
    """
    tf32: The error is about a thousandth: tl.dot rounded its inputs to tf32. Say
        input_precision="ieee".
    - tl.dot(a, b, input_precision="ieee")
    - tl.store
    + tl.dot(a, b)
    + tl.store

    not_added_up: Each step replaces `total`: the products of all steps are added.
    - total += tl.dot
    + total = tl.dot

    one_step: The loop takes one tile of K. Walk on in steps of BLOCK up to K.
    - range(0, K, BLOCK)
    + range(0, BLOCK, BLOCK)

    same_tile: Every step loads the same tiles: `first` belongs into k.
    - k = first + tl.arange
    + k = tl.arange

    steps_of_n: A row of a has K elements: that is the step from row to row, not N.
    - m[:, None] * K
    + m[:, None] * N

    b_transposed: You load b's tile with rows and columns swapped.
    - k[:, None] * N + n[None, :]
    + n[:, None] * N + k[None, :]

    out_transposed: You store the tile with rows and columns swapped.
    - out_ptr + m[:, None] * N + n[None, :]
    + out_ptr + n[None, :] * tl.num_programs(0) * BLOCK + m[:, None]
    """,
)


answers.slips(
    "0.10",
    """
    tail_of_k_not_masked: The mask of a forgets the tail of K, and reads the next row there.
    - (k[None, :] < K)
    + (k[None, :] >= 0)

    no_mask_of_b: b's tile has places outside b: mask k and n.
    - (k[:, None] < K) & (n[None, :] < N)
    + (k[:, None] >= 0) & (n[None, :] >= 0)

    no_other: Masked places hold garbage, and garbage times 0 may be NaN: other=0.0.
    - mask=inside_a, other=0.0
    + mask=inside_a
    - mask=inside_b, other=0.0
    + mask=inside_b

    other_1: Padding of 1 times 1 is added to the result. Which number adds nothing?
    - mask=inside_a, other=0.0
    + mask=inside_a, other=1.0
    - mask=inside_b, other=0.0
    + mask=inside_b, other=1.0

    out_not_masked: The store needs a mask of m and n.
    - inside = (m[:, None] < M) & (n[None, :] < N)
    + inside = (m[:, None] >= 0) & (n[None, :] >= 0)

    not_added_up: Each step replaces `total`: the products of all steps are added.
    - total += tl.dot
    + total = tl.dot

    tf32: The error is about a thousandth: tl.dot rounded its inputs to tf32. Say
        input_precision="ieee".
    - tl.dot(a, b, input_precision="ieee")
    + tl.dot(a, b)
    """,
)


@triton.jit
def summing_kernel(a_ptr, b_ptr, out_ptr, M, K, N, BLOCK: tl.constexpr):
    """No tl.dot: an outer product for each k."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K):
        a = tl.load(a_ptr + m * K + k, mask=m < M, other=0.0)
        b = tl.load(b_ptr + k * N + n, mask=n < N, other=0.0)
        total += a[:, None] * b[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=inside)


@answers.alternative("0.9")
@answers.alternative("0.10")
def product_of_columns(a, b):
    (rows, inner), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, device=a.device)
    grid = (triton.cdiv(rows, 8), triton.cdiv(columns, 8))
    summing_kernel[grid](a, b, out, rows, inner, columns, BLOCK=8)
    return out


# ---------------------------------------------------------------- 0.11 and 0.12

answers.slips(
    "0.11",
    """
    no_barrier: There is no barrier: a thread reads what another thread may not have written yet.
    = before_the_loop_only, in_the_loop_only

    before_the_loop_only: In each step a thread reads what another thread wrote in the step before:
        a barrier a step.
    - part[thread] += part[thread + half];
    - __syncthreads();
    + part[thread] += part[thread + half];

    in_the_loop_only: The first step reads what other threads have just put into shared memory: wait
        before it.
    - part[thread] = x[thread];
    - __syncthreads();
    + part[thread] = x[thread];

    barrier_inside_the_if: Only threads below `half` reach your barrier. All threads of the block
        must reach it.
    - if (thread < half) part[thread] += part[thread + half];
    - __syncthreads();
    + if (thread < half) { part[thread] += part[thread + half]; __syncthreads(); }

    warp_barrier: __syncwarp() makes 32 threads wait for each other. The block has 256.
    - part[thread] = x[thread];
    - __syncthreads();
    + part[thread] = x[thread];
    + __syncwarp();
    - part[thread] += part[thread + half];
    - __syncthreads();
    + part[thread] += part[thread + half];
    + __syncwarp();
    """,
)


@answers.alternative("0.11")
def block_sum_in_braces(x):
    source = r"""
extern "C" __global__ void block_sum(const float* x, float* out) {
    __shared__ float part[256];
    int thread = threadIdx.x;
    part[thread] = x[thread];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (thread < half) { part[thread] += part[thread + half]; }
        __syncthreads(); // one barrier a step
    }
    if (thread == 0) out[0] = part[0];
}
"""
    out = torch.empty(1, device=x.device)
    run_cuda(source, "block_sum", 1, 256, x, out)
    return out


answers.slips(
    "0.12",
    """
    four_steps: The distances begin at 8, so each half of the warp has a sum of its own. Begin at
        16.
    - distance = 16;
    + distance = 8;

    distances_in_ones: The distances are 16, 8, 4, 2, 1: halves, not steps of one.
    - int distance = 16; distance > 0; distance /= 2
    + int distance = 5; distance > 0; distance--

    downwards: __shfl_down_sync gives the whole sum to lane 0 alone. With xor all lanes get it.
    - sum += __shfl_xor_sync(
    + sum += __shfl_down_sync(

    replaced: You replace your own sum by the other lane's: add it.
    - sum += __shfl_xor_sync(
    + sum = __shfl_xor_sync(
    """,
)


@answers.alternative("0.12")
def warp_sums_from_small_to_large(x):
    source = r"""
extern "C" __global__ void warp_sums(const float* x, float* out) {
    int at = blockIdx.x * 32 + threadIdx.x;
    float sum = x[at];
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    out[at] = sum;
}
"""
    out = torch.empty_like(x)
    run_cuda(source, "warp_sums", len(x), 32, x, out)
    return out


# ---------------------------------------------------------------- without a kernel

attacks(answers, "0.8", lambda x: x.amax(dim=1))
attacks(answers, "0.9", lambda a, b: (a.double() @ b.double()).float())
attacks(answers, "0.10", lambda a, b: (a.double() @ b.double()).float())
cuda_attacks(answers, "0.11", lambda x: x.sum()[None])
cuda_attacks(answers, "0.12", lambda x: x.sum(dim=1, keepdim=True).repeat(1, 32))
