"""GPTQ: round one input column after the other, and let the columns that are left make up for it.

A linear layer should keep its outputs, so we minimize E |(Ŵ − W) x|². Suppose that some columns of
W are already rounded. Which values of the other columns, still free, are best? That is a
least-squares problem, and its solution needs only H = E[x xᵀ]: after column j has moved by its
rounding error, each free column k moves by

    w[:, k] −= (w[:, j] − ŵ[:, j]) / U[j, j] · U[j, k],        Uᵀ U = H⁻¹, U upper triangular

Row j of U is row j of the inverse of H restricted to the columns j … K − 1, up to a factor, so one
Cholesky decomposition holds the solutions of all K steps. test_gptq.py solves the least-squares
problem of every step in full and finds the same codes.

Source: Frantar et al. 2022, GPTQ, equations 2 and 3, section 3.3 and algorithm 1. desc_act in
files.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import Multiply, quantized
from lessons.l18_weight_quantization.methods.calibration import InputStatistics, layer_by_layer
from lessons.l18_weight_quantization.naive import (
    absmax,
    check_groups,
    dequantize_matmul,
    stored_scales,
    to_codes,
    zero_point,
)
from lessons.l18_weight_quantization.weights import GroupedInt, pack
from lessons.toolbox.model.arguments import check_positive, refuse

DAMPING = 0.01  # of the mean of H's diagonal: H of few inputs has no inverse
BLOCK = (
    128  # columns after which the ones further right are told: one large product, not 128 thin ones
)


def gptq(
    model: Decoder,
    windows: Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    act_order: bool = False,
    multiply: Multiply = dequantize_matmul,
) -> Decoder:
    """A twin of the model, the linear layers of its decoder layers quantized one layer after the
    other.

    windows: [count, length] int64, the calibration tokens. The rest as in `gptq_weight`.
    """

    def replace(layer: nn.Module, statistics: dict[str, InputStatistics]) -> nn.Module:
        def quantize(name: str, linear: nn.Linear) -> GroupedInt:
            gram = statistics[name].gram
            return gptq_weight(linear.weight, gram, bits, group_size, symmetric, act_order)

        return quantized(layer, quantize, multiply)

    return layer_by_layer(model, windows, replace)


def gptq_weight(
    weight: Tensor,
    gram: Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    act_order: bool = False,
    damping: float = DAMPING,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupedInt:
    """weight: [N, K]; gram: [K, K], the mean of x xᵀ -> whole numbers of 4 or 8 bits.

    group_size, symmetric: as in `round_to_nearest`. act_order: columns whose inputs are largest
    come first, while many columns are left to make up for them; groups are then runs of columns in
    that order. damping: this share of the mean of H's diagonal is added to it. Raises ValueError.
    """
    group_size = check_groups(weight, bits, group_size)
    columns = weight.shape[1]
    if gram.shape != (columns, columns):
        refuse(
            "gram",
            tuple(gram.shape),
            f"({columns}, {columns}), because weight has {columns} columns",
        )
    check_positive(damping=damping)
    left, gram, order = weight.detach().double(), gram.double(), None
    if act_order:
        order = gram.diagonal().argsort(descending=True, stable=True)
        left, gram = left[:, order], gram[order][:, order]
    codes, scales, zeros = round_columns(
        left.clone(), inverse_factor(gram, damping), bits, group_size, symmetric, scale_dtype
    )
    return GroupedInt(pack(codes, bits), scales, zeros, bits, group_size, order)


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """U, [K, K] upper triangular, with Uᵀ U the inverse of the damped gram. An input that never
    came counts like the mean input there, so its column is only rounded.
    """
    gram = gram.clone()
    diagonal = gram.diagonal()  # a view
    level = diagonal.mean()
    diagonal += damping * torch.where(level > 0, level, 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return torch.linalg.cholesky(inverse, upper=True)


def round_columns(
    left: Tensor,
    factor: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loop of GPTQ. left: [N, K] float64, overwritten; factor: U of `inverse_factor` -> codes
    [N, groups, group_size] uint8, scales [N, groups], zeros or None, as GroupedInt stores them.
    """
    rows, columns = left.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=left.device)
    errors = torch.empty_like(left)
    scales, zeros = [], []
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        for j in range(start, end):
            if j % group_size == 0:
                # Columns of this group that lie beyond the block have not been told of it yet.
                group = left[:, j : j + group_size].clone()
                told = errors[:, start:j] @ factor[start:j, end : j + group_size]
                group[:, max(end - j, 0) :] -= told
                scale, zero = (absmax if symmetric else zero_point)(group[:, None], bits)
                scales.append(stored_scales(scale, scale_dtype))
                zeros.append(zero)
            codes[:, j], rounded = round_column(left[:, j], scales[-1], zeros[-1], bits)
            errors[:, j] = (left[:, j] - rounded) / factor[j, j]
            left[:, j + 1 : end] -= errors[:, j, None] * factor[j, j + 1 : end]
        left[:, end:] -= errors[:, start:end] @ factor[start:end, end:]
    zeros = None if symmetric else torch.cat(zeros, dim=1).to(torch.uint8)
    return codes.unflatten(1, (-1, group_size)), torch.cat(scales, dim=1), zeros


def round_column(
    column: Tensor, scale: Tensor, zero: Tensor | None, bits: int
) -> tuple[Tensor, Tensor]:
    """column: [N]; scale, zero: [N, 1] -> its codes, [N] uint8, and what they mean, [N] float64."""
    wide = scale.to(column.dtype)
    codes = to_codes(column[:, None, None], wide, zero, bits).view(-1)
    middle = 2 ** (bits - 1) if zero is None else zero.view(-1)
    return codes, (codes.to(column.dtype) - middle) * wide.view(-1)
