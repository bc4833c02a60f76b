"""The same four operations in PyTorch, in few passes: what generates where the kernels would be
interpreted.

A library's reduction and a hypotenuse take the place of five operations; results are written over
tensors that no other code holds.
"""

import math
from functools import cache

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As naive.rms_norm, to rounding. x: [..., N], weight: [N] -> [..., N]."""
    # torch.nn.functional.rms_norm(x, shape, weight, eps) would round once, after the weight, as
    # Gemma does.
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    size = x.shape[-1]
    # √(Σx² / N + ε) = √(Σx² + N·ε) / √N, and the squares are never stored
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    rms = length.hypot_(leg(size * eps, wide, x.device)).div_(math.sqrt(size))
    return (x / rms).to(x.dtype).mul_(weight)


@cache
def leg(square: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """√square as a tensor, which `hypot` asks for: []."""
    return torch.tensor(math.sqrt(square), dtype=dtype, device=device)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As naive.add_rms_norm, to rounding: residual += x in place, returns its norm. x, residual:
    [..., N], weight: [N].
    """
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As naive.silu_mul. gate, up: [..., I] -> [..., I]."""
    return torch.nn.functional.silu(gate).mul_(up)


def qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As naive.qk_norm, to rounding. q: [T, Hq, D], k: [T, Hkv, D], q_weight, k_weight: [D] -> like
    q, like k.
    """
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
