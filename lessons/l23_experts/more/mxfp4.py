"""gpt-oss' experts in 4 bits, all in three launches: codes leave memory as codes.

Lesson 18 has the format, MXFP4: a number is one of 16 (E2M1), and 32 neighbours of a row share a
power of two. Lesson 6 has the layer: gate and up in every other row, both clamped, and a bias for
each product. Run one by one, as in lesson 6, its experts make Python wait for the router in each
layer. Here nothing waits, and a CUDA graph can record the layer.

- **A number is its bits.** The three bits below the sign, moved to where bfloat16 has the end of
  its exponent and the beginning of its mantissa, are the number times 2⁻¹²⁶. Two products by powers
  of two make it the weight. All of it is exact in bfloat16, whose exponent is as wide as E8M0, so x
  has to be bfloat16 as well.
- **The rest is kernels.py.** The same sort, the same grid, and the same sum over a token's experts.

Sources: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3; gpt-oss model card
(2025), section 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l06_mla.gpt_oss import SWIGLU_ALPHA, SWIGLU_LIMIT
from lessons.l18_weight_quantization.weights import MXFP4_BLOCK, Mxfp4Weight
from lessons.l23_experts.kernels import rows_of_tile
from lessons.l23_experts.optimized import align, check_rows, weighted_sum
from lessons.toolbox.kernels.triton_ import tl, triton


class Stack(NamedTuple):
    """A matrix of each expert, [E, N, K]. codes: [E, N, K / 2] and exponents: [E, N, K / 32],
    uint8, as in lesson 18's Mxfp4Weight; bias: [E, N].
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


# By the most rows an expert has on average, as optimized.TILES. Chosen by the compiler (no spills).
TILES = {8: Tiles(16, 64, 128, 4, 3), 2**31: Tiles(64, 128, 64, 8, 3)}


@triton.jit
def scaled(code, exponent):
    """code: [N, K] uint8 below 16, exponent: [N, K] uint8 -> what they mean, as bfloat16."""
    code = code.to(tl.uint16)
    tiny = ((code & 8) << 12 | (code & 7) << 6).to(tl.bfloat16, bitcast=True)
    bits = exponent.to(tl.uint16) << 7
    bits = tl.where(exponent == 0, 0x0040, bits)  # 2^−127 is subnormal
    bits = tl.where(exponent == 255, 0x7FC0, bits)  # NaN
    # 2^126 first, because the other power may be so small that it would leave nothing of `tiny`
    return (
        tiny
        * tl.full((1, 1), 2.0**126, tl.bfloat16)
        * bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    )


