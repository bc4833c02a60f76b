"""How a checkpoint asks for a layer's inputs to be rounded, before they meet its matrix.

Its scheme says how ("input_activations" of compressed-tensors, "activation_scheme" of FP8), and
beside the matrix may be what calibration found: `input_scale`, which transformers' FP8 calls
`activation_scale`, and `input_zero_point` where zero need not be a code's middle.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lessons.toolbox.model.arguments import refuse
from reference.checkpoints.layouts import FLOATS, Parts

KINDS = {"int": "int8", "float": "fp8"}  # compressed-tensors' types, and lesson 19's names
SCALES = ("input_scale", "activation_scale")
READS = "num_bits type strategy symmetric dynamic"
HARMLESS = "observer observer_kwargs actorder scale_dtype zp_dtype group_size block_structure"


class Rounding(NamedTuple):
    """What a layer does with its inputs. kind: "int8" or "fp8". is_symmetric: without zero points.
    scale, zero: [1] float32, found beforehand; None: each token's own, found as it comes.
    """

    kind: str
    is_symmetric: bool = True
    scale: Tensor | None = None
    zero: Tensor | None = None

    def to(self, device: torch.device) -> "Rounding":
        """The same on another device."""
        scale, zero = (x if x is None else x.to(device) for x in (self.scale, self.zero))
        return self._replace(scale=scale, zero=zero)


class Inputs(NamedTuple):
    """What a scheme says. is_static: the scale is beside the matrix. may_lack_scale: inputs of a
    layer without one keep their type.
    """

    kind: str
    is_symmetric: bool = True
    is_static: bool = False
    may_lack_scale: bool = False

    def read(self, parts: Parts) -> Rounding | None:
        """What the layer does; None: nothing. parts: those beside its matrix. Raises ValueError
        where its scale is missing or of another shape.
        """
        if not self.is_static:
            return Rounding(self.kind, self.is_symmetric)
        name = next((name for name in SCALES if name in parts), SCALES[0])
        if name not in parts and self.may_lack_scale:
            return None
        scale, zero = one_number(parts, name), None
        if not bool(scale.isfinite()) or not bool(scale > 0):
            raise ValueError(f"{name}: got {scale.item()}; accepted: a finite number above 0")
        if not self.is_symmetric:
            zero = one_number(parts, "input_zero_point")
        return Rounding(self.kind, self.is_symmetric, scale, zero)


def one_number(parts: Parts, name: str) -> Tensor:
    """[1] float32. Raises ValueError for none, or for several."""
    kinds = (*FLOATS, torch.int8, torch.uint8, torch.int32)
    found = parts.get(name)
    if found is None or found.numel() != 1 or found.dtype not in kinds:
        got = None if found is None else list(found.shape)
        refuse(
            name, got, "one number, because the checkpoint's inputs have a scale found beforehand"
        )
    return found.float().view(1)


def inputs_of(said: dict[str, Any] | None) -> Inputs | None:
    """A scheme's input_activations. None where inputs keep their type: nothing is said, or a format
    that the engine multiplies in 16 bits, as vLLM does on chips without such units (FP4), or
    groups of a token (DeepSeek's FP8). Raises ValueError for others.
    """
    if said is None:
        return None
    if not isinstance(said, dict):
        refuse("input_activations", said, "null, or an object")
    for key in said.keys() - set(f"{READS} {HARMLESS}".split()):
        if said[key] is not None:
            refuse(f"input_activations.{key}", said[key], f"one of the keys {READS}")
    bits, kind = said.get("num_bits", 8), said.get("type") or "int"
    strategy = said.get("strategy") or "tensor"
    if not isinstance(kind, str):
        refuse("input_activations.type", kind, "int or float")
    if kind == "float" and (bits == 4 or strategy in ("group", "block")):
        return None
    if bits != 8 or kind not in KINDS:
        refuse("input_activations", f"{bits} bits, {kind}", "8 bits, int or float; 4 bits, float")
    if strategy not in ("token", "tensor"):
        refuse("input_activations.strategy", strategy, "token or tensor")
    is_static = said.get("dynamic", False) is False
    if is_static and strategy == "token":
        refuse("input_activations.dynamic", False, "true for a scale for each token")
    is_symmetric = said.get("symmetric", True) is not False
    if kind == "float" and not is_symmetric:
        refuse("input_activations.symmetric", False, "true for float")
    return Inputs(KINDS[kind], is_symmetric, is_static)
