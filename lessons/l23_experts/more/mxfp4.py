"""gpt-oss' experts in 4 bits, all in three launches: codes leave memory as codes.

Lesson 18 has the format, MXFP4: a number is one of 16 (E2M1), and 32 neighbours of a row share a
power of two. Lesson 6 has the layer: gate and up in every other row, both clamped, and a bias for
each product. Run one by one, as in lesson 6, its experts make Python wait for the router in each
layer. Here nothing waits, and a CUDA graph can record the layer.

- **A number is its bits.** The three bits below the sign, moved to where bfloat16 has the end of
  its exponent and the beginning of its mantissa, are the number times 2⁻¹²⁶. Two products by powers
  of two make it the weight. All of it is exact in bfloat16, whose exponent is as wide as E8M0, so x
  has to be bfloat16 as well.
- **Two codes at once.** A thread takes 32 bits, eight codes. One shift and one mask move two of
  them, 16 bits apart, into place. They are no neighbours, so x is reordered instead of the weights.
- **Weights on the left.** They come out of registers, and Hopper's matrix unit takes the left one of
  its two matrices from there. So a tile is computed as W · xᵀ.
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


# By the most rows an expert has on average, as optimized.TILES. Chosen by predicted time among those
# whose products the compiler does not put one after the other, and that spill nothing.
TILES = {
    8: Tiles(16, 64, 128, 4, 3),
    32: Tiles(64, 64, 128, 4, 3),
    2**31: Tiles(128, 64, 128, 4, 3),
}


@triton.jit
def power_of_two(exponent):
    """2^(exponent − 127) as bfloat16, NaN for 255. exponent: uint8."""
    bits = exponent.to(tl.uint16) << 7
    bits = tl.where(exponent == 0, 0x0040, bits)  # 2^−127 is subnormal
    bits = tl.where(exponent == 255, 0x7FC0, bits)  # NaN
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpacked(words):
    """Eight codes in each of `words`: [BLOCK_N, blocks, 4] int32 -> [BLOCK_N, blocks, 32] bfloat16,
    the numbers times 2^−126, those of a word in the order of `interleaved`.
    """
    words = words.to(tl.uint32, bitcast=True)
    # the sign and the three bits below it, of two codes at once: of columns 0 and 4, then 1 and 5 …
    a = (words << 12) & 0x80008000 | (words << 6) & 0x01C001C0
    b = (words << 8) & 0x80008000 | (words << 2) & 0x01C001C0
    c = (words << 4) & 0x80008000 | (words >> 2) & 0x01C001C0
    d = words & 0x80008000 | (words >> 6) & 0x01C001C0
    pairs = tl.join(tl.join(a, c), tl.join(b, d))  # the last two places of a: 0, 0; of b: 0, 1
    both = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return tl.reshape(both.to(tl.bfloat16, bitcast=True), (words.shape[0], words.shape[1], 32))


@triton.jit
def load_exponents(exponent_column, start, size, outputs, is_n, BLOCK_K: tl.constexpr):
    """Those of columns start …: [BLOCK_K / 32, BLOCK_N] uint8. exponent_column: where the first of
    each row of the matrix is, [1, BLOCK_N]; that of the next block is `outputs` further.
    """
    block = start // 32 + tl.arange(0, BLOCK_K // 32)[:, None]
    return tl.load(
        exponent_column + block * outputs, mask=is_n[None, :] & (block < size // 32), other=127
    )


@triton.jit
def load_weights(word_row, exponents, start, size, is_n, BLOCK_K: tl.constexpr):
    """Columns start … of rows of a matrix: [BLOCK_N, BLOCK_K] bfloat16, zeros where it ends.

    word_row: where the rows begin, [BLOCK_N, 1].
    """
    block = start // 32 + tl.arange(0, BLOCK_K // 32)[None, :, None]
    word = block * 4 + tl.arange(0, 4)[None, None, :]
    is_block = is_n[:, None, None] & (block < size // 32)
    tiny = unpacked(tl.load(word_row[:, :, None] + word, mask=is_block, other=0))
    power = tl.trans(power_of_two(exponents))[:, :, None]  # of each block
    # 2^126 first, because the other power may be so small that it would leave nothing of `tiny`
    w = tiny * tl.full((1, 1, 1), 2.0**126, tl.bfloat16) * power
    return tl.reshape(w, (tiny.shape[0], BLOCK_K))


@triton.jit
def sum_of(
    x_row,
    words_ptr,
    exponents_ptr,
    bias_ptr,
    expert,
    is_row,
    n,
    outputs,
    size,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of x · Wᵀ + bias: [BLOCK_M, BLOCK_N] float32. expert: int64; n: [BLOCK_N], rows of its
    matrix.
    """
    is_n = n < outputs
    row = expert * outputs + n
    word_row = words_ptr + row[:, None] * (size // 32 * 4)  # seen to be a multiple of 16 bytes
    exponent_column = exponents_ptr + expert * outputs * (size // 32) + n[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((n.shape[0], BLOCK_M), tl.float32)
    exponents = load_exponents(exponent_column, 0, size, outputs, is_n, BLOCK_K)
    for start in range(0, size, BLOCK_K):
        # a step ahead by hand: a thread's piece is too small for the copies that Triton starts ahead
        ahead = load_exponents(exponent_column, start + BLOCK_K, size, outputs, is_n, BLOCK_K)
        x = tl.load(x_row + start + k, mask=is_row & (start + k < size), other=0.0)
        w = load_weights(word_row, exponents, start, size, is_n, BLOCK_K)
        acc = tl.dot(w, tl.trans(x), acc)
        exponents = ahead
    return tl.trans(acc) + tl.load(bias_ptr + row, mask=is_n, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_pairs"])
def mxfp4_gate_up_kernel(
    x_ptr,
    words_ptr,
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
    expert's matrix is gate's row j, row 2j + 1 is up's. x: [T, size] and h: [num_pairs, inner],
    their columns as `interleaved` orders them.
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    x_row = x_ptr + pair // TOP_K * stride_x
    acc = sum_of(
        x_row,
        words_ptr,
        exponents_ptr,
        bias_ptr,
        expert,
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
    h = tl.permute(tl.reshape(h, (BLOCK_M, BLOCK_N // 16, 2, 4)), (0, 1, 3, 2))  # as `interleaved`
    h = tl.reshape(h, (BLOCK_M, BLOCK_N // 2)).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair * inner + j, h, mask=is_row & (j < inner))


@triton.jit(do_not_specialize=["num_pairs"])
def mxfp4_down_kernel(
    h_ptr,
    words_ptr,
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
    acc = sum_of(
        h_row,
        words_ptr,
        exponents_ptr,
        bias_ptr,
        expert,
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
    x = interleaved(x)
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
        x, *as_words(gate_up), h, pairs, tile_experts, num_pairs, inner, size, x.stride(0),
        LIMIT=SWIGLU_LIMIT, ALPHA=SWIGLU_ALPHA, TOP_K=chosen.shape[1], **options,
    )  # fmt: skip
    mxfp4_down_kernel[len(tile_experts), triton.cdiv(size, tiles.block_n)](
        h, *as_words(down), y, pairs, tile_experts, num_pairs, size, inner, **options
    )
    return y


def interleaved(x: Tensor) -> Tensor:
    """Of each eight columns of x: [T, K] 0, 4, 1, 5, 2, 6, 3, 7. The kernels take the codes of a
    32-bit word two by two, those of columns 0 and 4 first, because one shift moves both into place.
    A sum over columns may have any order, and x is easier to reorder than weights.
    """
    return x.reshape(len(x), x.shape[1] // 8, 2, 4).transpose(2, 3).reshape(x.shape)


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
