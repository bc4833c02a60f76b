"""Llama 4's text model: lesson 2's decoder, with norms of q and k that have no weights, and experts
that weigh what they read.

- Most layers rotate. In these, q and k are divided by their root mean square after the rotation. A
  rotation keeps the length of a head, so here they are divided before it, as lesson 2's q_norm is.
- The other layers do not rotate and norm nothing. What `attend` rotates is in the config.
- A router takes the sigmoid of the chosen logits, and multiplies an expert's input by it. An
  expert is not linear, so this is not the same as multiplying its output.

Layers that rotate attend within chunks of attention_chunk_size tokens, and the queries of the
others grow from floor_scale tokens on. The decoder has neither, and a context of Llama 4 ends where
they would begin: `load_config` says how many tokens that are.

Source: transformers' modeling_llama4.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Attention, Decoder, DecoderLayer
from lessons.l02_naive_attention.variants.parallel import check_variant
from lessons.l06_mla.moe import MoE, Router
from lessons.toolbox.model.config import ModelConfig


class L2Norm(nn.Module):
    """An RMSNorm without a weight."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class L2NormedAttention(Attention):
    """Lesson 2's attention with an L2Norm of each head of q and k."""

    def __init__(self, config: ModelConfig):
        super().__init__(replace(config, qk_norm=False))
        self.q_norm, self.k_norm = L2Norm(config.rms_norm_eps), L2Norm(config.rms_norm_eps)


class LogitRouter(Router):
    """Chooses by the logits, of which sigmoids of large ones would be ties."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden_size] -> weights: [T, k], experts: [T, k]."""
        best = self.logits(x).topk(self.config.num_experts_per_tok, dim=-1)
        return best.values.sigmoid(), best.indices


class InputWeighedMoE(MoE):
    """Lesson 6's mixture, in which the router's weights multiply what an expert reads."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.gate = LogitRouter(config.hidden_size, config.moe)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.gate(x)
        out = self.shared_experts(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            weighed = x[token] * weights[token, place, None].to(x.dtype)
            out.index_add_(0, token, self.experts[index](weighed).to(out.dtype))
        return out


class Llama4Decoder(Decoder):
    """Llama 4, without its eyes."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        check_variant(config, "llama4")
        is_normed = config.qk_norm and index not in config.no_rope_layers
        plain = replace(config, qk_norm=False)
        attention = L2NormedAttention(config) if is_normed else Attention(plain)
        mlp = InputWeighedMoE(config) if config.moe.has_experts(index) else None
        return DecoderLayer(plain, attention, mlp)
