"""Launches tensor_cores.cu: x · Wᵀ for 1 to 16 rows and 4-bit codes in a tensor core's order."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l10_flash_decoding.splits import sms_of
from lessons.l18_weight_quantization.kernels.fragments import (
    OUTPUTS,
    STRETCH,
    UNIT,
    Fragments,
    group_shift,
)
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

SOURCE = Path(__file__).with_name("tensor_cores.cu")
LANES, MOST_WARPS = 32, 28  # as there
MOST_PIECES = 8  # as there; with 16 rows of x 132 KiB of shared memory, of 163 in an A100's block
CHUNK = 8  # numbers between two rows of x in shared memory, as there
ROWS = (8, 16)  # of x that a kernel is for
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
KERNELS = {
    (dtype, rows, zeros): CudaKernel(SOURCE, f"w4a16_{name}_{rows}" + "_zeros" * zeros)
    for dtype, name in TYPES.items()
    for rows in ROWS
    for zeros in (False, True)
}


class Warps(NamedTuple):
    """of_outputs: tiles of 16 outputs that a block owns; splits: warps of a block that share the
    inputs of a tile; blocks: blocks that share them. One of the two is 1.
    """

    of_outputs: int
    splits: int
    blocks: int = 1


def w4a16_tensor_cores(
    x: Tensor, weight: Fragments, bias: Tensor | None = None, warps: Warps | None = None
) -> Tensor:
    """x: [M, K] in bfloat16 or float16, M up to 16; bias: [N] or None -> [M, N] in x's dtype.

    warps: None for those that fit the machine. Sums are float32. Raises ValueError, and
    RuntimeError where cuda-bindings is missing, on a CPU NVRTC.
    """
    check(x, weight, bias)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) >= 2**27:
        x = x.contiguous()  # because cp.async copies 16 bytes, and offsets are 32 bits
    (num_rows, size), num_outputs = x.shape, weight.shape[0]
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    warps = warps or warps_for(num_rows, num_outputs, size, sms_of(x.device))
    tiles, rows = len(weight.codes), next(most for most in ROWS if num_rows <= most)
    sums = tiles * warps.blocks * rows * OUTPUTS if warps.blocks > 1 else 0
    partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    KERNELS[x.dtype, rows, weight.zeros is not None][
        (warps.blocks, -(-tiles // warps.of_outputs)),
        (LANES * warps.splits, warps.of_outputs),
        shared_bytes(rows, warps),
    ](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,  # not read without zeros
        x if bias is None else bias,  # not read without a bias
        out,
        partials,
        weight.arrived,
        np.int32(num_rows),
        np.int32(num_outputs),
        np.int32(size),
        np.int32(weight.codes.shape[1] * UNIT // STRETCH),
        np.int32(weight.scales.shape[1]),
        np.int32(group_shift(weight.group_size, size)),
        np.int32(bias is not None),
        np.int32(x.stride(0)),
    )
    return out


def shared_bytes(rows: int, warps: Warps) -> int:
    """Two buffers of x. The sums that warps hand over fit into them: for 8 rows those are 512 bytes
    of each of at most 28 warps, and two splits of x are 16 KiB.
    """
    return 2 * warps.splits * rows * (STRETCH + CHUNK) * 2


@cache  # because every product of a step asks
def warps_for(num_rows: int, num_outputs: int, size: int, num_sms: int) -> Warps:
    """The warps of a block, and whether the pieces of a tile's inputs are warps of one block or of
    several.

    In one block each SM reads all of x: num_rows / (4 · of_outputs) times the bytes of its codes,
    through an L2 cache that is 1.5 times as fast as the memory. So with more rows than twice the
    tiles, pieces go to blocks of their own, which read their piece of x alone. The sums
    are the same, and so are bits: `pieces_for` knows no rows.
    """
    of_outputs, pieces = pieces_for(num_outputs, size, num_sms)
    if num_rows <= 2 * of_outputs or pieces == 1:
        return Warps(of_outputs, pieces)
    at_a_time = max(1, num_sms // pieces)  # groups of blocks with the same tiles
    shared_evenly = -(-num_outputs // (OUTPUTS * at_a_time))
    return Warps(min(shared_evenly, of_outputs * pieces), 1, pieces)


@cache
def pieces_for(num_outputs: int, size: int, num_sms: int) -> tuple[int, int]:
    """(tiles of 16 outputs for an SM, pieces of the inputs of each). The busiest SM shall have as
    few tiles as it can, and what is left of 28 warps shares the inputs.
    """
    tiles = -(-num_outputs // OUTPUTS)

    def of_busiest(of_outputs: int) -> int:
        return -(-tiles // (of_outputs * num_sms)) * of_outputs

    of_outputs = min(range(MOST_WARPS, 0, -1), key=of_busiest)  # of equals the first, the largest
    return of_outputs, min(MOST_PIECES, MOST_WARPS // of_outputs, -(-size // STRETCH))


def check(x: Tensor, weight: Fragments, bias: Tensor | None) -> None:
    """Raise ValueError unless x: [M, K] and bias: [N] fit the matrix, [N, K], on one device."""
    if not isinstance(weight, Fragments):
        raise ValueError(f"weight: got {type(weight).__name__}; accepted: Fragments")
    rows, columns = weight.shape
    if x.ndim != 2 or x.shape[1] != columns or x.dtype not in TYPES or len(x) > ROWS[-1]:
        raise ValueError(
            f"x: got {x.dtype} {tuple(x.shape)}; accepted: up to {ROWS[-1]} rows of {columns}, in "
            "torch.bfloat16 or torch.float16"
        )
    if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias: got {bias.dtype} {tuple(bias.shape)}; accepted: None, or {x.dtype} [{rows}]"
        )
    check_one_device(x=x, **weight.tensors(), **({} if bias is None else {"bias": bias}))
