"""Wrong answers to lesson 00's puzzles, continued: loops over tiles, products, CUDA C++."""

from functools import partial

import torch

from lessons.l00_gpu_and_triton.cuda_source import run_cuda
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong.l00 import answers, slips

# ---------------------------------------------------------------- 0.8


@triton.jit
def slipped_maximum_kernel(x_ptr, out_ptr, columns, SLIP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    begin = -float("inf")
    if SLIP == "begins_at_0":
        begin = 0.0
    largest = tl.full([BLOCK], begin, tl.float32)
    end = columns
    if SLIP == "first_tile_only":
        end = BLOCK
    if SLIP == "tail_forgotten":
        end = columns // BLOCK * BLOCK
    for first in range(0, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        other = 0.0 if SLIP == "other_0" else -float("inf")
        inside = (column < columns) | (SLIP == "no_mask")
        x = tl.load(x_ptr + row * columns + column, mask=inside, other=other)
        if SLIP == "last_tile_only":
            largest = x
        else:
            largest = tl.maximum(largest, x)
    tl.store(out_ptr + row, tl.max(largest, axis=0))


def slipped_maximum(x, *, slip, block=16):
    out = torch.empty(len(x), device=x.device)
    slipped_maximum_kernel[(len(x),)](x, out, x.shape[1], SLIP=slip, BLOCK=block)
    return out


slips(
    "0.8",
    slipped_maximum,
    {
        "begins_at_0": "You begin with 0, and 0 is larger than every negative number.",
        "other_0": "Padding of 0 wins over negative numbers. Which value never wins?",
        "first_tile_only": "The loop ends after the first tile.",
        "last_tile_only": "Each tile replaces the one before: take tl.maximum of both.",
        "tail_forgotten": "The loop skips the last columns, which fill no whole tile.",
        "no_mask": "The last tile is longer than what is left of the row: mask it.",
    },
)
answers.wrong(
    "0.8", "You load the whole row at once. Walk along it in steps of BLOCK.", "one_load"
)(partial(slipped_maximum, slip="", block=64))


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


@triton.jit
def slipped_product_kernel(a_ptr, b_ptr, out_ptr, M, K, N, SLIP: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, BLOCK if SLIP == "one_step" else K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        if SLIP == "same_tile":
            k = tl.arange(0, BLOCK)
        inside_a = (m[:, None] < M) & (k[None, :] < K)
        inside_b = (k[:, None] < K) & (n[None, :] < N)
        if SLIP == "tail_of_k_not_masked":
            inside_a = (m[:, None] < M) & (k[None, :] >= 0)
        if SLIP == "no_mask_of_b":
            inside_b = (k[:, None] >= 0) & (n[None, :] >= 0)
        step = N if SLIP == "steps_of_n" else K
        at_a = m[:, None] * step + k[None, :]
        at_b = k[:, None] * N + n[None, :]
        if SLIP == "b_transposed":
            at_b = n[:, None] * N + k[None, :]
        if SLIP == "no_other":
            a = tl.load(a_ptr + at_a, mask=inside_a)
            b = tl.load(b_ptr + at_b, mask=inside_b)
        else:
            a = tl.load(a_ptr + at_a, mask=inside_a, other=1.0 if SLIP == "other_1" else 0.0)
            b = tl.load(b_ptr + at_b, mask=inside_b, other=1.0 if SLIP == "other_1" else 0.0)
        if SLIP == "tf32":
            product = tl.dot(a, b)
        else:
            product = tl.dot(a, b, input_precision="ieee")
        if SLIP == "not_added_up":
            total = product
        else:
            total += product
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SLIP == "out_not_masked":
        inside = (m[:, None] >= 0) & (n[None, :] >= 0)
    if SLIP == "out_transposed":
        tl.store(out_ptr + n[None, :] * M + m[:, None], total, mask=inside)
    else:
        tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=inside)


def slipped_product(a, b, *, slip):
    (rows, inner), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, device=a.device)
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 16))
    slipped_product_kernel[grid](a, b, out, rows, inner, columns, SLIP=slip, BLOCK=16)
    return out


