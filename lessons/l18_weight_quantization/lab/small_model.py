"""A small random decoder for the tests of the methods."""

import torch

from lessons.l02_naive_attention.decoder import Decoder, RMSNorm
from lessons.toolbox.model.config import ModelConfig

# 4 query heads, 2 KV heads, biases on q, k and v
CONFIG = ModelConfig("qwen2", 50, 32, 2, 4, 2, 8, 64, 64, qkv_bias=True)


def small_decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIG).requires_grad_(False).double()
    for part in model.modules():
        if isinstance(part, RMSNorm):
            part.weight.uniform_(0.2, 3)
    return model