@triton.jit
def load_weights(code_row, exponent_row, start, size, is_n, BLOCK_K: tl.constexpr):
    """Columns start … of rows of a matrix: [BLOCK_K, BLOCK_N] bfloat16, zeros where it ends.

    code_row, exponent_row: where the rows begin, [BLOCK_N, 1].
    """
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
    is_byte = is_n & (byte < size // 2)
    codes = tl.load(code_row + byte, mask=is_byte, other=0)
    # 16 bytes share an exponent; the neighbours' loads are one
    exponent = tl.load(exponent_row + byte // 16, mask=is_byte, other=127)
    low, high = scaled(codes & 15, exponent), scaled(codes >> 4, exponent)
    # not tl.trans of the whole: Triton 3.6 cannot compile that before Hopper's product
    both = tl.permute(tl.join(low, high), (1, 2, 0))
    return tl.reshape(both, (BLOCK_K, codes.shape[0]))


@triton.jit
def sum_of(
    x_row,
    codes_ptr,
    exponents_ptr,
    bias_ptr,
    row,
    is_row,
    n,
    outputs,
    size,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of x · Wᵀ + bias: [BLOCK_M, BLOCK_N] float32. row: [BLOCK_N] int64, the matrix's rows
    counted over all experts; n: [BLOCK_N], within the expert.
    """
    is_n = n < outputs
    code_row = codes_ptr + row[:, None] * (size // 2)
    exponent_row = exponents_ptr + row[:, None] * (size // 32)
    k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_M, n.shape[0]), tl.float32)
    for start in range(0, size, BLOCK_K):
        x = tl.load(x_row + start + k, mask=is_row & (start + k < size), other=0.0)
        w = load_weights(code_row, exponent_row, start, size, is_n[:, None], BLOCK_K)
        acc = tl.dot(x, w, acc)
    return acc + tl.load(bias_ptr + row, mask=is_n, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_pairs"])
def mxfp4_gate_up_kernel(
    x_ptr,
    codes_ptr,
    exponents_ptr,
    bias_ptr,
    h_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    inner,
    size,
    stride_x,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of h[pair] = (up + 1) · gate · sigmoid(ALPHA · gate). Row 2j of an
    expert's matrix is gate's row j, row 2j + 1 is up's. h: [num_pairs, inner].
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    x_row = x_ptr + pair // TOP_K * stride_x
    row = expert * (2 * inner) + n
    acc = sum_of(
        x_row,
        codes_ptr,
        exponents_ptr,
        bias_ptr,
        row,
        is_row,
        n,
        2 * inner,
        size,
        BLOCK_M,
        BLOCK_K,
    )
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    # A NaN stays one: a plain minimum would turn it into a number, and the answer would look right.
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    h = (up + 1) * gate * tl.sigmoid(ALPHA * gate)
    j = first // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    tl.store(h_ptr + pair * inner + j, h.to(h_ptr.dtype.element_ty), mask=is_row & (j < inner))


@triton.jit(do_not_specialize=["num_pairs"])
def mxfp4_down_kernel(
    h_ptr,
    codes_ptr,
    exponents_ptr,
    bias_ptr,
    y_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    size,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of y[pair] = h[pair] · downᵀ + bias. y: [num_pairs, size]."""
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h_row = h_ptr + pair * inner
    row = expert * size + n
    acc = sum_of(
        h_row,
        codes_ptr,
        exponents_ptr,
        bias_ptr,
        row,
        is_row,
        n,
        size,
        inner,
        BLOCK_M,
        BLOCK_K,
    )
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair * size + n[None, :], y, mask=is_row & (n[None, :] < size))


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
    x = x if x.stride(1) == 1 else x.contiguous()
    num_pairs = chosen.numel()
    new = dict(dtype=x.dtype, device=x.device)
    h, y = torch.empty(num_pairs, inner, **new), torch.empty(num_pairs, size, **new)
    if not num_pairs:
        return y
    if tiles is None:
        tiles = next(t for rows, t in TILES.items() if num_pairs <= rows * num_experts)
    pairs, tile_experts, _ = align(chosen, num_experts, tiles.block_m)
    options = dict(
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    mxfp4_gate_up_kernel[len(tile_experts), triton.cdiv(2 * inner, tiles.block_n)](
        x, *gate_up, h, pairs, tile_experts, num_pairs, inner, size, x.stride(0),
        LIMIT=SWIGLU_LIMIT, ALPHA=SWIGLU_ALPHA, TOP_K=chosen.shape[1], **options,
    )  # fmt: skip
    mxfp4_down_kernel[len(tile_experts), triton.cdiv(size, tiles.block_n)](
        h, *down, y, pairs, tile_experts, num_pairs, size, inner, **options
    )
    return y


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
        shapes = (rows, columns // 2), (rows, columns // MXFP4_BLOCK), (rows,)
        for part, tensor, shape in zip(Stack._fields, stack, shapes):
            fits = tensor.shape == (num_experts, *shape) and tensor.is_contiguous()
            is_code = tensor.dtype == torch.uint8
            if not fits or columns % MXFP4_BLOCK or is_code != (part != "bias"):
                raise ValueError(
                    f"{name}.{part}: got {tensor.dtype} {tuple(tensor.shape)}; accepted: dense "
                    f"{(num_experts, *shape)}, codes and exponents in torch.uint8, and a multiple "
                    f"of {MXFP4_BLOCK} columns"
                )
        check_one_device(x=x, chosen=chosen, codes=stack.codes, exponents=stack.exponents)
    return num_experts, size, inner


def stack_of(weights: list[Mxfp4Weight], bias: Tensor) -> Stack:
    """The matrices of all experts in three tensors. bias: [E, N]."""
    codes = torch.stack([weight.codes for weight in weights])
    return Stack(codes, torch.stack([weight.exponents for weight in weights]), bias.contiguous())


class GroupedMxfp4(nn.Module):
    """A layer of gpt-oss' experts without a loop. router: lesson 6's BiasedRouter."""

    def __init__(self, router: nn.Module, gate_up: Stack, down: Stack):
        super().__init__()
        self.router, self.gate_up, self.down = router, gate_up, down

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.router(x)
        return experts(x, weights, chosen, self.gate_up, self.down)
