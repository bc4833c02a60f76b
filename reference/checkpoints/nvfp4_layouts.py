"""The two layouts of NVFP4 in files, which hold the same bytes under other names. Read layouts.py
first.

    compressed-tensors, nvfp4-pack-quantized        ModelOpt
    weight_packed         uint8, [N, K / 2]         weight           the same
    weight_scale          E4M3, [N, K / 16]         weight_scale     the same
    weight_global_scale   float32, [1]: divided by  weight_scale_2   float32, []: multiplied by
    input_global_scale    float32, [1]              input_scale      float32, []

The scales of inputs say how a chip with units for FP4 rounds activations. Here activations keep 16
bits, as in vLLM on chips without such units, so they change nothing.

Sources: compressed-tensors, compressors/nvfp4/base.py and its converter of ModelOpt's files; vLLM,
modelopt.py.
"""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import NVFP4_BLOCK, Nvfp4Weight, QuantizedWeight
from reference.checkpoints.layouts import Layout, Parts, expect

CACHE_SCALES = ("k_scale", "v_scale")  # of an FP8 cache, beside the layer that makes K or V


def nvfp4_pack_quantized() -> Layout:
    """compressed-tensors' "nvfp4-pack-quantized"."""

    def read(parts: Parts, shape: tuple[int, int]) -> Nvfp4Weight:
        codes, scales = codes_and_scales(parts, "weight_packed", shape)
        divisor = one_number(parts, "weight_global_scale")
        return Nvfp4Weight(codes, scales, 1 / divisor)

    def write(weight: QuantizedWeight) -> Parts:
        check_nvfp4(weight, "nvfp4-pack-quantized")
        return {
            "weight_packed": weight.codes,
            "weight_scale": weight.scales,
            # Exactly what was read: one divided by a rounded reciprocal of x need not be x, but
            # its own reciprocal is the rounded one again (tried for all float32 mantissas).
            "weight_global_scale": 1 / weight.tensor_scale,
        }

    ends = ("weight_packed", "weight_scale", "weight_global_scale")
    unread = ("input_global_scale", "weight_shape")
    return Layout("nvfp4-pack-quantized", "weight_packed", ends, read, write, unread)


def modelopt_nvfp4() -> Layout:
    """NVIDIA ModelOpt's NVFP4."""

    def read(parts: Parts, shape: tuple[int, int]) -> Nvfp4Weight:
        codes, scales = codes_and_scales(parts, "weight", shape)
        return Nvfp4Weight(codes, scales, one_number(parts, "weight_scale_2"))

    def write(weight: QuantizedWeight) -> Parts:
        check_nvfp4(weight, "modelopt")
        return {
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_scale_2": weight.tensor_scale[0],
        }

    ends = ("weight", "weight_scale", "weight_scale_2")
    unread = ("input_scale", *CACHE_SCALES)
    return Layout("modelopt", "weight_scale_2", ends, read, write, unread)


def codes_and_scales(parts: Parts, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[N, K / 2] uint8 and [N, K / 16] E4M3. Raises ValueError for parts that do not fit."""
    rows, columns = shape
    if columns % NVFP4_BLOCK:
        raise ValueError(f"{name}: got {columns} columns; accepted: multiples of {NVFP4_BLOCK}")
    codes = expect(parts, name, (rows, columns // 2), torch.uint8)
    scales = (rows, columns // NVFP4_BLOCK)
    return codes, expect(parts, "weight_scale", scales, torch.float8_e4m3fn)


def one_number(parts: Parts, name: str) -> Tensor:
    """The scale of a matrix: [1] float32. Files also write it []. Raises ValueError for several,
    because a merged matrix of which each part has its own is not read here, and for 0 or less.
    """
    if name in parts and parts[name].ndim == 0:
        parts = parts | {name: parts[name].view(1)}
    number = expect(parts, name, (1,), torch.float32)
    if not (bool(number > 0) and bool(number.isfinite())):
        raise ValueError(f"{name}: got {number.item()}; accepted: a finite number above 0")
    return number


def check_nvfp4(weight: QuantizedWeight, name: str) -> None:
    """Raise ValueError for another format."""
    if not isinstance(weight, Nvfp4Weight):
        raise ValueError(f"{name}: got {type(weight).__name__}; accepted: Nvfp4Weight")
