"""The least time of a model's matrix products in each format, from a chip's data sheet.

A product reads its matrix once and does two FLOPs for each weight and each token. So

    t = max(P · bits / 8 / W, 2 · P · B / F)

and it turns from memory to arithmetic at B = bits · F / (16 · W).
"""

from dataclasses import dataclass

import torch

from lessons.l01_roofline.models import find_model
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
    compute_s = 2 * weights * batch / data_sheet.peak_flops_per_s(kind.arithmetic)
    return max(memory_s, compute_s)


def turning_batch(name: str, chip: str = "h200") -> float:
    """The batch from which a format's products are bound by arithmetic."""
    kind, data_sheet = FORMATS[name], CHIPS[chip]
    ridge = data_sheet.peak_flops_per_s(kind.arithmetic) / data_sheet.memory_bytes_per_s
    return kind.bits / 16 * ridge


def meeting_batch(chip: str = "h200") -> float:
    """The batch at which INT4, bound by BF16's arithmetic, takes as long as FP8, bound by its bytes."""
    data_sheet, bits = CHIPS[chip], FORMATS["FP8"].bits
    peak = data_sheet.peak_flops_per_s(FORMATS["INT4"].arithmetic)
    return bits / 16 * peak / data_sheet.memory_bytes_per_s
