"""The argument `quantization`: a model's weights in fewer bits, while it is loaded.

    model = load_model("models/tiny", quantization="int4")

A checkpoint that is quantized already says so itself; then the argument may repeat its
quant_method, as guides do, and changes nothing. Weights alone get fewer bits. So "fp8" is W8A16
here; in vLLM it rounds the activations as well, on GPUs that multiply FP8.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch import nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l18_weight_quantization import optimized
from lessons.l18_weight_quantization.kernels import stand_ins
from lessons.l18_weight_quantization.linear import Multiply, quantized
from lessons.l18_weight_quantization.methods.awq import awq
from lessons.l18_weight_quantization.methods.calibration import WINDOW, WINDOWS, calibration_windows
from lessons.l18_weight_quantization.methods.gptq import gptq
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.naive import (
    dequantize_matmul,
    round_to_nearest,
    to_float8,
    to_mxfp4,
    to_nf4,
)
from lessons.l18_weight_quantization.weights import QuantizedWeight
from lessons.toolbox.model.arguments import refuse
from reference.checkpoints.quantization_config import METHODS as STORED_METHODS
from reference.checkpoints.quantized_checkpoint import KEPT_DENSE

GROUP_SIZE = 128
ROUNDED = ("int8", "int4", "fp8", "nf4", "mxfp4", "nvfp4")  # look at the weights alone
CALIBRATED = ("gptq", "awq")  # look at what the layers receive, too
METHODS = (*ROUNDED, *CALIBRATED)
# vLLM's names for the same: its kernel says nothing of the numbers
ALIASES = {"gptq_marlin": "gptq", "awq_marlin": "awq", "modelopt_fp4": "modelopt"}
ALIASES |= {"inc": "auto-round"}
# what vLLM's "bitsandbytes" makes of a model that is not quantized
IN_FLIGHT = {"bitsandbytes": "nf4"}
# what a checkpoint says of itself
STORED = (*(name for name in STORED_METHODS if "/" not in name), "gguf")
ACCEPTED = (*METHODS, *ALIASES, *(name for name in STORED if name not in METHODS))


@dataclass(frozen=True)
class Settings:
    """How to quantize. group_size: inputs that share a scale, for int4, awq and gptq (and int8, if
    it is given); None: 128, or what of it divides every layer; 0: one scale a row. bits: of awq and
    gptq. symmetric: no zero points. act_order: GPTQ's desc_act. windows: how many stretches of the
    built-in text awq and gptq look at. fp8_per: what shares a scale, "row", "tensor" or "block".
    """

    bits: int = 4
    group_size: int | None = None
    symmetric: bool = False
    act_order: bool = False
    windows: int = WINDOWS
    fp8_per: str = "row"
    double_quantization: bool = True


def multiply_for(device: torch.device, dtype: torch.dtype) -> Multiply:
    """The product of every quantized layer: the kernels on a GPU, what stands for them on a CPU."""
    if dtype not in DECODE_DTYPES:
        return dequantize_matmul
    return optimized.matmul if device.type == "cuda" else stand_ins.matmul


def check_method(method: str | None, name: str = "quantization") -> None:
    """Raise ValueError for a name that neither a method nor a kind of checkpoint has."""
    if method is not None and (not isinstance(method, str) or method not in ACCEPTED):
        refuse(name, method, f"None, {', '.join(ACCEPTED)}")


def check_stored(method: str | None, stored: str) -> None:
    """Raise ValueError where the argument names another method than the checkpoint does. stored:
    its quant_method, "gguf" for a .gguf file.
    """
    if method is not None and ALIASES.get(method, method) != stored:
        refuse("quantization", method, f"None or {stored!r}, as the checkpoint is quantized")


def quantize_model(
    model: Decoder, method: str, tokenizer: Callable, settings: Settings | None = None
) -> Decoder:
    """A twin of a model as load_decoder returns it. method: one of METHODS, or vLLM's name of one.
    tokenizer: called for the model's tokenizer if the method needs a text. Raises ValueError.
    """
    method = ALIASES.get(method, method)
    method = IN_FLIGHT.get(method, method)
    if method not in METHODS:
        refuse("quantization", method, f"{', '.join(METHODS)} for a model that is not quantized")
    settings = settings or Settings()
    if method in ROUNDED:
        rounding = partial(rounded, method, settings, group_size_of(model, settings))
        multiply = multiply_for(model.device, model.dtype)
        twin = quantized(model, lambda name, linear: named(name, rounding, linear), multiply)
    else:
        twin = calibrated(model, method, tokenizer(), settings)
    return with_dense_latents(twin, model)


def rounded(method: str, settings: Settings, group: int | None, linear: nn.Linear):
    """One matrix, by rounding to nearest. Raises ValueError for a shape that the format cannot
    have.
    """
    weight = linear.weight
    if method == "int8":
        return round_to_nearest(weight, 8, group if settings.group_size else None, symmetric=True)
    if method == "int4":
        return round_to_nearest(weight, 4, group, settings.symmetric)
    if method == "fp8":
        return to_float8(weight, per=settings.fp8_per)
    if method == "nf4":
        return to_nf4(weight, settings.double_quantization)
    return to_mxfp4(weight) if method == "mxfp4" else to_nvfp4(weight)


def named(name: str, rounding: Callable, linear: nn.Linear) -> QuantizedWeight:
    """rounding(linear). Raises ValueError that names the layer."""
    try:
        return rounding(linear)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def calibrated(model: Decoder, method: str, tokenizer, settings: Settings) -> Decoder:
    """awq or gptq, with the built-in text."""
    length = min(WINDOW, model.config.max_position_embeddings)
    windows = calibration_windows(tokenizer, settings.windows, length)
    shared = dict(
        bits=settings.bits,
        group_size=group_size_of(model, settings),
        symmetric=settings.symmetric,
        multiply=multiply_for(model.device, model.dtype),
    )
    if method == "awq":
        return awq(model, windows, **shared)
    return gptq(model, windows, act_order=settings.act_order, **shared)


def group_size_of(model: Decoder, settings: Settings) -> int | None:
    """The group size that was asked for, None for rows; by default the largest divisor of 128 that
    divides the inputs of every layer.
    """
    if settings.group_size is not None:
        return settings.group_size or None
    linears = [part for name, part in model.named_modules() if type(part) is nn.Linear]
    return gcd(GROUP_SIZE, *(linear.in_features for linear in linears))


def with_dense_latents(twin: Decoder, model: Decoder) -> Decoder:
    """The twin with DeepSeek's kv_b_proj as it was, because absorption multiplies by its rows."""
    for name, module in model.named_modules():
        if name.endswith(KEPT_DENSE):
            twin.set_submodule(name, module)
    return twin
