"""What replaces the kernels on a CPU: rows sorted by expert, and two products for each expert that
has rows.

The rows of all experts are gathered once, so that each expert's are a slice and its results another
one. There is no loop over tokens. Where the kernels run, Python may not ask how many rows an expert
has; here that costs nothing.
"""

from itertools import pairwise

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l07_kernel_fusion.stand_ins import silu_mul
from lessons.l23_experts.optimized import check_experts, check_sum

DTYPES = (*DECODE_DTYPES, torch.float64)  # a proof may want float64


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As optimized.experts, [T, H] -> [T, H]; x may be float64."""
    y = expert_rows(x, chosen, gate_up, down)
    return weighted_sum(y, weights, chosen, len(gate_up))


def expert_rows(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As optimized.expert_rows: [T, H] -> [T · k, H]."""
    check_experts(x, chosen, gate_up, down, DTYPES)
    expert, pairs = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(down) + 1, device=x.device)
    edges = torch.searchsorted(expert, numbers).tolist()  # where each expert's rows begin and end
    gate, up = by_segment(x[pairs // chosen.shape[1]], gate_up, edges).chunk(2, dim=-1)
    rows = by_segment(silu_mul(gate, up), down, edges)
    return torch.empty_like(rows).index_copy_(0, pairs, rows)


def by_segment(rows: Tensor, weights: Tensor, edges: list[int]) -> Tensor:
    """rows[first : end] · weights[e]ᵀ of each expert e, one after the other; rows of none are not
    written. rows: [R, K]; weights: [E, N, K]; edges: E + 1 -> [R, N].
    """
    out = rows.new_empty(len(rows), weights.shape[1])
    for weight, (first, end) in zip(weights, pairwise(edges)):
        if first < end:
            torch.mm(rows[first:end], weight.T, out=out[first:end])
    return out


def weighted_sum(y: Tensor, weights: Tensor, chosen: Tensor, num_experts: int) -> Tensor:
    """As optimized.weighted_sum: [T · k, H] -> [T, H]."""
    check_sum(y, weights, chosen)
    y = y.unflatten(0, chosen.shape)  # [T, k, H]
    is_own = (chosen >= 0) & (chosen < num_experts)
    weights = weights.masked_fill(~is_own, 0)
    y = y.masked_fill(
        ~is_own[..., None], 0
    )  # because 0 · NaN is NaN, and these rows were not written
    wide = torch.promote_types(y.dtype, weights.dtype)
    return torch.einsum("tk,tkh->th", weights.to(wide), y.to(wide)).to(y.dtype)
