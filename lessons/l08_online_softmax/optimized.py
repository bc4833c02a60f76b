"""Softmax over rows of any length, one program a row: a short row is read once, a long one twice
instead of three times.

Read `block_softmax_kernel` (lesson 2's, with its log-sum-exp), then `online_softmax_kernel`: a
tile's columns are as many small rows, each with its own m and l, and one merge at the end makes
them one. partials.py carries the values along and merges splits.

Sources: Milakov & Gimelshein 2018, algorithm 3 (one pass for m and l) and section 3.1 (their merge
in parallel).
"""

import torch
from torch import Tensor

from lessons.toolbox.kernels.triton_ import tl, triton

MAX_BLOCK = 32768  # columns that a program of 32 warps holds in registers: 32 a thread
TILE_BYTES = 16384  # of a longer row: 16 bytes for each of 1024 threads
TILE_STAGES = 3  # tiles on their way while one is summed
# that softmax_torch works on at once: 256 KiB in float32, which stay in a core's cache
CACHE_SCORES = 2**16
# below every score, and finite, so that −inf − LOWEST is no NaN
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def block_softmax_kernel(
    scores_ptr, probs_ptr, lse_ptr, num_columns, stride_row, BLOCK_N: tl.constexpr
):
    """One program per row that fits into its registers: read once, written once. scores: [R, N] ->
    probs [R, N], lse [R].
    """
    # int64, because row · stride passes 2^31 at 16384 rows of 131072 columns
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    inside = column < num_columns
    scores = tl.load(scores_ptr + row * stride_row + column, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    m = tl.maximum(tl.max(scores, axis=0), LOWEST)
    weights = tl.exp(scores - m)
    l = tl.sum(weights, axis=0)
    share = 1.0 / tl.where(l == 0.0, 1.0, l)  # a row of −inf alone: 0 · 1 instead of 0 / 0
    tl.store(
        probs_ptr + row * num_columns + column,
        (weights * share).to(probs_ptr.dtype.element_ty),
        mask=inside,
    )
    tl.store(lse_ptr + row, m + tl.log(l))


@triton.jit
def online_softmax_kernel(
    scores_ptr,
    probs_ptr,
    lse_ptr,
    num_columns,
    stride_row,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row of any length: a pass for m and l, a pass that divides. scores: [R, N] ->
    probs [R, N], lse [R].
    """
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride_row
    probs_ptr += row * num_columns
    lane = tl.arange(0, BLOCK_N)
    whole = num_columns // BLOCK_N * BLOCK_N
    inside = lane < num_columns - whole

    # Pass 1. Lane j sees the columns j, j + BLOCK_N, …: no lane waits for another before the end.
    m = tl.full((BLOCK_N,), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_N,), tl.float32)
    # no mask here: under one, loads are 2 bytes wide
    for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        m, l = seen_too(m, l, tl.load(scores_ptr + start + lane).to(tl.float32))
    tail = tl.load(scores_ptr + whole + lane, mask=inside, other=float("-inf")).to(tl.float32)
    m, l = seen_too(m, l, tail)
    row_m = tl.max(m, axis=0)
    row_l = tl.sum(l * tl.exp(m - row_m), axis=0)
    tl.store(lse_ptr + row, row_m + tl.log(row_l))

    # Pass 2, backwards, because what pass 1 read last is still in the cache.
    share = 1.0 / tl.where(row_l == 0.0, 1.0, row_l)
    tl.store(
        probs_ptr + whole + lane,
        (tl.exp(tail - row_m) * share).to(probs_ptr.dtype.element_ty),
        mask=inside,
    )
    for done in tl.range(BLOCK_N, whole + BLOCK_N, BLOCK_N, num_stages=STAGES):
        column = whole - done + lane
        scores = tl.load(scores_ptr + column).to(tl.float32)
        tl.store(
            probs_ptr + column, (tl.exp(scores - row_m) * share).to(probs_ptr.dtype.element_ty)
        )


@triton.jit
def seen_too(m, l, score):
    """m and l of each lane after one more score: all [BLOCK_N]."""
    # Of exp(m − m_new) and exp(score − m_new) one is exp(0) = 1, so a single exponential serves
    # both cases.
    rise = score - m
    shrink = tl.exp(-tl.abs(rise))
    return tl.maximum(m, score), tl.where(rise > 0, l * shrink + 1.0, l + shrink)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """softmax of each row and its log-sum-exp. scores: [R, N] -> probs [R, N] of the same dtype,
    lse [R] float32.

    float32 inside. A row of −inf alone gives zeros and −inf. The kernel depends on N alone, so a
    row's bits do not depend on how many others there are. Raises ValueError for other shapes,
    dtypes, or rows that are not dense.
    """
    check_rows(scores)
    num_rows, num_columns = scores.shape
    probs, lse = empty_results(scores)
    if not num_columns:
        return probs, lse.fill_(-torch.inf)
    if num_rows and num_columns <= MAX_BLOCK:
        block_n = triton.next_power_of_2(num_columns)
        block_softmax_kernel[num_rows,](
            scores,
            probs,
            lse,
            num_columns,
            scores.stride(0),
            BLOCK_N=block_n,
            num_warps=warps_for(block_n),
        )
    elif num_rows:
        online_softmax_kernel[num_rows,](
            scores,
            probs,
            lse,
            num_columns,
            scores.stride(0),
            num_warps=32,
            BLOCK_N=TILE_BYTES // scores.element_size(),
            STAGES=TILE_STAGES,
        )
    return probs, lse


def softmax_torch(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax` in PyTorch, for machines without a GPU: a few rows at a time, whose later passes
    find them in the cache.

    scores: [R, N] -> probs [R, N] of the same dtype, lse [R] float32. Raises ValueError as
    `softmax` does.
    """
    check_rows(scores)
    probs, lse = empty_results(scores)
    if not scores.shape[1]:
        return probs, lse.fill_(-torch.inf)
    step = max(1, CACHE_SCORES // scores.shape[1])
    for rows, out, sums in zip(scores.split(step), probs.split(step), lse.split(step)):
        m = rows.float().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        weights = torch.sub(rows, m).exp_()
        l = weights.sum(-1, keepdim=True)
        torch.add(m, l.log(), out=sums[:, None])
        out.copy_(weights.mul_(l.masked_fill(l == 0, 1).reciprocal_()))
    return probs, lse


def warps_for(block_n: int) -> int:
    """Warps of a program that holds a whole row of block_n scores: 512 a warp are 16 a thread, up
    to 32 warps.
    """
    return min(32, max(1, block_n // 512))


def check_rows(
    scores: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
) -> None:
    """Raise ValueError unless scores: [R, N] has one of the dtypes and dense rows."""
    if scores.ndim != 2 or scores.dtype not in dtypes or scores.device.type == "meta":
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"scores: got {scores.dtype} {tuple(scores.shape)} on {scores.device}; accepted: [R, "
            f"N] in {names}, "
            "with data"
        )
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise ValueError(
            f"scores: got strides {scores.stride()}; accepted: dense rows, stride 1 in "
            f"the last dimension"
        )


def empty_results(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Where a kernel writes. scores: [R, N] -> probs [R, N] like scores, lse [R] float32, both
    dense.
    """
    return (
        torch.empty(scores.shape, dtype=scores.dtype, device=scores.device),
        torch.empty(len(scores), dtype=torch.float32, device=scores.device),
    )
