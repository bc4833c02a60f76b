"""Experts in FP8, multiplied in FP8, as DeepSeek-V3 is stored and served.

A matrix has a scale for each tile of 128 × 128 (lesson 18's Float8Weight), and each token one for
each 128 of its numbers, found when the token is there. The matrix units multiply E4M3 by E4M3 at
twice the rate of bfloat16, and experts take half as many bytes from memory.

- **Sums of 128 columns.** Hopper adds FP8 products with few bits. As in lesson 18's fp8.py, a step
  of 128 columns starts from zero, and its sum times both scales is added to a float32 register.
- **h is rounded again**, because down's input has to be FP8 as well. `quantize_groups_kernel` does
  it between the two products.
- **Scales of gate and up are apart.** gate and up are stacked, but each has tiles of its own, so an
  expert's width need not be a multiple of 128.

It needs sm_89: an A100 has no FP8 instruction.

Source: DeepSeek-V3 technical report 2024, section 3.3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l03_kv_cache.arguments import DECODE_DTYPES, check_one_device
from lessons.l07_kernel_fusion.epilogue import load_tile
from lessons.l18_weight_quantization.kernels.fp8 import LARGEST
from lessons.l18_weight_quantization.weights import TILE, Float8Weight
from lessons.l23_experts.kernels import rows_of_tile
from lessons.l23_experts.optimized import align, check_rows, weighted_sum
from lessons.toolbox.kernels.triton_ import tl, triton

GROUPS = 8  # of 128 numbers that a program rounds together


class Stack(NamedTuple):
    """A matrix of each expert. values: [E, N, K] torch.float8_e4m3fn; scales: [E, tiles, ⌈K / 128⌉]
    float32, a row for each 128 rows of down, or of gate and then of up.
    """

    values: Tensor
    scales: Tensor


class Tiles(NamedTuple):
    """As optimized.Tiles; a step has 128 columns."""

    block_m: int
    block_n: int
    down_block_n: int
    num_warps: int
    num_stages: int


# By the most rows an expert has on average, as optimized.TILES. Chosen by the compiler (no spills).
TILES = {8: Tiles(16, 64, 64, 4, 3), 2**31: Tiles(64, 64, 128, 8, 3)}


@triton.jit
def quantize_groups_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    size,
    stride_x,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program: GROUPS groups of a row of x: [M, K] become values: [M, K] float8 and scales: [M,
    ⌈K / GROUP⌉] float32, x ≈ values · scales.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * stride_x + column, mask=column < size, other=0.0).to(tl.float32)
    # div_rn, because on a GPU / may be off by two units in the last place, and PyTorch's is not.
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1, keep_dims=True), LARGEST)
    scale = tl.where(scale == 0.0, 1.0, scale)  # a group of zeros
    x = tl.div_rn(x, tl.zeros_like(x) + scale)
    # Clamped, because the division may round up; a NaN stays one.
    x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values_ptr + row * size + column, x.to(tl.float8e4nv), mask=column < size)
    num_groups = tl.cdiv(size, GROUP)
    tl.store(scales_ptr + row * num_groups + group, scale, mask=group < num_groups)


@triton.jit
def load_scales(scales_ptr, row, is_row, steps, step):
    """A step's scales of rows: [BLOCK_M], one for each 128 of a row's numbers."""
    return tl.load(scales_ptr + row * steps + step, mask=is_row & (step < steps), other=0.0)


@triton.jit(do_not_specialize=["num_pairs"])
def fp8_gate_up_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    h_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    inner,
    size,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a tile of h[pair] = silu(x · gateᵀ) · (x · upᵀ), all times their scales. x: [T,
    size]; x_scales: [T, ⌈size / TILE⌉]; h: [num_pairs, inner].
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    steps, tiles_n = tl.cdiv(size, TILE), tl.cdiv(inner, TILE)
    x_row = x_ptr + pair // TOP_K * size
    row, is_scale = tl.reshape(pair // TOP_K, (BLOCK_M,)), tl.reshape(is_row, (BLOCK_M,))
    first = tl.program_id(1) * BLOCK_N
    gate_ptr = weight_ptr + expert * (2 * inner) * size
    up_ptr = gate_ptr + tl.cast(inner, tl.int64) * size
    tl.static_assert(TILE % BLOCK_N == 0, "a program's outputs are in one row of tiles")
    gate_scales = scales_ptr + (expert * (2 * tiles_n) + first // TILE) * steps
    k = tl.arange(0, TILE)[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    of_x = load_scales(x_scales_ptr, row, is_scale, steps, 0)
    for step in range(0, steps):
        ahead = load_scales(x_scales_ptr, row, is_scale, steps, step + 1)
        start = step * TILE
        x = tl.load(x_row + start + k, mask=is_row & (start + k < size), other=0.0)
        w = load_tile(gate_ptr, first, inner, size, start, size, BLOCK_N, TILE)
        scale = of_x * tl.load(gate_scales + step)
        gate += tl.dot(x, tl.trans(w)) * scale[:, None]  # from zero: a step's own sum
        w = load_tile(up_ptr, first, inner, size, start, size, BLOCK_N, TILE)
        scale = of_x * tl.load(gate_scales + tiles_n * steps + step)
        up += tl.dot(x, tl.trans(w)) * scale[:, None]
        of_x = ahead
    h = gate * tl.sigmoid(gate) * up
    n = first + tl.arange(0, BLOCK_N)[None, :]
    tl.store(h_ptr + pair * inner + n, h.to(h_ptr.dtype.element_ty), mask=is_row & (n < inner))


@triton.jit(do_not_specialize=["num_pairs"])
def fp8_down_kernel(
    h_ptr,
    h_scales_ptr,
    weight_ptr,
    scales_ptr,
    y_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    size,
    inner,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a tile of y[pair] = h[pair] · downᵀ, times their scales. y: [num_pairs,
    size].
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    steps = tl.cdiv(inner, TILE)
    h_row = h_ptr + pair * inner
    row, is_scale = tl.reshape(pair, (BLOCK_M,)), tl.reshape(is_row, (BLOCK_M,))
    first = tl.program_id(1) * BLOCK_N
    down_ptr = weight_ptr + expert * size * inner
    tl.static_assert(TILE % BLOCK_N == 0, "as in fp8_gate_up_kernel")
    down_scales = scales_ptr + (expert * tl.cdiv(size, TILE) + first // TILE) * steps
    k = tl.arange(0, TILE)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    of_h = load_scales(h_scales_ptr, row, is_scale, steps, 0)
    for step in range(0, steps):
        ahead = load_scales(h_scales_ptr, row, is_scale, steps, step + 1)
        start = step * TILE
        h = tl.load(h_row + start + k, mask=is_row & (start + k < inner), other=0.0)
        w = load_tile(down_ptr, first, size, inner, start, inner, BLOCK_N, TILE)
        scale = of_h * tl.load(down_scales + step)
        acc += tl.dot(h, tl.trans(w)) * scale[:, None]
        of_h = ahead
    n = first + tl.arange(0, BLOCK_N)[None, :]
    tl.store(y_ptr + pair * size + n, acc.to(y_ptr.dtype.element_ty), mask=is_row & (n < size))


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [M, K], rows dense -> values [M, K] float8_e4m3fn and scales [M, ⌈K / 128⌉] float32."""
    (num_rows, size), num_groups = x.shape, triton.cdiv(x.shape[1], TILE)
    values = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if num_rows:
        quantize_groups_kernel[num_rows, triton.cdiv(num_groups, GROUPS)](
            x, values, scales, size, x.stride(0), LARGEST=LARGEST, GROUP=TILE, GROUPS=GROUPS
        )
    return values, scales


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Stack, down: Stack) -> Tensor:
    """out[t] = Σ weights[t, j] · expert chosen[t, j] of x[t], x and h rounded to FP8: [T, H] ->
    [T, H].

    weights, chosen: [T, k] float32 and int64; gate_up: of [E, 2I, H]; down: of [E, H, I]. Raises
    ValueError.
    """
    y = expert_rows(x, chosen, gate_up, down)
    return weighted_sum(y, weights, chosen, len(down.values))


