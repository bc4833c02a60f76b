"""W4A8: weights of 4 bits in groups, activations of 8. Few bytes for a decode step, and products of
codes for a prompt.

Lesson 18's groups have a scale for 128 inputs, so a scale is not outside of the whole sum over k,
as in W8A8. It is outside of its group's sum:

    out[t, n] = x_scale[t] · Σ_g w_scale[n, g] · part[t, n, g]
    part[t, n, g] = Σ_{k in g} x_code[t, k] · (w_code[n, k] − zero[n, g])

The inner sum has whole numbers alone. A code minus its zero point is a number from −15 to 15, which
INT8 holds and E4M3, too (it has every whole number up to 16). So 4 bits become 8 in registers
without any rounding, and a matrix unit multiplies them with the tokens' codes: int8 by int8 in
int32, or E4M3 by E4M3 in float32 ("W4AFP8"). A byte's two codes are half a group apart, so a step
is one product: the low halves beside the high ones. A group that is longer than a step, such as a
whole row, applies its scale after each.

Naive: `w4a8_by_numbers`. Optimized: `w4a8_matmul`.

Sources: Lin et al. 2024, QServe, section 4 (W4A8 and its groups); vLLM, CompressedTensorsW4A8Int
and CompressedTensorsW4A8Fp8.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from lessons.l09_flash_attention.tiles import has_e4m3
from lessons.l18_weight_quantization.linear import Multiply
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.l19_kv_quantization.activations.w8a8 import quantize_tokens, tokens_as_codes
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.arguments import refuse

LEAST_BYTES = 32  # of a row of W in a step, because a matrix unit takes 32 numbers of 8 bits
MOST_BYTES = 64  # two codes each: the 128 numbers of a common group


def w4a8_by_numbers(
    x: Tensor,
    weight: GroupedInt,
    bias: Tensor | None = None,
    name: str = "int8",
    x_scale: Tensor | None = None,
) -> Tensor:
    """Naive: x: [T, K] -> [T, N] in x's dtype: tokens become codes of `name`, "int8" or "fp8", and
    numbers again, before a product of numbers. x_scale: [1], or None for each token's own.
    """
    codes, scales = quantize_tokens(x, name, x_scale)
    numbers, matrix = codes.to(scales.dtype) * scales, weight.dequantize().to(scales.dtype)
    out = linear(numbers, matrix, None if bias is None else bias.to(scales.dtype))
    return out.to(x.dtype)


def w4a8_matmul(
    x: Tensor,
    weight: GroupedInt,
    bias: Tensor | None = None,
    name: str = "int8",
    x_scale: Tensor | None = None,
    otherwise: Multiply = dequantize_matmul,
) -> Tensor:
    """Optimized: the same by `w4a8_kernel`, on a GPU that multiplies the codes. Elsewhere, and for
    groups of fewer than 64 inputs, the rounded tokens meet the matrix in `otherwise`, a product
    of lesson 18: (x, weight, bias) -> [T, N].
    """
    codes, scales = tokens_as_codes(x, name, x_scale)
    has_units = x.is_cuda and (name == "int8" or has_e4m3(x.device))
    if not has_units or step_of(weight.group_size // 2) is None:
        numbers = (codes.to(scales.dtype) * scales).to(x.dtype)
        return otherwise(numbers, weight, bias)
    return grouped_product(codes, scales, weight, bias, x.dtype)


def step_of(group_bytes: int) -> int | None:
    """Bytes of a row that the kernel takes at a time: a power of two; None for a group that is too
    short. A group that is no multiple of it ends in a step of which a part is masked.
    """
    if group_bytes < LEAST_BYTES:
        return None
    return MOST_BYTES if group_bytes % MOST_BYTES == 0 else LEAST_BYTES


@triton.jit
def in_order(packed):
    """[N, bytes] -> [N, 2 · bytes] codes: the low halves of the bytes, then the high ones."""
    pairs = tl.permute(tl.join(packed & 15, packed >> 4), (0, 2, 1))  # [N, 2, bytes]
    return tl.reshape(pairs, (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def zeros_of(zero_ptr, place, is_column):
    """[N, 1] int16, at these places; 8 where the matrix has no zero points."""
    if zero_ptr is None:
        return 8
    else:
        return tl.load(zero_ptr + place, mask=is_column, other=0)[:, None].to(tl.int16)


@triton.jit
def w4a8_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    x_scale_ptr,
    w_scale_ptr,
    zero_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    num_groups,
    stride_xt,
    stride_wn,
    stride_sn,
    stride_sg,
    stride_zn,
    stride_zg,
    stride_ot,
    GROUP_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """One program: BLOCK_M tokens by BLOCK_N outputs. x: [T, K] codes; w: [N, K / 2] bytes, as
    GroupedInt keeps them; w_scale, zero: [N, groups]; zero may be None for 8.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_tokens, column < num_outputs
    x_row = x_ptr + row[:, None].to(tl.int64) * stride_xt
    w_row = w_ptr + column[:, None].to(tl.int64) * stride_wn
    IS_INT: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    both = tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    STEPS: tl.constexpr = (GROUP_BYTES + BLOCK_BYTES - 1) // BLOCK_BYTES
    for step in range(num_groups * STEPS):
        group, start = step // STEPS, step % STEPS * BLOCK_BYTES
        byte = start + tl.arange(0, BLOCK_BYTES)[None, :]
        is_w = is_column[:, None] & (byte < GROUP_BYTES)
        packed = tl.load(w_row + group * GROUP_BYTES + byte, mask=is_w, other=0)
        zero = zeros_of(zero_ptr, column * stride_zn + group * stride_zg, is_column)
        number = in_order(packed).to(tl.int16) - zero
        k = both
        if STEPS > 1 or GROUP_BYTES != BLOCK_BYTES:
            k = both // BLOCK_BYTES * GROUP_BYTES + start + both % BLOCK_BYTES
        is_x = is_row[:, None] & (start + both % BLOCK_BYTES < GROUP_BYTES)
        x = tl.load(x_row + 2 * group * GROUP_BYTES + k, mask=is_x, other=0.0)
        if IS_INT:
            part = tl.dot(x, tl.trans(number.to(tl.int8)), out_dtype=tl.int32)
        else:
            eight = number.to(tl.float32).to(x.dtype)  # exact: at most 15
            # Hopper keeps 14 bits of a sum of E4M3 products: each step's is added in float32
            part = tl.dot(x, tl.trans(eight), max_num_imprecise_acc=2 * BLOCK_BYTES)
        place = column * stride_sn + group * stride_sg
        scale = tl.load(w_scale_ptr + place, mask=is_column, other=0.0).to(tl.float32)
        acc += part.to(tl.float32) * scale[None, :]
    acc *= tl.load(x_scale_ptr + row, mask=is_row, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0)[None, :].to(tl.float32)
    place = out_ptr + row[:, None].to(tl.int64) * stride_ot + column[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def blocks_of(num_tokens: int) -> dict[str, int]:
    """w4a8_kernel's tiles. Few tokens take few rows, 16 at least, as a matrix unit does."""
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens)))
    return {"BLOCK_M": block_m, "BLOCK_N": 64}


