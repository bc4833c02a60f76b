"""Matrices and a small decoder for the tests of formats and methods."""

import torch

from lessons.l02_naive_attention.decoder import Decoder, RMSNorm
from lessons.toolbox.model.config import ModelConfig

# 4 query heads, 2 KV heads, biases on q, k and v
CONFIG = ModelConfig("qwen2", 50, 32, 2, 4, 2, 8, 64, 64, qkv_bias=True)


def small_decoder() -> Decoder:
    """Two layers in float64 with norms that are not 1. The same weights in every call."""
    torch.manual_seed(0)
    model = Decoder(CONFIG).requires_grad_(False).double()
    for part in model.modules():
        if isinstance(part, RMSNorm):
            part.weight.uniform_(0.2, 3)
    return model


def numbers(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] float32 with a few large weights. The same in every run, because ties would
    be rare failures.
    """
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix[:, 3] *= 6
    return matrix
