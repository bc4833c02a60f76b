"""The wrapper of the kernels in segments.py. Read it beside naive.py's loop.

Bytes decide. A row of rank r reads r · (K + N) numbers of its adapter in place of N · K, and each
segment of at most 16 rows reads them once. With 64 rows of 16 adapters of rank 16, K = N = 4096 and
16 bits, that is 16 · 16 · 8192 · 2 = 4.2 MB beside the 33.6 MB of the base matrix: 12.5 %.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES, check_one_device
from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels.segments import expand_kernel, shrink_kernel
from lessons.l21_multi_lora.kernels.weights import SlotWeights
from lessons.toolbox.kernels.triton_ import triton


class Tiles(NamedTuple):
    """block_k, split_k: columns of x in a step and in a split of the shrink. block_n: outputs of a
    program of the expand. The rest is how both are launched.
    """

    block_k: int
    split_k: int
    block_n: int
    num_warps: int
    num_stages: int


# Chosen by the compiler (no spills); none has been timed. A split is 512 columns, so that 16
# segments of K = 4096 are 128 programs, one for each of an H200's 132 processors.
TILES = Tiles(block_k=128, split_k=512, block_n=128, num_warps=4, num_stages=3)
# Without matrix units, or for float32, whose products must not be rounded to tf32.
PLAIN = Tiles(block_k=32, split_k=512, block_n=32, num_warps=4, num_stages=2)
LEAST_RANKS, MOST_RANKS = 16, 64  # of a block; 16 are the fewest that a matrix unit takes


def add_lora(
    out: Tensor,
    x: Tensor,
    weights: SlotWeights,
    batch: AdapterBatch,
    tiles: Tiles | None = None,
) -> Tensor:
    """As naive.add_lora: out: [T, N] += the correction of each row of x: [T, K]; returns out.

    Sums are float32 and rounded twice, h and the result. tiles: None for those that fit the
    machine. Raises ValueError for operands that do not fit each other.
    """
    check_add_lora(out, x, weights, batch)
    num_tiles = len(batch.tiles)
    if not num_tiles or not out.numel():
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    tiles = tiles_for(x) if tiles is None else tiles
    (num_rows, size), num_outputs = x.shape, out.shape[1]
    max_rank = weights.a.shape[1]
    num_splits = triton.cdiv(size, tiles.split_k)
    block_r = block_of_ranks(max_rank)
    partials = torch.empty(num_splits, num_rows, max_rank, dtype=torch.float32, device=x.device)
    shrink_kernel[num_tiles, num_splits, triton.cdiv(max_rank, block_r)](
        x,
        weights.a,
        batch.order,
        batch.tiles,
        weights.ranks,
        partials,
        num_rows,
        size,
        max_rank,
        x.stride(0),
        BLOCK_M=batch.block_m,
        BLOCK_R=block_r,
        BLOCK_K=tiles.block_k,
        SPLIT_K=tiles.split_k,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    expand_kernel[num_tiles, triton.cdiv(num_outputs, tiles.block_n)](
        partials,
        weights.b,
        batch.order,
        batch.tiles,
        weights.ranks,
        weights.scaling,
        out,
        num_rows,
        num_outputs,
        max_rank,
        num_splits,
        out.stride(0),
        BLOCK_M=batch.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_R=block_r,
        num_warps=tiles.num_warps,
    )
    return out


def block_of_ranks(max_rank: int) -> int:
    """Ranks that a program multiplies at once."""
    return min(max(LEAST_RANKS, triton.next_power_of_2(max_rank)), MOST_RANKS)


def tiles_for(x: Tensor) -> Tiles:
    """Tiles for x: [T, K] on its chip. They do not depend on T, so neither do bits."""
    has_matrix_units = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return TILES if has_matrix_units and x.dtype != torch.float32 else PLAIN


def check_add_lora(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> None:
    """Raise ValueError unless x: [T, K], out: [T, N] and the batch fit the slots, on one device."""
    size, num_outputs = weights.a.shape[2], weights.b.shape[2]
    num_rows = len(batch.row_slots)
    if x.shape != (num_rows, size) or x.dtype not in DECODE_DTYPES or x.dtype != weights.a.dtype:
        raise ValueError(
            f"x: got {x.dtype} {tuple(x.shape)}; accepted: {weights.a.dtype} "
            f"[{num_rows}, {size}], a row for each of batch.row_slots, in float32, float16 or "
            "bfloat16"
        )
    if out.shape != (num_rows, num_outputs) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(
            f"out: got {out.dtype} {tuple(out.shape)}; accepted: {x.dtype} "
            f"[{num_rows}, {num_outputs}] with dense rows"
        )
    num_slots = len(weights.a)
    if strange := [part.slot for part in batch.segments if not 0 <= part.slot < num_slots]:
        raise ValueError(
            f"batch: got slot {strange[0]}; accepted: -1 for no adapter, or 0 to {num_slots - 1}"
        )
    check_one_device(x=x, out=out, row_slots=batch.row_slots, **weights._asdict())