def expert_rows(
    x: Tensor, chosen: Tensor, gate_up: Stack, down: Stack, tiles: Tiles | None = None
) -> Tensor:
    """As optimized.expert_rows: [T, H] -> [T · k, H]. Raises ValueError."""
    num_experts, size, inner = check(x, chosen, gate_up, down)
    x = x if x.stride(1) == 1 else x.contiguous()
    num_pairs = chosen.numel()
    new = dict(dtype=x.dtype, device=x.device)
    h, y = torch.empty(num_pairs, inner, **new), torch.empty(num_pairs, size, **new)
    if not num_pairs:
        return y
    if tiles is None:
        tiles = next(t for rows, t in TILES.items() if num_pairs <= rows * num_experts)
    pairs, tile_experts, _ = align(chosen, num_experts, tiles.block_m)
    tiled = pairs, tile_experts, num_pairs
    options = dict(
        TILE=TILE, BLOCK_M=tiles.block_m, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    fp8_gate_up_kernel[len(tile_experts), triton.cdiv(inner, tiles.block_n)](
        *quantize_groups(x), *gate_up, h, *tiled, inner, size,
        TOP_K=chosen.shape[1], BLOCK_N=tiles.block_n, **options,
    )  # fmt: skip
    fp8_down_kernel[len(tile_experts), triton.cdiv(size, tiles.down_block_n)](
        *quantize_groups(h), *down, y, *tiled, size, inner, BLOCK_N=tiles.down_block_n, **options
    )
    return y


def check(x: Tensor, chosen: Tensor, gate_up: Stack, down: Stack) -> tuple[int, int, int]:
    """(E, H, I). Raises ValueError unless x: [T, H], chosen: [T, k] int64 and both stacks fit each
    other, on one device.
    """
    check_rows(x, chosen, DECODE_DTYPES)
    num_experts, _, inner = down.values.shape
    size = x.shape[1]
    tiles_h, tiles_i = triton.cdiv(size, TILE), triton.cdiv(inner, TILE)
    for name, tensor, shape, dtype in (
        ("gate_up.values", gate_up.values, (2 * inner, size), torch.float8_e4m3fn),
        ("gate_up.scales", gate_up.scales, (2 * tiles_i, tiles_h), torch.float32),
        ("down.values", down.values, (size, inner), torch.float8_e4m3fn),
        ("down.scales", down.scales, (tiles_h, tiles_i), torch.float32),
    ):
        fits = tensor.shape == (num_experts, *shape) and tensor.is_contiguous()
        if not fits or tensor.dtype != dtype:
            raise ValueError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)}; accepted: dense {dtype} "
                f"{(num_experts, *shape)}"
            )
        check_one_device(x=x, chosen=chosen, weight=tensor)
    return num_experts, size, inner


def stack_of(*parts: list[Float8Weight]) -> Stack:
    """The matrices of all experts in two tensors. parts: down's, or gate's and up's."""
    values = torch.cat([torch.stack([w.values for w in part]) for part in parts], dim=1)
    scales = torch.cat([torch.stack([w.scales.float() for w in part]) for part in parts], dim=1)
    return Stack(values, scales)


class GroupedFp8(nn.Module):
    """A layer of such experts without a loop. gate: lesson 6's Router; shared_experts: an MLP or
    None.
    """

    def __init__(self, gate: nn.Module, shared_experts: nn.Module | None, *stacks: Stack):
        super().__init__()
        self.gate, self.shared_experts = gate, shared_experts
        self.gate_up, self.down = stacks

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.gate(x)
        out = experts(x, weights, chosen, self.gate_up, self.down)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))
