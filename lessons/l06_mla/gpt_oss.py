"""gpt-oss: lesson 2's decoder with sinks in its attention and experts of its own kind.

All experts of a layer are in one tensor. Gate and up are in every other column, both are clamped,
and both have biases. Its published files hold the experts in 4 bits (MXFP4), which lesson 18 reads
(load_quantized); this decoder reads files in 16 or 32 bits.

Sources: gpt-oss model card (2025), section 2; transformers' modeling_gpt_oss.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Attention, Decoder, DecoderLayer
from lessons.l06_mla.moe import Router
from lessons.toolbox.model.config import ModelConfig

SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702


class SinkAttention(Attention):
    """Attention with a learnt score a head, which `attend` looks up here by its layer."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))


class StackedExperts(nn.Module):
    """The MLPs of E experts, in one tensor each. Their weights multiply from the right."""

    def __init__(self, hidden_size: int, inner: int, num_experts: int):
        super().__init__()
        size, two = hidden_size, 2 * inner
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, size, two).normal_(std=0.1))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, two))
        self.down_proj = nn.Parameter(torch.empty(num_experts, inner, size).normal_(std=0.1))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, size))

    def forward(self, x: Tensor, expert: int) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        gate_up = x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
        return gated(gate_up) @ self.down_proj[expert] + self.down_proj_bias[expert]


def gated(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 · inner], gate and up in every other column -> [T, inner]."""
    gate = gate_up[..., 0::2].clamp(max=SWIGLU_LIMIT)
    up = gate_up[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


class BiasedRouter(Router):
    """Lesson 6's router, a bias added to its logits."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.hidden_size, config.moe)
        self.bias = nn.Parameter(torch.zeros(config.moe.n_routed_experts))

    def logits(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, E]
        plain = super().logits(x)
        return plain + self.bias.to(plain.dtype)


class StackedMoE(nn.Module):
    waits_for_values = True  # as lesson 6's MoE

    def __init__(self, config: ModelConfig):
        super().__init__()
        moe = config.moe
        self.router = BiasedRouter(config)
        self.experts = StackedExperts(
            config.hidden_size, moe.moe_intermediate_size, moe.n_routed_experts
        )

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.router(x)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            share = self.experts(x[token], index) * weights[token, place, None]
            out.index_add_(0, token, share.to(out.dtype))
        return out


class GptOssDecoder(Decoder):
    """gpt-oss in 16 or 32 bits."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if not config.attention_sinks or config.moe is None:
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with attention_sinks "
                "and moe (others: load_decoder of lessons.l06_mla.deepseek)"
            )
        return DecoderLayer(config, SinkAttention(config), StackedMoE(config))