def warps_of(block_m: int) -> int:
    """Warps for a tile: with four, the sums of 64 tokens leave too few registers on Blackwell."""
    return 8 if block_m >= 64 else 4


def grouped_product(
    codes: Tensor,
    scales: Tensor,
    weight: GroupedInt,
    bias: Tensor | None,
    dtype: torch.dtype,
    blocks: dict[str, int] | None = None,
) -> Tensor:
    """codes: [T, K] int8 or float8_e4m3fn, and scales: [T, 1] float32, of the tokens -> [T, N] of
    dtype. blocks: None takes those of `blocks_of`. Raises ValueError.
    """
    (count, width), (outputs, inputs) = codes.shape, weight.shape
    if weight.bits != 4 or width != inputs:
        refuse("codes, weight", f"{width} inputs, {weight.bits} bits", f"{inputs} inputs, 4 bits")
    step = step_of(weight.group_size // 2)
    if step is None:
        refuse("group_size", weight.group_size, f"{2 * LEAST_BYTES} or more")
    if weight.order is not None:  # a token's scale is the same for its columns in any order
        codes = codes.view(torch.uint8).index_select(1, weight.order).view(codes.dtype)
    if codes.stride(1) != 1 or weight.codes.stride(1) != 1 or not scales.is_contiguous():
        refuse("codes, weight, scales", "other strides", "dense rows")
    out = torch.empty(count, outputs, dtype=dtype, device=codes.device)
    if out.numel():
        blocks = blocks or blocks_of(count)
        grid = triton.cdiv(count, blocks["BLOCK_M"]), triton.cdiv(outputs, blocks["BLOCK_N"])
        zeros = weight.zeros
        w4a8_kernel[grid](
            codes,
            weight.codes,
            out,
            scales,
            weight.scales,
            zeros,
            bias,
            count,
            outputs,
            weight.scales.shape[1],
            codes.stride(0),
            weight.codes.stride(0),
            *weight.scales.stride(),
            *((0, 0) if zeros is None else zeros.stride()),
            out.stride(0),
            GROUP_BYTES=weight.group_size // 2,
            BLOCK_BYTES=step,
            **blocks,
            num_warps=warps_of(blocks["BLOCK_M"]),
            num_stages=3,
        )
    return out
