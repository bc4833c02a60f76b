"""The small operations between the matrix products, as PyTorch runs them eagerly: a chain of passes
over memory each.

Every line that makes a tensor is one kernel launch: it reads its operands from memory and writes
its result back. Read `rms_norm` with that in mind, then `add_rms_norm`, `silu_mul`, `qk_norm`,
`softmax`; last `relu_linear` and `swiglu`, where the chain begins with a product. `traffic.py`
counts the bytes.

Sources: RMSNorm (Zhang & Sennrich 2019, equation 4); SwiGLU (Shazeer 2020, section 2); QK-norm
(Henry et al. 2020, section 3.1, here with RMSNorm as in Qwen3 and OLMo 2); softmax with the maximum
taken out (Milakov & Gimelshein 2018, algorithm 2).
"""

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x: [...] in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def normed(x: Tensor, eps: float) -> Tensor:
    """x / √(mean of squares + eps) along the last dimension, in float32 at least. x: [..., N] ->
    [..., N].
    """
    # float16 overflows when it squares 256
    wide = widened(x)
    # no mean is subtracted: that is LayerNorm's
    mean_square = wide.square().mean(-1, keepdim=True)
    # eps inside the root: a row of zeros stays zeros
    return wide * torch.rsqrt(mean_square + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as Llama rounds it: to x's dtype before the weight. x: [..., N], weight: [N] -> [...,
    N].
    """
    return weight * normed(x, eps).to(x.dtype)


def rms_norm_gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as Gemma rounds it: last. Its checkpoints hold the weight minus 1. x: [..., N],
    weight: [N] -> [..., N].
    """
    return (normed(x, eps) * (1 + widened(weight))).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Where a branch joins the residual stream: residual += x, in place; returns
    rms_norm(residual).

    x, residual: [..., N], weight: [N] -> [..., N]. The sum is rounded to its dtype first: that is
    what the next junction adds to.
    """
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, the elementwise part of SwiGLU; silu(z) = z · sigmoid(z). gate, up: [..., I]
    -> [..., I].
    """
    return torch.nn.functional.silu(gate) * up


def relu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """relu(x · weightᵀ): a product, then a pass over its result. x: [R, K], weight: [I, K], as
    nn.Linear keeps it -> [R, I].
    """
    return torch.relu(x @ weight.T)


def swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """The first half of an MLP: two products, then silu_mul over their results.

    x: [R, K], gate_weight, up_weight: [I, K] -> [R, I].
    """
    return silu_mul(x @ gate_weight.T, x @ up_weight.T)


def qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head by itself. q: [T, Hq, D], k: [T, Hkv, D], q_weight, k_weight: [D] ->
    like q, like k.
    """
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


def softmax(x: Tensor) -> Tensor:
    """exp(x - max) / sum of the same, along the last dimension, in float32 at least. x: [..., N] ->
    [..., N].
    """
    wide = widened(x)
    # exp(x) alone overflows float32 above 88
    weights = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
