"""Naive: codes become numbers, and the product is PyTorch's, in float64."""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import E8M0_BIAS, e2m1_numbers
from lessons.l19_kv_quantization.activations.block_scaled.operands import (
    BlockScaled,
    in_rows,
)


def dequantize(x: BlockScaled) -> Tensor:
    """[rows, K] float64, exact: a code has 2 significant bits, a block's scale 4, a row's 24."""
    rows, columns = x.shape
    scales = in_rows(x.atoms, rows, columns // x.block)
    if scales.dtype == torch.uint8:  # E8M0
        scales = torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - E8M0_BIAS))
    numbers = e2m1_numbers(x.codes).double().unflatten(1, (-1, x.block))
    return (numbers * scales.double()[..., None]).flatten(1) * x.row_scale.double()[:, None]


def block_scaled_matmul(a: BlockScaled, b: BlockScaled) -> Tensor:
    """a · bᵀ: [M, N] float64. a: of [M, K]; b: of [N, K]."""
    return dequantize(a) @ dequantize(b).T
