"""W4A4: both sides of a product in 4 bits. Naive: codes become numbers before an ordinary product.

A token has one scale, absmax / 7, and so has each output's row of the weight. This is where
outliers hurt most: with 15 codes for a token, one channel that is 100 times as large leaves 0 for
all others. Chips with tensor cores for INT4 (sm_75 to sm_89) multiply such codes. Blackwell
multiplies FP4 with a scale for each 16 (lesson 18's NVFP4), which `nvfp4_tokens` makes of
activations; block_scaled/ is a kernel that does so.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, with_linears
from lessons.l18_weight_quantization.methods.nvfp4 import (
    LARGEST_CODE,
    LARGEST_SCALE,
    block_scales,
    to_nvfp4,
)
from lessons.l18_weight_quantization.naive import grouped, nonzero, round_to_nearest, to_e2m1
from lessons.l18_weight_quantization.weights import (
    NVFP4_BLOCK,
    QuantizedWeight,
    e2m1_numbers,
    neighbours_packed,
)

LARGEST = 7  # of a code with a sign, as absmax has it


def int4_tokens(x: Tensor) -> Tensor:
    """x: [T, K] -> [T, K]: each token rounded to whole numbers from −7 to 7 times its scale."""
    scales = nonzero(x.abs().amax(-1, keepdim=True) / LARGEST)
    return (x / scales).round() * scales


def nvfp4_tokens(x: Tensor) -> Tensor:
    """x: [T, K] -> [T, K]: each token rounded to NVFP4, its larger scale its own. (A checkpoint
    brings one for all tokens, input_global_scale, because it is found beforehand.)
    """
    blocks = grouped(x, NVFP4_BLOCK)
    whole = nonzero(x.float().abs().amax(-1, keepdim=True)) / (LARGEST_CODE * LARGEST_SCALE)
    scales = (block_scales(blocks, whole).float() * whole)[..., None]
    codes = neighbours_packed(to_e2m1(blocks / scales).flatten(1))
    return (e2m1_numbers(codes).view_as(blocks) * scales).flatten(1).to(x.dtype)


def int4_rows(weight: Tensor) -> QuantizedWeight:
    """weight: [N, K] -> a scale for each output, symmetric."""
    return round_to_nearest(weight, 4, None, symmetric=True, scale_dtype=torch.float32)


FORMATS = {"int4": (int4_tokens, int4_rows), "nvfp4": (nvfp4_tokens, to_nvfp4)}


def by_numbers(round_tokens: Callable[[Tensor], Tensor]) -> Callable:
    """The product (x, weight, bias) -> [T, N] whose x is rounded first."""

    def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        return linear(round_tokens(x), weight.dequantize().to(x.dtype), bias)

    return multiply


def w4a4(model: Decoder, name: str) -> Decoder:
    """A twin whose linear layers, all but lm_head, have 4 bits on both sides. name: of FORMATS."""
    round_tokens, round_weight = FORMATS[name]
    multiply = by_numbers(round_tokens)

    def replace(_: str, layer: nn.Linear) -> nn.Module:
        return QuantizedLinear(round_weight(layer.weight), layer.bias, multiply)

    return with_linears(model, nn.Linear, replace)