TF32 = 'The error is about a thousandth: tl.dot rounded its inputs to tf32. Say input_precision="ieee".'
slips(
    "0.9",
    slipped_product,
    {
        "tf32": TF32,
        "not_added_up": "Each step replaces `total`: the products of all steps are added.",
        "one_step": "The loop takes one tile of K. Walk on in steps of BLOCK up to K.",
        "same_tile": "Every step loads the same tiles: `first` belongs into k.",
        "steps_of_n": "A row of a has K elements: that is the step from row to row, not N.",
        "b_transposed": "You load b's tile with rows and columns swapped.",
        "out_transposed": "You store the tile with rows and columns swapped.",
    },
)
slips(
    "0.10",
    slipped_product,
    {
        "tail_of_k_not_masked": "The mask of a forgets the tail of K, and reads the next row there.",
        "no_mask_of_b": "b's tile has places outside b: mask k and n.",
        "no_other": "Masked places hold garbage, and garbage times 0 may be NaN: other=0.0.",
        "other_1": "Padding of 1 times 1 is added to the result. Which number adds nothing?",
        "out_not_masked": "The store needs a mask of m and n.",
        "not_added_up": "Each step replaces `total`: the products of all steps are added.",
        "tf32": TF32,
    },
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

BLOCK_SUM = r"""
extern "C" __global__ void block_sum(const float* x, float* out) {
    __shared__ float part[256];
    int thread = threadIdx.x;
    part[thread] = x[thread];
    BEFORE
    for (int half = 128; half > 0; half /= 2) {
        if (thread < half) { part[thread] += part[thread + half]; INSIDE }
        BEHIND
    }
    if (thread == 0) out[0] = part[0];
}
"""


def slipped_block_sum(x, *, before="", inside="", behind=""):
    out = torch.empty(1, device=x.device)
    source = BLOCK_SUM.replace("BEFORE", before).replace("INSIDE", inside)
    run_cuda(source.replace("BEHIND", behind), "block_sum", 1, 256, x, out)
    return out


SYNC = "__syncthreads();"
for name, places, hint in [
    (
        "no_barrier",
        {},
        "There is no barrier: a thread reads what another thread may not have written yet.",
    ),
    (
        "before_the_loop_only",
        {"before": SYNC},
        "In each step a thread reads what another thread wrote in the step before: a barrier a step.",
    ),
    (
        "in_the_loop_only",
        {"behind": SYNC},
        "The first step reads what other threads have just put into shared memory: wait before it.",
    ),
    (
        "barrier_inside_the_if",
        {"before": SYNC, "inside": SYNC},
        "Only threads below `half` reach your barrier. All threads of the block must reach it.",
    ),
    (
        "warp_barrier",
        {"before": "__syncwarp();", "behind": "__syncwarp();"},
        "__syncwarp() makes 32 threads wait for each other. The block has 256.",
    ),
]:
    answers.wrong("0.11", hint, name)(partial(slipped_block_sum, **places))
answers.alternative("0.11")(
    partial(slipped_block_sum, before=SYNC, behind=SYNC + " // one barrier a step")
)

WARP_SUMS = r"""
extern "C" __global__ void warp_sums(const float* x, float* out) {
    int at = blockIdx.x * 32 + threadIdx.x;
    float sum = x[at];
    LOOP
    out[at] = sum;
}
"""


def slipped_warp_sums(x, *, loop):
    out = torch.empty_like(x)
    run_cuda(WARP_SUMS.replace("LOOP", loop), "warp_sums", len(x), 32, x, out)
    return out


ALL = "0xffffffff"
HALVING = "for (int distance = 16; distance > 0; distance /= 2)"
for name, loop, hint in [
    (
        "four_steps",
        f"for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync({ALL}, sum, d);",
        "The distances begin at 8, so each half of the warp has a sum of its own. Begin at 16.",
    ),
    (
        "distances_in_ones",
        f"for (int d = 5; d > 0; d--) sum += __shfl_xor_sync({ALL}, sum, d);",
        "The distances are 16, 8, 4, 2, 1: halves, not steps of one.",
    ),
    (
        "downwards",
        f"{HALVING} sum += __shfl_down_sync({ALL}, sum, distance);",
        "__shfl_down_sync gives the whole sum to lane 0 alone. With xor all lanes get it.",
    ),
    (
        "replaced",
        f"{HALVING} sum = __shfl_xor_sync({ALL}, sum, distance);",
        "You replace your own sum by the other lane's: add it.",
    ),
]:
    answers.wrong("0.12", hint, name)(partial(slipped_warp_sums, loop=loop))
answers.alternative("0.12")(
    partial(
        slipped_warp_sums,
        loop=f"for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync({ALL}, sum, d);",
    )
)
