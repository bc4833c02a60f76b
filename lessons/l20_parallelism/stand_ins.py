"""What stands for the kernels on a CPU: rows sorted by expert, and two products for each expert that has
rows.

The rows of all experts are gathered once, so that each expert's are a slice and its results another one.
There is no loop over tokens. Where the kernels run, nobody may ask how many rows an expert has; here that
costs nothing.
"""

from itertools import pairwise

import torch
from torch import Tensor

from lessons.l03_kv_cache.checks import DECODE_DTYPES
from lessons.l07_kernel_fusion.stand_ins import silu_mul
from lessons.l20_parallelism.optimized import check_experts, check_sum

DTYPES = (*DECODE_DTYPES, torch.float64)  # a proof may want float64


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As optimized.experts; x may be float64."""
    y = expert_rows(x, chosen, gate_up, down)
    return weighted_sum(y, weights, chosen, len(gate_up))


def expert_rows(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As optimized.expert_rows."""
    check_experts(x, chosen, gate_up, down, DTYPES)
    num_experts, top_k = len(gate_up), chosen.shape[1]
    expert, pairs = chosen.flatten().sort(stable=True)
    starts = torch.searchsorted(expert, torch.arange(num_experts + 1, device=x.device)).tolist()
    rows = x[pairs // top_k]
    results = torch.empty_like(rows)
    for index, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            gate, up = (rows[start:end] @ gate_up[index].T).chunk(2, dim=-1)
            torch.mm(silu_mul(gate, up), down[index].T, out=results[start:end])
    return torch.empty_like(results).index_copy_(0, pairs, results)


def weighted_sum(y: Tensor, weights: Tensor, chosen: Tensor, num_experts: int) -> Tensor:
    """As optimized.weighted_sum."""
    check_sum(y, weights, chosen)
    y = y.unflatten(0, chosen.shape)  # [T, k, H]
    is_own = (chosen >= 0) & (chosen < num_experts)
    weights = weights.masked_fill(~is_own, 0)
    y = y.masked_fill(~is_own[..., None], 0)  # because 0 · NaN is NaN, and nobody wrote these rows
    wide = torch.promote_types(y.dtype, weights.dtype)
    return torch.einsum("tk,tkh->th", weights.to(wide), y.to(wide)).to(y.dtype)
