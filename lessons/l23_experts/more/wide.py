"""Many rows for each expert: tiles of 192 rows and 256 columns, in an order that reuses L2.

In prefill an expert multiplies hundreds of rows, and the matrix units decide, if they are fed. They
are fed from L2: a tile of M rows and N columns takes M + N numbers of 16 bits from there for M · N
products, two operations each. At 6.5 TB/s, the rate of lessons/PROFILING.md, an H200's matrix units
can be busy for

    128 × 128   64 operations a byte, 42 %      128 × 256   85, 56 %        192 × 256   110, 72 %

of the time. A larger tile's sums do not fit into an SM's registers: 192 · 256 take three quarters
of them. So a program holds three sums of 64 rows, a row block of Hopper's matrix instruction, and
loads each piece of the weights once for all three.

Three more decisions:

- **Gate and up are one product.** Column 2j of a tile is gate's row j and column 2j + 1 is up's. A
  thread then holds both numbers side by side, so silu(gate) · up moves nothing.
- **Tiles in groups.** Programs that run together should ask L2 for the same numbers. GROUP tiles of
  rows take turns at a block of columns before the next block begins, so a wave of programs forms a
  near square of the result. `lab/order.py` counts what memory gives in either order.
- **Hopper only.** Elsewhere the sums and the operands do not fit into the registers.

Sources: the grouped order: Triton's tutorial 03; sums of several row blocks over one piece of the
weights: CUTLASS, "Efficient GEMM in CUDA", section Warp-level.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l23_experts.optimized import align, check_experts, weighted_sum
from lessons.toolbox.kernels.triton_ import tl, triton


class WideTiles(NamedTuple):
    """part: a third of a tile's rows; block_n: columns of its sums, of which gate_up has half as
    many outputs; block_k: columns added at a time; group: tiles of rows that take turns.
    """

    part: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int


# Chosen by the compiler (no spills) and by lab/prefill.py's predictions; no GPU has timed it.
TILES = WideTiles(64, 256, 64, 8, 8, 3)
FEWEST_ROWS = 128  # that an expert has on average; lab/prefill.py predicts a gain from 64 on
PARTS = 3


@triton.jit
def place_of(blocks_n, num_tiles, GROUP: tl.constexpr):
    """Which tile of rows and which block of columns are this program's."""
    at = tl.program_id(0)
    first = at // (GROUP * blocks_n) * GROUP  # tile of the group
    rows = tl.minimum(num_tiles - first, GROUP)
    within = at - first * blocks_n
    return first + within % rows, within // rows


@triton.jit
def part_of(pairs_ptr, place, PART: tl.constexpr):
    """The pairs of a third of a tile: [PART, 1] int64, because a row's offset may pass 2^31."""
    return tl.load(pairs_ptr + place * PART + tl.arange(0, PART)[:, None]).to(tl.int64)


@triton.jit
def sums_of(
    rows_ptr,
    row_0,
    row_1,
    row_2,
    is_0,
    is_1,
    is_2,
    weight_ptr,
    is_n,
    size,
    BLOCK_K: tl.constexpr,
):
    """Three tiles of rows · weightᵀ: [PART, N] float32 each. row_0 …: offsets of the rows, [PART,
    1]; weight_ptr: of each row of the weights, [N, 1].
    """
    k = tl.arange(0, BLOCK_K)[None, :]
    sum_0 = tl.zeros((row_0.shape[0], weight_ptr.shape[0]), tl.float32)
    sum_1, sum_2 = tl.zeros_like(sum_0), tl.zeros_like(sum_0)
    for start in range(0, size, BLOCK_K):
        column = start + k
        is_k = column < size
        w = tl.trans(tl.load(weight_ptr + column, mask=is_n & is_k, other=0.0))
        x = tl.load(rows_ptr + row_0 + column, mask=is_0 & is_k, other=0.0)
        sum_0 = tl.dot(x, w, sum_0, input_precision="ieee")
        x = tl.load(rows_ptr + row_1 + column, mask=is_1 & is_k, other=0.0)
        sum_1 = tl.dot(x, w, sum_1, input_precision="ieee")
        x = tl.load(rows_ptr + row_2 + column, mask=is_2 & is_k, other=0.0)
        sum_2 = tl.dot(x, w, sum_2, input_precision="ieee")
    return sum_0, sum_1, sum_2


@triton.jit
def store_gated(h_ptr, acc, pair, is_row, first, inner):
    """silu(gate) · up of a sum whose columns are gate's and up's in turn: [PART, 2 · N] -> [PART,
    N] of h.
    """
    gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    store_rows(h_ptr, gate * tl.sigmoid(gate) * up, pair, is_row, first, inner)


@triton.jit
def store_rows(out_ptr, acc, pair, is_row, first, outputs):
    """Columns first … of the pairs' rows of out: [num_pairs, outputs]."""
    n = first + tl.arange(0, acc.shape[1])[None, :]
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * outputs + n, rounded, mask=is_row & (n < outputs))


