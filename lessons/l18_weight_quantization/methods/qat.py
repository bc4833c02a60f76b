"""Quantization-aware training: the model learns with rounded weights, so it learns weights that
round well.

    student = prepared(model, quantize)        # multiplies by rounded weights
    ...                                        # any training loop
    model = finished(student, dequantize_matmul)

Rounding has no useful gradient: it is 0 between two codes. The straight-through estimator pretends
that it is 1, so the gradient of the loss at the rounded weight moves the unrounded one, which is
kept in full precision until it crosses to another code.

Sources: Bengio et al. 2013, Estimating or Propagating Gradients Through Stochastic Neurons, section
4; Jacob et al. 2018, Quantization and Training of Neural Networks, section 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import Multiply, QuantizedLinear, with_linears
from lessons.l18_weight_quantization.weights import QuantizedWeight

Quantize = Callable[[Tensor], QuantizedWeight]  # [N, K] -> the same, quantized


class RoundedLinear(nn.Module):
    """A linear layer that multiplies by its rounded matrix and learns the unrounded one."""

    def __init__(self, linear: nn.Linear, quantize: Quantize):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        self.quantize = quantize

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return nn.functional.linear(x, straight_through(self.weight, self.quantize), self.bias)


def straight_through(weight: Tensor, quantize: Quantize) -> Tensor:
    """What the rounded matrix means, [N, K]; its gradient goes to `weight` as it is."""
    rounded = quantize(weight).dequantize().to(weight.dtype)
    # the difference is a constant to autograd, so the sum's gradient is that of weight alone
    return weight + (rounded - weight).detach()


def prepared(model: Decoder, quantize: Quantize) -> Decoder:
    """A twin of the model that trains with rounded matrices in its linear layers, lm_head left out.
    Everything else is shared, so deepcopy the twin before you train more than its RoundedLinears.
    """
    return with_linears(model, nn.Linear, lambda _, linear: RoundedLinear(linear, quantize))


@torch.no_grad()
def finished(student: Decoder, multiply: Multiply) -> Decoder:
    """The quantized model that the student has been all along: its outputs do not change."""

    def replace(_: str, part: RoundedLinear) -> QuantizedLinear:
        bias = None if part.bias is None else part.bias.detach()
        return QuantizedLinear(part.quantize(part.weight), bias, multiply)

    return with_linears(student, RoundedLinear, replace)
