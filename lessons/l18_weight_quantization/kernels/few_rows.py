"""A model whose 4-bit matrices are multiplied by tensor_cores.cu where x has few rows, and as
before where it has more. Each such matrix is then in memory twice, in both orders.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lessons.l18_weight_quantization.kernels.cuda_tensor_cores import (
    ROWS,
    TYPES,
    w4a16_tensor_cores,
)
from lessons.l18_weight_quantization.kernels.fragments import Fragments, to_fragments
from lessons.l18_weight_quantization.linear import Multiply, QuantizedLinear, with_linears
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l18_weight_quantization.weights import GroupedInt, QuantizedWeight

log = logging.getLogger(__name__)
TRIED = 16, 256  # outputs and inputs of the first product


@dataclass(frozen=True)
class FewRows:
    """The product of one layer. fragments: its matrix for up to 16 rows; otherwise: the product for
    more rows, and for float32.
    """

    fragments: Fragments
    otherwise: Multiply

    def __call__(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        """x: [M, K] -> [M, N]."""
        if len(x) > ROWS[-1] or x.dtype not in TYPES:
            return self.otherwise(x, weight, bias)
        return w4a16_tensor_cores(x, self.fragments, bias)


def with_tensor_cores(model: nn.Module) -> nn.Module:
    """A twin of a model whose quantized layers of 4 bits multiply few rows by tensor_cores.cu. It
    is the model itself where that kernel does not run; the log says why.
    """
    layers = [part for part in model.modules() if type(part) is QuantizedLinear]
    weights = [layer.quantized for layer in layers if not layer.rounds_inputs]
    of_four_bits = [w for w in weights if isinstance(w, GroupedInt) and w.bits == 4]
    if not of_four_bits:
        return model
    if reason := why_not_on(of_four_bits[0].codes.device):
        log.warning("few rows are multiplied by the kernel for many: %s", reason)
        return model

    def replaced(_: str, layer: QuantizedLinear) -> nn.Module:
        if layer.rounds_inputs:
            return layer
        try:
            fragments = to_fragments(layer.quantized)
        except ValueError:  # another format, or groups that the kernel does not read
            return layer
        return QuantizedLinear(layer.quantized, layer.bias, FewRows(fragments, layer.multiply))

    return with_linears(model, QuantizedLinear, replaced)


def why_not_on(device: torch.device) -> str | None:
    """Why tensor_cores.cu does not run on a device; None where it does. A small product is tried,
    because a compiler, a driver or a chip may be missing, and a model must load without them.
    """
    outputs, inputs = TRIED
    numbers = torch.arange(outputs * inputs, device=device).view(TRIED).sin()
    weight = round_to_nearest(numbers, 4, 64)
    x = torch.ones(1, inputs, dtype=torch.float16, device=device)
    try:
        found = w4a16_tensor_cores(x, to_fragments(weight))
    except Exception as error:  # whatever it is: a model needs no such kernel
        return str(error)
    expected = dequantize_matmul(x.float(), weight)
    if not torch.allclose(found.float(), expected, rtol=1e-2, atol=0.05):
        return "its first product is wrong"
    return None