# Not specialised, because a new number of tokens shall not compile a variant while requests wait.
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def wide_gate_up_kernel(
    x_ptr,
    weight_ptr,
    h_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_tiles,
    inner,
    size,
    stride_x,
    stride_expert,
    stride_row,
    TOP_K: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As kernels.gate_up_kernel: a tile of h[pair] = silu(x[pair // k] · gateᵀ) · (… · upᵀ)."""
    tile, block = place_of(tl.cdiv(inner, BLOCK_N // 2), num_tiles, GROUP)
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair_0 = part_of(pairs_ptr, 3 * tile, PART)
    pair_1 = part_of(pairs_ptr, 3 * tile + 1, PART)
    pair_2 = part_of(pairs_ptr, 3 * tile + 2, PART)
    is_0, is_1, is_2 = pair_0 < num_pairs, pair_1 < num_pairs, pair_2 < num_pairs
    first = block * (BLOCK_N // 2)
    column = tl.arange(0, BLOCK_N)[:, None]
    n = first + column // 2
    row = (n + column % 2 * inner).to(tl.int64)
    sum_0, sum_1, sum_2 = sums_of(
        x_ptr,
        pair_0 // TOP_K * stride_x,
        pair_1 // TOP_K * stride_x,
        pair_2 // TOP_K * stride_x,
        is_0,
        is_1,
        is_2,
        weight_ptr + expert * stride_expert + row * stride_row,
        n < inner,
        size,
        BLOCK_K,
    )
    store_gated(h_ptr, sum_0, pair_0, is_0, first, inner)
    store_gated(h_ptr, sum_1, pair_1, is_1, first, inner)
    store_gated(h_ptr, sum_2, pair_2, is_2, first, inner)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def wide_down_kernel(
    h_ptr,
    weight_ptr,
    y_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_tiles,
    size,
    inner,
    stride_expert,
    stride_row,
    PART: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As kernels.down_kernel: a tile of y[pair] = h[pair] · downᵀ."""
    tile, block = place_of(tl.cdiv(size, BLOCK_N), num_tiles, GROUP)
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair_0 = part_of(pairs_ptr, 3 * tile, PART)
    pair_1 = part_of(pairs_ptr, 3 * tile + 1, PART)
    pair_2 = part_of(pairs_ptr, 3 * tile + 2, PART)
    is_0, is_1, is_2 = pair_0 < num_pairs, pair_1 < num_pairs, pair_2 < num_pairs
    first = block * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)[:, None]
    sum_0, sum_1, sum_2 = sums_of(
        h_ptr,
        pair_0 * inner,
        pair_1 * inner,
        pair_2 * inner,
        is_0,
        is_1,
        is_2,
        weight_ptr + expert * stride_expert + n.to(tl.int64) * stride_row,
        n < size,
        inner,
        BLOCK_K,
    )
    store_rows(y_ptr, sum_0, pair_0, is_0, first, size)
    store_rows(y_ptr, sum_1, pair_1, is_1, first, size)
    store_rows(y_ptr, sum_2, pair_2, is_2, first, size)


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As optimized.experts, [T, H] -> [T, H]."""
    y = expert_rows(x, chosen, gate_up, down)
    return weighted_sum(y, weights, chosen, len(gate_up))


def expert_rows(
    x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, tiles: WideTiles = TILES
) -> Tensor:
    """As optimized.expert_rows: [T, H] -> [T · k, H]. Raises ValueError."""
    check_experts(x, chosen, gate_up, down)
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_pairs, size), (num_experts, _, inner) = (chosen.numel(), x.shape[1]), down.shape
    new = dict(dtype=x.dtype, device=x.device)
    h, y = torch.empty(num_pairs, inner, **new), torch.empty(num_pairs, size, **new)
    if not num_pairs:
        return y
    pairs, tile_experts, _ = align(chosen, num_experts, PARTS * tiles.part)
    sizes = pairs, tile_experts, num_pairs, len(tile_experts)
    options = dict(
        PART=tiles.part,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=tiles.group,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    blocks = triton.cdiv(inner, tiles.block_n // 2)
    wide_gate_up_kernel[len(tile_experts) * blocks,](
        x, gate_up, h, *sizes, inner, size, x.stride(0), *gate_up.stride()[:2],
        TOP_K=chosen.shape[1], **options,
    )  # fmt: skip
    blocks = triton.cdiv(size, tiles.block_n)
    wide_down_kernel[len(tile_experts) * blocks,](
        h, down, y, *sizes, size, inner, *down.stride()[:2], **options
    )
    return y


def pays(x: Tensor, num_pairs: int, num_experts: int) -> bool:
    """Whether experts of so many rows fill these tiles, in 16 bits on Hopper. x: [T, H]."""
    if not x.is_cuda or x.dtype.itemsize != 2 or num_pairs < FEWEST_ROWS * num_experts:
        return False
    return torch.cuda.get_device_capability(x.device)[0] == 9
