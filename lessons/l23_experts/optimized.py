"""The experts of a layer by the kernels in kernels.py: their wrappers, and the choice of tiles.

Bytes decide in decode. A Mixtral layer has eight experts of 176 million weights. One token reads
two of them, 0.7 GB in 16 bits; 64 tokens read all eight, 2.8 GB, and each expert multiplies 16 rows
on average by what was read once. Lesson 6's loop reads the same bytes. What it adds is about ten
launches for each expert and a wait: Python asks the GPU which experts to run.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES, check_one_device
from lessons.l23_experts.align import Alignment, most_tiles
from lessons.l23_experts.kernels import align_kernel, down_kernel, gate_up_kernel, sum_kernel
from lessons.toolbox.kernels.triton_ import triton


class Tiles(NamedTuple):
    """What a program owns: block_m rows of an expert, and block_n outputs in gate_up_kernel or
    down_block_n in down_kernel. block_k: columns that it adds at a time. The rest: its launch.
    """

    block_m: int
    block_n: int
    down_block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By the most rows an expert has on average. An expert may have twice as many, so a tile is twice as
# tall: a second tile of the same expert would read its weights again. gate_up holds two sums, so
# with many rows `down` takes twice as many outputs; with few it needs the programs more. Chosen by
# the compiler (no spills); timed on an H200 and not tuned there.
TILES = {
    8: Tiles(16, 64, 64, 128, 4, 3),
    32: Tiles(64, 64, 128, 64, 4, 3),
    2**31: Tiles(128, 64, 128, 64, 8, 3),
}
# Without matrix units, or for float32, whose products must not be rounded to tf32.
PLAIN = Tiles(16, 32, 32, 32, 4, 2)
ALIGN_BLOCK = 512  # pairs that a program looks at together
SUM_BLOCK, SUM_WARPS = 512, 2  # columns of a program that sums; 8 a thread, 16 bytes in 16 bits


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """out[t] = Σ weights[t, j] · expert chosen[t, j] of x[t], over the experts that are here.

    x: [T, H]; weights: [T, k] float32; chosen: [T, k] int64, numbers outside of 0 … E - 1 are
    experts of another rank; gate_up: [E, 2I, H]; down: [E, H, I] -> [T, H] in x's dtype. Raises
    ValueError.
    """
    y = expert_rows(x, chosen, gate_up, down)
    return weighted_sum(y, weights, chosen, len(gate_up))


def expert_rows(
    x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, tiles: Tiles | None = None
) -> Tensor:
    """What each expert makes of its tokens, without the router's weights: [T · k, H], pair
    t · k + j being token t and its j-th expert. Rows of other ranks' experts are not
    written.

    tiles: None for those that fit the machine. Other arguments and errors as `experts`.
    """
    check_experts(x, chosen, gate_up, down)
    if x.stride(1) != 1:
        x = x.contiguous()
    (num_pairs, size), (num_experts, _, inner) = (chosen.numel(), x.shape[1]), down.shape
    new = dict(dtype=x.dtype, device=x.device)
    h, y = torch.empty(num_pairs, inner, **new), torch.empty(num_pairs, size, **new)
    if not num_pairs:
        return y
    tiles = tiles_for(x, num_pairs, num_experts) if tiles is None else tiles
    pairs, tile_experts, _ = align(chosen, num_experts, tiles.block_m)
    options = dict(
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    # Tiles of rows first: those of one expert are neighbours, run together and share its weights.
    gate_up_kernel[len(tile_experts), triton.cdiv(inner, tiles.block_n)](
        x,
        gate_up,
        h,
        pairs,
        tile_experts,
        num_pairs,
        inner,
        size,
        x.stride(0),
        gate_up.stride(0),
        gate_up.stride(1),
        TOP_K=chosen.shape[1],
        BLOCK_N=tiles.block_n,
        **options,
    )
    down_kernel[len(tile_experts), triton.cdiv(size, tiles.down_block_n)](
        h,
        down,
        y,
        pairs,
        tile_experts,
        num_pairs,
        size,
        inner,
        down.stride(0),
        down.stride(1),
        BLOCK_N=tiles.down_block_n,
        **options,
    )
    return y


def weighted_sum(y: Tensor, weights: Tensor, chosen: Tensor, num_experts: int) -> Tensor:
    """out[t] = Σ weights[t, j] · y[t · k + j], without pairs whose expert is not below num_experts
    or is negative. y: [T · k, H]; weights, chosen: [T, k] -> [T, H] in y's dtype. Raises
    ValueError.
    """
    check_sum(y, weights, chosen)
    (num_tokens, top_k), size = chosen.shape, y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    if num_tokens:
        sum_kernel[num_tokens, triton.cdiv(size, SUM_BLOCK)](
            y,
            weights.contiguous(),
            chosen.contiguous(),
            out,
            num_experts,
            size,
            TOP_K=top_k,
            BLOCK=SUM_BLOCK,
            num_warps=SUM_WARPS,
        )
    return out


def align(chosen: Tensor, num_experts: int, block_m: int) -> Alignment:
    """As align.align, in one launch; pairs of unused tiles are left as they are. chosen: [T, k]."""
    num_pairs = chosen.numel()
    num_tiles = most_tiles(num_pairs, num_experts, block_m)
    new = dict(dtype=torch.int32, device=chosen.device)
    pairs, experts = torch.empty(num_tiles * block_m, **new), torch.empty(num_tiles, **new)
    if num_pairs:
        align_kernel[num_experts,](
            chosen.contiguous(),
            pairs,
            experts,
            num_pairs,
            num_experts,
            num_tiles,
            BLOCK_M=block_m,
            BLOCK_P=ALIGN_BLOCK,
            BLOCK_E=triton.next_power_of_2(num_experts + 1),
            num_warps=4,
        )
    return Alignment(pairs, experts, block_m)


def tiles_for(x: Tensor, num_pairs: int, num_experts: int) -> Tiles:
    """Tiles for x: [T, H] on its chip."""
    has_matrix_units = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)
    if x.dtype == torch.float32 or not has_matrix_units:
        return PLAIN
    return next(tiles for rows, tiles in TILES.items() if num_pairs <= rows * num_experts)


def check_experts(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    dtypes: tuple[torch.dtype, ...] = DECODE_DTYPES,
) -> None:
    """Raise ValueError unless x: [T, H], chosen: [T, k] int64, gate_up: [E, 2I, H] and
    down: [E, H, I] fit each other, on one device.
    """
    check_rows(x, chosen, dtypes)
    num_experts, inner = len(down), down.shape[-1]
    accepted = dict(
        gate_up=(gate_up, (num_experts, 2 * inner, x.shape[1])),
        down=(down, (num_experts, x.shape[1], inner)),
    )
    for name, (weight, shape) in accepted.items():
        if weight.shape != shape or weight.dtype != x.dtype or weight.stride(-1) != 1:
            raise ValueError(
                f"{name}: got {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}; "
                f"accepted: {x.dtype} {shape} with dense rows, as x and down say"
            )
    check_one_device(x=x, chosen=chosen, gate_up=gate_up, down=down)


def check_rows(x: Tensor, chosen: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless x: [T, H] and chosen: [T, k] int64 have a row for each token."""
    if x.ndim != 2 or not x.shape[1] or x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"x: got {x.dtype} {tuple(x.shape)}; accepted: [T, H] in {names}")
    if chosen.ndim != 2 or len(chosen) != len(x) or chosen.dtype != torch.int64:
        raise ValueError(
            f"chosen: got {chosen.dtype} {tuple(chosen.shape)}; accepted: int64 [{len(x)}, k], a "
            "row for each of x"
        )


def check_sum(y: Tensor, weights: Tensor, chosen: Tensor) -> None:
    """Raise ValueError unless y: [T · k, H] is dense and weights: [T, k] and chosen: [T, k] fit it,
    on one device.
    """
    if y.ndim != 2 or len(y) != chosen.numel() or not y.is_contiguous():
        raise ValueError(
            f"y: got {tuple(y.shape)} with strides {y.stride()}; accepted: [{chosen.numel()}, H], "
            "a dense row for each of chosen"
        )
    if weights.shape != chosen.shape or not weights.is_floating_point():
        raise ValueError(
            f"weights: got {weights.dtype} {tuple(weights.shape)}; accepted: numbers "
            f"{tuple(chosen.shape)}, one for each of chosen"
        )
    check_one_device(y=y, weights=weights, chosen=chosen)
