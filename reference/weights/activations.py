"""Checkpoints that round what a layer receives as well as its matrix (W8A8, W4A8), as their schemes
ask (reference/checkpoints/inputs.py).

The definition is one for all formats: inputs become codes and numbers again, and meet the numbers
that the matrix stands for. Where lessons 18 and 19 have a product that multiplies the codes as they
are, it is taken.

    matrix                               inputs          product
    8 bits, a scale for each output      the same type   lesson 19, w8a8_matmul
    4 bits, groups or rows               8 bits          lesson 19, w4a8_matmul
    any other, or zero points of inputs  8 bits          `rounded`, then the matrix's own product
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
from reference.checkpoints.inputs import Rounding

LOWEST, HIGHEST = -128, 127  # codes of int8


def rounded_product(
    weight: QuantizedWeight, rounding: Rounding, multiply: Multiply
) -> tuple[QuantizedWeight, Multiply]:
    """The matrix as its product takes it, and that product: (x, weight, bias) -> [T, N]. multiply:
    the product of the matrix with inputs that are not rounded.
    """
    if rounding.is_symmetric:
        found = eight_bits(weight, rounding.kind)
        if found is not None:
            return found, w8a8_matmul if rounding.scale is None else partial(
                w8a8_matmul, x_scale=rounding.scale
            )
        if isinstance(weight, GroupedInt) and weight.bits == 4:
            how = dict(name=rounding.kind, x_scale=rounding.scale, otherwise=multiply)
            return weight, partial(w4a8_matmul, **how)

    def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        return multiply(rounded(x, rounding), weight, bias)

    return weight, product


def rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """x: [T, K] -> [T, K] in x's dtype: what its codes mean."""
    if rounding.is_symmetric:
        codes, scales = quantize_tokens(x, rounding.kind, rounding.scale)
        return (codes.to(scales.dtype) * scales).to(x.dtype)
    numbers = wide(x)
    scale, zero = rounding.scale, rounding.zero
    if scale is None:
        low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)  # 0.0 must have a code
        scale = (high - low) / (HIGHEST - LOWEST)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        zero = (LOWEST - low / scale).clamp(LOWEST, HIGHEST).round()
    codes = (numbers / scale + zero).round().clamp(LOWEST, HIGHEST)
    return ((codes - zero) * scale).to(x.dtype)


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
