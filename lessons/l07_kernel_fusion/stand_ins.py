"""The same four operations in PyTorch, in few passes: what generates where the kernels would be
interpreted.

One call to a library's reduction takes the place of square and mean; results are written over
tensors that no other code holds.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As naive.rms_norm, to rounding. x: [..., N], weight: [N] -> [..., N]."""
    # torch.nn.functional.rms_norm(x, shape, weight, eps) would round once, after the weight, as
    # Gemma does.
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    # √ of the sum of squares, which are never stored
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    rstd = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * rstd).to(x.dtype).mul_(weight)


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
