"""What the pictures show: a matrix of the embedded model in every format, and two weights whose
inputs go together.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from torch import Tensor

from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.gguf.gguf_encode import to_gguf
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.naive import (
    per_tensor,
    round_to_nearest,
    to_float8,
    to_mxfp4,
    to_nf4,
)

MODEL = "models/tiny"
WEIGHT_NAME = "layers.4.mlp.down_proj"


@cache
def weight_with_an_outlier() -> Tensor:
    """[384, 1024] float32: the matrix of the embedded model whose largest weight stands out
    most.
    """
    model = load_decoder(MODEL)
    return model.get_submodule(WEIGHT_NAME).weight.detach().float()


@dataclass(frozen=True)
class Row:
    """One matrix in one format. values: [N, K] float32; error: ‖Ŵ − W‖ / ‖W‖."""

    name: str
    bits: float
    values: Tensor
    error: float


@lru_cache(maxsize=1)
def formats_of(weight: Tensor) -> list[Row]:
    """A matrix, [N, K] float32, in the formats of the lesson, from many bits to few."""
    found = {
        "INT8, one scale a row": round_to_nearest(weight, 8, None, symmetric=True),
        "E4M3, one scale a row": to_float8(weight),
        "Q6_K": to_gguf(weight, "Q6_K"),
        "INT4, groups of 32": round_to_nearest(weight, 4, 32),
        "Q4_K": to_gguf(weight, "Q4_K"),
        "NVFP4": to_nvfp4(weight),
        "MXFP4": to_mxfp4(weight),
        "INT4, groups of 128": round_to_nearest(weight, 4, 128),
        "NF4, double quantization": to_nf4(weight),
        "INT4, one scale a row": round_to_nearest(weight, 4, None),
        "INT4, one scale in all": per_tensor(weight, 4, symmetric=False),
        "Q2_K": to_gguf(weight, "Q2_K"),
    }
    rows = [Row("BF16", 16, weight, 0.0)]
    for name, quantized in found.items():
        values = quantized.dequantize()
        error = float((values - weight).norm() / weight.norm())
        rows.append(Row(name, quantized.bits_per_weight, values, error))
    return rows


@dataclass(frozen=True)
class TwoWeights:
    """Two weights as they are, rounded to the nearest, and rounded with feedback. The errors are
    mean squares of the output's change.
    """

    weight: tuple[float, float]
    nearest: tuple[float, float]
    moved: tuple[float, float]  # the second weight after the first was rounded
    feedback: tuple[float, float]
    nearest_error: float
    feedback_error: float


def rounded_with_feedback(weight: tuple[float, float], correlation: float) -> TwoWeights:
    """GPTQ on two weights and whole numbers. The inputs have variance 1 and this correlation c, so
    a change (d1, d2) changes the output by d1² + 2 c d1 d2 + d2² in the mean.
    """

    def error(codes: tuple[float, float]) -> float:
        d1, d2 = (code - old for code, old in zip(codes, weight))
        return d1**2 + 2 * correlation * d1 * d2 + d2**2

    first, second = weight
    nearest = (float(round(first)), float(round(second)))
    moved = (nearest[0], second - correlation * (nearest[0] - first))
    feedback = (nearest[0], float(round(moved[1])))
    return TwoWeights(weight, nearest, moved, feedback, error(nearest), error(feedback))
