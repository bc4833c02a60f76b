"""The honest timer, and the first Triton kernel: it copies and scales a tensor as fast as memory
allows.

Read `honest_ms` beside `naive.stopwatch_ms`, then `scale_copy_kernel`, then its wrapper
`scale_copy`. The toolbox's timer does the same with CUDA events, a flushed L2 and a check against
the physical floor; use that one to publish.
"""

import time
from collections.abc import Callable
from statistics import quantiles
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.toolbox.kernels.triton_ import tl, triton

TILE_BYTES = 8192  # of one program: 4 vectors of 16 bytes a thread, so that loads overlap


class Timing(NamedTuple):
    """Milliseconds: the median of the repetitions, and the band that holds their middle 60 %."""

    median: float
    p20: float
    p80: float


def honest_ms(
    launch: Callable[[], object],
    synchronize: Callable[[], object],
    warmup: int = 3,
    repetitions: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Milliseconds that the work of one `launch` takes, from an idle device to an idle device.

    synchronize: returns when the device is idle; clock: seconds. Raises ValueError for fewer than 2
    repetitions.
    """
    # One number has no spread, and without its spread a number cannot be compared.
    if repetitions < 2:
        raise ValueError(f"repetitions is {repetitions}; accepted: 2 or more")
    # The first call compiles, allocates and fills caches, so it says nothing of later ones.
    for _ in range(warmup):
        launch()
    times = []
    for _ in range(repetitions):
        # Before the start as well, because work queued earlier would be charged to us.
        synchronize()
        start = clock()
        launch()
        synchronize()
        times.append((clock() - start) * 1e3)
    # There are nine deciles: p20 is the second, the median the fifth.
    deciles = quantiles(times, n=10, method="inclusive")
    return Timing(median=deciles[4], p20=deciles[1], p80=deciles[7])


@triton.jit
def scale_copy_kernel(x_ptr, out_ptr, n, factor, TILE: tl.constexpr):
    """One program per TILE elements: out = x · factor. x, out: [n], contiguous."""
    # int64, because an int32 offset overflows at 2^31 elements: 4 GiB of bfloat16.
    start = tl.program_id(0).to(tl.int64) * TILE
    x_ptr += start
    out_ptr += start
    lane = tl.arange(0, TILE)
    if start + TILE <= n:
        # No mask: under one, the compiler cannot know that eight neighbours are masked alike, and
        # loads 2 bytes at a time.
        x = tl.load(x_ptr + lane)
        scaled = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + lane, scaled)
    else:
        inside = lane < n - start
        x = tl.load(x_ptr + lane, mask=inside, other=0)
        scaled = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + lane, scaled, mask=inside)


def scale_copy(x: Tensor, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """x · factor, computed in float32 and rounded once. x: any shape, contiguous, float16, bfloat16
    or float32 -> like x.

    out: where to write, like x (default: a new tensor). Raises ValueError for another dtype,
    strides or an `out` unlike x.
    """
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x is {x.dtype}; accepted: float16, bfloat16, float32")
    if not x.is_contiguous():
        raise ValueError(
            f"x has shape {list(x.shape)} and strides {list(x.stride())}; accepted: contiguous"
        )
    out = torch.empty_like(x) if out is None else out
    like_x = (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
    if not like_x or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}, strides {list(out.stride())}; "
            f"accepted: contiguous {x.dtype} {list(x.shape)} on {x.device}"
        )
    if x.numel() == 0:  # because a grid of zero programs is an error
        return out
    tile = TILE_BYTES // x.element_size()
    grid = (triton.cdiv(x.numel(), tile),)
    # float(), because Triton would compile a kernel of its own for the integer 1.
    scale_copy_kernel[grid](x, out, x.numel(), float(factor), TILE=tile, num_warps=4)
    return out
