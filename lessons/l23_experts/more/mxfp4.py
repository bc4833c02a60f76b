"""gpt-oss' experts in 4 bits, all in three launches: codes leave memory as codes.

Lesson 18 has the format, MXFP4: a number is one of 16 (E2M1), and 32 neighbours of a row share a
power of two. Lesson 6 has the layer: gate and up in every other row, both clamped, and a bias for
each product. Run one by one, as in lesson 6, its experts make Python wait for the router in each
layer. Here nothing waits, and a CUDA graph can record the layer.

`mxfp4_kernels.py` says how codes become numbers. The rest is kernels.py: the same sort, the same
grid, and the same sum over a token's experts.

Sources: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3; gpt-oss model card
(2025), section 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l06_mla.gpt_oss import SWIGLU_ALPHA, SWIGLU_LIMIT
from lessons.l18_weight_quantization.weights import MXFP4_BLOCK, Mxfp4Weight
from lessons.l23_experts.more.mxfp4_kernels import (
    interleaved,
    mxfp4_down_kernel,
    mxfp4_gate_up_kernel,
)
from lessons.l23_experts.optimized import align, check_rows, weighted_sum
from lessons.toolbox.kernels.triton_ import triton


class Stack(NamedTuple):
    """A matrix of each expert, [E, N, K]. codes: [E, N, K / 2] uint8, as in lesson 18's
    Mxfp4Weight; exponents: [E, K / 32, N] uint8, its transposed, so that those of a tile of N are
    neighbours; bias: [E, N].
    """

    codes: Tensor
    exponents: Tensor
    bias: Tensor


class Tiles(NamedTuple):
    """As optimized.Tiles, with the same block_n for both products."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Chosen by predicted time among those whose products the compiler does not put one after the other,
# and that spill nothing. Before Hopper the tall ones would.
FEW, MIDDLE, TALL = (Tiles(rows, 64, 128, 4, 3) for rows in (16, 64, 128))


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Stack, down: Stack) -> Tensor:
    """out[t] = Σ weights[t, j] · expert chosen[t, j] of x[t]: [T, H] -> [T, H] bfloat16.

    weights, chosen: [T, k] float32 and int64; gate_up: of [E, 2I, H]; down: of [E, H, I]. Raises
    ValueError.
    """
    y = expert_rows(x, chosen, gate_up, down)
    return weighted_sum(y, weights, chosen, len(down.codes))


def expert_rows(
    x: Tensor, chosen: Tensor, gate_up: Stack, down: Stack, tiles: Tiles | None = None
) -> Tensor:
    """As optimized.expert_rows, biases included: [T, H] -> [T · k, H]. Raises ValueError."""
    num_experts, size, inner = check(x, chosen, gate_up, down)
    x = interleaved(x)
    num_pairs = chosen.numel()
    new = dict(dtype=x.dtype, device=x.device)
    h, y = torch.empty(num_pairs, inner, **new), torch.empty(num_pairs, size, **new)
    if not num_pairs:
        return y
    if tiles is None:
        tiles = tiles_for(x, num_pairs / num_experts)
    pairs, tile_experts, _ = align(chosen, num_experts, tiles.block_m)
    options = dict(
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    mxfp4_gate_up_kernel[len(tile_experts), triton.cdiv(2 * inner, tiles.block_n)](
        x, *as_words(gate_up), h, pairs, tile_experts, num_pairs, inner, size, x.stride(0),
        LIMIT=SWIGLU_LIMIT, ALPHA=SWIGLU_ALPHA, TOP_K=chosen.shape[1], **options,
    )  # fmt: skip
    mxfp4_down_kernel[len(tile_experts), triton.cdiv(size, tiles.block_n)](
        h, *as_words(down), y, pairs, tile_experts, num_pairs, size, inner, **options
    )
    return y


def tiles_for(x: Tensor, rows: float) -> Tiles:
    """rows: that an expert has on average."""
    if rows <= 8:
        return FEW
    has_wgmma = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    return TALL if rows > 32 and has_wgmma else MIDDLE


def as_words(stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """The same memory with eight codes to a number of 32 bits."""
    return stack.codes.view(torch.int32), stack.exponents, stack.bias


def check(x: Tensor, chosen: Tensor, gate_up: Stack, down: Stack) -> tuple[int, int, int]:
    """(E, H, I). Raises ValueError unless x: [T, H] bfloat16, chosen: [T, k] int64 and both stacks
    fit each other, on one device.
    """
    check_rows(x, chosen, (torch.bfloat16,))
    num_experts, size, half = down.codes.shape
    inner = 2 * half
    for name, stack, rows, columns in (
        ("gate_up", gate_up, 2 * inner, x.shape[1]),
        ("down", down, x.shape[1], inner),
    ):
        accepted = dict(
            codes=(torch.uint8, (rows, columns // 2)),
            exponents=(torch.uint8, (columns // MXFP4_BLOCK, rows)),
            bias=(x.dtype, (rows,)),
        )
        for part, (dtype, shape) in accepted.items():
            tensor, shape = getattr(stack, part), (num_experts, *shape)
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}.{part}: got {tensor.dtype} {tuple(tensor.shape)}; accepted: dense "
                    f"{dtype} {shape}"
                )
        if columns % MXFP4_BLOCK:
            raise ValueError(
                f"{name}: got {columns} columns; accepted: a multiple of {MXFP4_BLOCK}"
            )
        check_one_device(x=x, chosen=chosen, codes=stack.codes, exponents=stack.exponents)
    return num_experts, size, inner


def stack_of(weights: list[Mxfp4Weight], bias: Tensor) -> Stack:
    """The matrices of all experts in three tensors. bias: [E, N]."""
    codes = torch.stack([weight.codes for weight in weights])
    exponents = torch.stack([weight.exponents.T for weight in weights])
    return Stack(codes, exponents, bias.contiguous())


class GroupedMxfp4(nn.Module):
    """A layer of gpt-oss' experts without a loop. router: lesson 6's BiasedRouter."""

    def __init__(self, router: nn.Module, gate_up: Stack, down: Stack):
        super().__init__()
        self.router, self.gate_up, self.down = router, gate_up, down

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.router(x)
        return experts(x, weights, chosen, self.gate_up, self.down)
