"""The readable twin of fp8.py: a loop over experts, each dequantized first, over rows that are
rounded to FP8 and back.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from lessons.l18_weight_quantization.kernels.fp8 import LARGEST
from lessons.l18_weight_quantization.weights import TILE
from lessons.l23_experts.more.fp8 import Stack


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [M, K] -> values [M, K] float8_e4m3fn and scales [M, ⌈K / 128⌉] float32: the largest
    magnitude of each group becomes 448.
    """
    size = x.shape[1]
    groups = pad(x.float(), (0, -size % TILE)).unflatten(1, (-1, TILE))
    # NaN is no magnitude, unless a group holds nothing else
    scales = groups.abs().nan_to_num(0, posinf=torch.inf).amax(-1) / LARGEST
    scales = torch.where(scales == 0, 1, scales).masked_fill(groups.isnan().all(-1), torch.nan)
    values = (groups / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, :size].contiguous(), scales


def rounded(x: Tensor) -> Tensor:
    """x: [M, K] as FP8 holds it, in x's dtype or wider."""
    return dequantized(*quantize_groups(x), torch.promote_types(x.dtype, torch.float32))


def dequantized(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What quantize_groups made, as numbers of this dtype: [M, K]."""
    scales = scales.to(dtype).repeat_interleave(TILE, 1)
    return values.to(dtype) * scales[:, : values.shape[1]]


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Stack, down: Stack) -> Tensor:
    """As fp8.experts, expert by expert: [T, H] -> [T, H]; x may be float64."""
    out, inner = torch.zeros_like(x), down.values.shape[2]
    tiles = gate_up.scales.shape[1] // 2
    for expert in chosen.unique().tolist():
        if not 0 <= expert < len(down.values):
            continue  # of another rank
        token, place = torch.where(chosen == expert)
        values, scales = gate_up.values[expert], gate_up.scales[expert]
        row = rounded(x[token])
        gate = product(row, values[:inner], scales[:tiles]).to(x.dtype)
        up = product(row, values[inner:], scales[tiles:]).to(x.dtype)
        h = rounded(silu(gate) * up)
        share = product(h, down.values[expert], down.scales[expert]).to(x.dtype)
        out.index_add_(0, token, (share * weights[token, place, None]).to(out.dtype))
    return out


def product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """x · Wᵀ: [M, K] -> [M, N] in x's dtype. scales: [⌈N / 128⌉, ⌈K / 128⌉]."""
    wide = scales.to(x.dtype).repeat_interleave(TILE, 0)[: len(values)]
    matrix = values.to(x.dtype) * wide.repeat_interleave(TILE, 1)[:, : values.shape[1]]
    return x @ matrix.T
