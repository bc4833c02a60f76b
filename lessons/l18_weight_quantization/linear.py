"""A linear layer over a quantized matrix, and a model made of such layers.

    twin = quantized(model, lambda name, linear: round_to_nearest(linear.weight, bits=4))

The twin shares everything but the matrices that were quantized with the model that it was made
from.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.weights import QuantizedWeight

Multiply = Callable[[Tensor, QuantizedWeight, Tensor | None], Tensor]


class QuantizedLinear(nn.Module):
    """An nn.Linear whose matrix is quantized. multiply: (x, weight, bias) -> [T, N]: naive.py's
    `dequantize_matmul`, or optimized.py's dispatch to a kernel. rounds_inputs: whether it rounds x
    first (lesson 19), so that no product of numbers may take its place.
    """

    has_own_product = True  # so it is not merged with its neighbours

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        multiply: Multiply,
        rounds_inputs: bool = False,
    ):
        super().__init__()
        self.quantized, self.bias, self.multiply = weight, bias, multiply
        self.rounds_inputs = rounds_inputs
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return self.multiply(x, self.quantized, self.bias)


def quantized(
    model: Decoder,
    quantize: Callable[[str, nn.Linear], QuantizedWeight | None],
    multiply: Multiply,
) -> Decoder:
    """A twin of `model` whose linear layers are quantized; everything else is shared.

    quantize: called with each nn.Linear and its name in the model, "layers.0.self_attn.q_proj";
    None leaves the layer as it is. lm_head is not offered, because it may share its matrix with the
    embedding, and because an error there moves every logit at once.
    """

    def replace(name: str, linear: nn.Linear) -> nn.Module:
        weight = quantize(name, linear)
        return linear if weight is None else QuantizedLinear(weight, linear.bias, multiply)

    return with_linears(model, nn.Linear, replace)


def with_linears(
    model: nn.Module, kind: type, replace: Callable[[str, nn.Module], nn.Module]
) -> nn.Module:
    """A twin of `model` in which replace(name, part) replaces each part of exactly the type
    `kind`, lm_head left out; everything else is shared.
    """

    def twin_of(module: nn.Module, name: str) -> nn.Module:
        if type(module) is kind:
            return replace(name, module)
        children = {
            child: twin_of(part, f"{name}.{child}" if name else child)
            for child, part in module.named_children()
            if child != "lm_head"
        }
        if any(children[child] is not module.get_submodule(child) for child in children):
            module = copy.copy(module)
            # Its own dictionary, because a shallow copy would share it with the original.
            module._modules = {**module._modules, **children}
        return module

    return twin_of(model, "")


def dequantized(model: Decoder) -> Decoder:
    """A twin whose QuantizedLinears are plain nn.Linears with what the codes mean, in the model's
    dtype. Its answers are the same up to the rounding of sums, and it runs like the model that was
    never quantized. For measurements that run a model often.
    """

    def plain(_: str, part: QuantizedLinear) -> nn.Linear:
        return linear_of(part.quantized.dequantize().to(model.dtype), part.bias)

    return with_linears(model, QuantizedLinear, plain)


def linear_of(matrix: Tensor, bias: Tensor | None) -> nn.Linear:
    """The nn.Linear of a matrix that is there already: [N, K]."""
    with torch.device("meta"):  # no memory for a second one
        linear = nn.Linear(*matrix.shape[::-1], bias=bias is not None)
    linear.weight = nn.Parameter(matrix, requires_grad=False)
    linear.bias = bias
    return linear
