"""Checkpoints that round what a layer receives as well as its matrix (W8A8, W4A8), as their schemes
ask (reference/checkpoints/inputs.py).

The definition is one for all formats: inputs become codes and numbers again, and meet the numbers
that the matrix stands for. Where lessons 18 and 19 have a product that multiplies the codes as they
are, it is taken.

    matrix                               inputs          product
    8 bits, a scale for each output      the same type   lesson 19, w8a8_matmul
    4 bits, groups or rows               8 bits          lesson 19, w4a8_matmul
    any other, or zero points of inputs  8 bits          `rounded`, then the matrix's own product

A token's own scale is that of all its inputs. Where ranks have some of them each, they tell each
other the smallest and the largest first: two numbers a token.
"""

from functools import partial

import torch
from torch import Tensor

from lessons.l18_weight_quantization.linear import Multiply
from lessons.l18_weight_quantization.weights import (
    Float8Weight,
    GroupedInt,
    QuantizedWeight,
    unpack,
)
from lessons.l19_kv_quantization.activations.w4a8 import w4a8_matmul
from lessons.l19_kv_quantization.activations.w8a8 import (
    EightBits,
    Int8Weight,
    quantize_tokens,
    w8a8_matmul,
)
from lessons.l19_kv_quantization.formats import wide
from lessons.l20_parallelism.processes.group import Group
from reference.checkpoints.inputs import Rounding

LOWEST, HIGHEST = -128, 127  # codes of int8


def rounded_product(
    weight: QuantizedWeight, rounding: Rounding, multiply: Multiply, ranks: Group | None = None
) -> tuple[QuantizedWeight, Multiply]:
    """The matrix as its product takes it, and that product: (x, weight, bias) -> [T, N]. multiply:
    the product of the matrix with inputs that are not rounded. ranks: those that have the other
    inputs of a layer; None: x has all.
    """
    found, inner = weight, None
    if rounding.is_symmetric:
        if (codes := eight_bits(weight, rounding.kind)) is not None:
            found, inner = codes, w8a8_matmul
            if rounding.scale is not None:
                inner = partial(w8a8_matmul, x_scale=rounding.scale)
        elif isinstance(weight, GroupedInt) and weight.bits == 4:
            how = dict(name=rounding.kind, x_scale=rounding.scale, otherwise=multiply)
            inner = partial(w4a8_matmul, **how)

    def product(
        x: Tensor,
        weight: QuantizedWeight,
        bias: Tensor | None,
        x_scale: Tensor | None = rounding.scale,
        x_zero: Tensor | None = rounding.zero,
    ) -> Tensor:
        how = rounding._replace(scale=x_scale, zero=x_zero)
        return multiply(rounded(x, how), weight, bias)

    inner = inner or product
    if ranks is None or rounding.scale is not None:
        return found, inner

    def product_of_part(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        return inner(x, weight, bias, **of_all_inputs(x, rounding, ranks))

    return found, product_of_part


def of_all_inputs(x: Tensor, rounding: Rounding, ranks: Group) -> dict[str, Tensor]:
    """x_scale: [T, 1], of all inputs of each token, and x_zero where it has one. x: [T, K / P],
    those that are here.
    """
    numbers = wide(x)
    ends = torch.stack([numbers.amin(-1), numbers.amax(-1)], dim=-1)
    ends = ranks.all_gather(ends)  # [T, 2 · P], whose scale is that of all numbers between
    if rounding.is_symmetric:
        return dict(x_scale=quantize_tokens(ends, rounding.kind)[1])
    scale, zero = scale_and_zero(ends)
    return dict(x_scale=scale, x_zero=zero)


def rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """x: [T, K] -> [T, K] in x's dtype: what its codes mean."""
    if rounding.is_symmetric:
        codes, scales = quantize_tokens(x, rounding.kind, rounding.scale)
        return (codes.to(scales.dtype) * scales).to(x.dtype)
    numbers = wide(x)
    scale, zero = rounding.scale, rounding.zero
    if scale is None:
        scale, zero = scale_and_zero(numbers)
    codes = (numbers / scale + zero).round().clamp(LOWEST, HIGHEST)
    return ((codes - zero) * scale).to(x.dtype)


def scale_and_zero(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token, where zero need not be a code's middle. numbers: [T, K] -> [T, 1] both."""
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)  # 0.0 must have a code
    scale = (high - low) / (HIGHEST - LOWEST)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, (LOWEST - low / scale).clamp(LOWEST, HIGHEST).round()


def eight_bits(weight: QuantizedWeight, kind: str) -> EightBits | None:
    """A matrix as lesson 19 multiplies it by codes of `kind`, "int8" or "fp8", with a scale for
    each output; None for other formats and for scales of groups or tiles, zero points, and columns
    in another order.
    """
    if isinstance(weight, Float8Weight) and kind == "fp8":
        is_e4m3 = weight.values.dtype == torch.float8_e4m3fn
        if is_e4m3 and weight.scales.shape in {(1, 1), (weight.shape[0], 1)}:
            scales = weight.scales.float().expand(weight.shape[0], 1)
            return Float8Weight(weight.values, scales.contiguous())
    if isinstance(weight, GroupedInt) and kind == "int8":
        has_row_scales = weight.bits == 8 and weight.group_size == weight.shape[1]
        is_symmetric = weight.zeros is None or bool((weight.zeros == 128).all())
        if has_row_scales and is_symmetric and weight.order is None:
            codes = unpack(weight.codes, 8, weight.group_size).flatten(1)
            return Int8Weight((codes.short() - 128).to(torch.int8), weight.scales.float())
    return None
