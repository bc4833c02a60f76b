"""The least time of a model's matrix products in each format, from a chip's data sheet.

A product reads its matrix once and does two FLOPs for each weight and each token. So

    t = max(P · bits / 8 / W, 2 · P · B / F)

and it turns from memory to arithmetic at B = bits · F / (16 · W).
"""

from dataclasses import dataclass

import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.toolbox.measure.hardware import CHIPS


@dataclass(frozen=True)
class Format:
    """How weights are stored, and in what they are multiplied."""

    bits: float  # of a weight, scales and zeros included
    arithmetic: torch.dtype


FORMATS = {
    "BF16": Format(16, torch.bfloat16),
    "INT8": Format(8 + 16 / 128, torch.bfloat16),
    "FP8": Format(8, torch.float8_e4m3fn),
    "INT4": Format(4 + 20 / 128, torch.bfloat16),
}


def weights_of_layers(model: str = "llama-3-8b") -> int:
    """Weights of all layers' matrices, without embedding and head."""
    shape = find_model(model)
    return int(shape.layer_params(shape.num_experts))


def floor_s(name: str, batch: int, chip: str = "h200", model: str = "llama-3-8b") -> float:
    """Seconds that the products of one decode step need at least."""
    kind, data_sheet, weights = FORMATS[name], CHIPS[chip], weights_of_layers(model)
    memory_s = weights * kind.bits / 8 / data_sheet.memory_bytes_per_s
    return max(memory_s, 2 * weights * batch / peak(name, chip))


def peak(name: str, chip: str = "h200") -> float:
    """FLOP/s of a format's products. A chip without units for FP8 multiplies in BF16."""
    data_sheet, arithmetic = CHIPS[chip], FORMATS[name].arithmetic
    if arithmetic == torch.float8_e4m3fn and data_sheet.fp8_flops_per_s is None:
        arithmetic = torch.bfloat16
    return data_sheet.peak_flops_per_s(arithmetic)


def turning_batch(name: str, chip: str = "h200") -> float:
    """The batch from which a format's products are bound by arithmetic."""
    return FORMATS[name].bits / 16 * peak(name, chip) / CHIPS[chip].memory_bytes_per_s


def meeting_batch(chip: str = "h200") -> float:
    """The batch at which INT4, bound by BF16's arithmetic, takes as long as FP8, bound by its
    bytes.
    """
    bits = FORMATS["FP8"].bits
    return bits / 16 * peak("INT4", chip) / CHIPS[chip].memory_bytes_per_s
