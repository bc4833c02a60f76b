"""Checkpoints that round activations as well as weights (W8A8), run by lesson 19's product.

compressed-tensors says so for each scheme: 8-bit weights whose `input_activations` are 8 bits of
the same type, a scale for each token, found when the token arrives ("dynamic"). Other schemes
(scales that were found beforehand, one for a whole tensor) keep activations as they are, which is
more exact.
"""

from typing import Any

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.l18_weight_quantization.weights import (
    Float8Weight,
    GroupedInt,
    QuantizedWeight,
    unpack,
)
from lessons.l19_kv_quantization.activations.w8a8 import EightBits, Int8Weight, w8a8_matmul

FORMATS = {"int": "int8", "float": "fp8"}  # compressed-tensors' types, and lesson 19's names
WANTED = {"num_bits": 8, "strategy": "token", "dynamic": True}


def rounded_formats(config: dict[str, Any]) -> set[str]:
    """Of "int8" and "fp8" those whose layers round their inputs. config: a quantization_config that
    lesson 18 has read, so that its keys are known.
    """
    asked, others = set(), set()
    for scheme in (config.get("config_groups") or {}).values():
        weights, inputs = scheme["weights"], scheme.get("input_activations") or {}
        kind = weights.get("type") or "int"
        if weights.get("num_bits", 8) != 8:
            continue
        wanted = WANTED | {"type": kind}
        is_asked = (inputs | {"type": inputs.get("type") or "int"}).items() >= wanted.items()
        is_symmetric = inputs.get("symmetric", True)
        (asked if is_asked and is_symmetric else others).add(FORMATS[kind])
    return asked - others  # two schemes of one format cannot be told apart once they are read


def with_rounded_inputs(model: Decoder, config: dict[str, Any]) -> Decoder:
    """`model`, in place, its 8-bit layers multiplying codes by codes where the checkpoint says
    so.
    """
    formats = rounded_formats(config)
    for name, part in list(model.named_modules()) if formats else ():
        if isinstance(part, QuantizedLinear) and (found := eight_bits(part.quantized, formats)):
            model.set_submodule(name, QuantizedLinear(found, part.bias, w8a8_matmul))
    return model


def eight_bits(weight: QuantizedWeight, formats: set[str]) -> EightBits | None:
    """A matrix as lesson 19 multiplies it, with a scale for each output; None for other formats and
    for scales of groups or tiles, zero points, and columns in another order.
    """
    if isinstance(weight, Float8Weight) and "fp8" in formats:
        is_e4m3 = weight.values.dtype == torch.float8_e4m3fn
        if is_e4m3 and weight.scales.shape in {(1, 1), (weight.shape[0], 1)}:
            scales = weight.scales.float().expand(weight.shape[0], 1)
            return Float8Weight(weight.values, scales.contiguous())
    if isinstance(weight, GroupedInt) and "int8" in formats:
        has_row_scales = weight.bits == 8 and weight.group_size == weight.shape[1]
        is_symmetric = weight.zeros is None or bool((weight.zeros == 128).all())
        if has_row_scales and is_symmetric and weight.order is None:
            codes = unpack(weight.codes, 8, weight.group_size).flatten(1)
            return Int8Weight((codes.short() - 128).to(torch.int8), weight.scales.float())
    return None
