"""What `make profile LESSON=18` runs: one row times a matrix of four bits."""

import torch

from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l18_weight_quantization.optimized import matmul

OUTPUTS, INPUTS = 512, 1024
GENERATOR = torch.Generator().manual_seed(18)
X = torch.randn(1, INPUTS, generator=GENERATOR).half()
PROMPT = torch.randn(64, INPUTS, generator=GENERATOR).half()
WEIGHT = round_to_nearest(torch.randn(OUTPUTS, INPUTS, generator=GENERATOR), bits=4)


def optimized():
    return matmul(X, WEIGHT)


def naive():
    return dequantize_matmul(X, WEIGHT)


def prompt():
    """64 rows, where the matrix units have something to do."""
    return matmul(PROMPT, WEIGHT)
