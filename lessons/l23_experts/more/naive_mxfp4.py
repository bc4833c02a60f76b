"""The readable twin of mxfp4.py: lesson 6's loop over gpt-oss' experts, each dequantized first."""

import torch
from torch import Tensor

from lessons.l06_mla.gpt_oss import gated
from lessons.l18_weight_quantization.weights import Mxfp4Weight
from lessons.l23_experts.more.mxfp4 import Stack


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Stack, down: Stack) -> Tensor:
    """As mxfp4.experts, expert by expert: [T, H] -> [T, H]; x may be float64."""
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        if not 0 <= expert < len(down.codes):
            continue  # of another rank
        token, place = torch.where(chosen == expert)
        h = gated(product(x[token], gate_up, expert))
        share = product(h, down, expert) * weights[token, place, None]
        out.index_add_(0, token, share.to(out.dtype))
    return out


def product(x: Tensor, stack: Stack, expert: int) -> Tensor:
    """x · Wᵀ + bias of one expert: [T, K] -> [T, N] in x's dtype."""
    matrix = Mxfp4Weight(stack.codes[expert], stack.exponents[expert].T).dequantize()
    return x @ matrix.to(x.dtype).T + stack.bias[expert].to(x.dtype)
