"""Small random models for the tests of GGUF files."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l18_weight_quantization.gguf.gguf_blocks import GgufWeight
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.toolbox.model.config import ModelConfig

SMALL = dict(
    vocab_size=96,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    eos_token_ids=(7,),
)
CONFIGS = {
    "llama": ModelConfig("llama", **SMALL),
    "llama, tied": ModelConfig("llama", **SMALL, tie_word_embeddings=True),
    "qwen2": ModelConfig("qwen2", **SMALL | dict(head_dim=64), qkv_bias=True, rope_theta=1e6),
    # 128, because transformers does not read this size from a qwen3's file, and takes its default
    "qwen3": ModelConfig("qwen3", **SMALL | dict(head_dim=128), qk_norm=True),
}


@torch.no_grad()
def new_model(config: ModelConfig) -> Decoder:
    """A model of random numbers whose logits differ from token to token."""
    model = Decoder(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            parameter.add_(1)
    return model


@torch.no_grad()
def logits_of(model: Decoder, tokens: Tensor) -> Tensor:
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def packed_of(model: Decoder) -> dict[str, GgufWeight]:
    """The quantized matrices by the names of their layers."""
    parts = model.named_modules()
    return {name: part.quantized for name, part in parts if isinstance(part, QuantizedLinear)}
