"""What OLMo 2 and 3 do otherwise than lesson 2's decoder. Read `decoder.py` first.

- Attention and MLP read the residual stream as it is. Their outputs are normed instead.
- Norms of q and k run over all heads at once, not over each head.
- A norm multiplies by its weight before it rounds.

OLMo 3 also has windows, and its layers without one may be stretched: `attend` reads both in the
config.

Sources: 2 OLMo 2 Furious (2024), section 2.1; transformers' modeling_olmo2 and modeling_olmo3.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, DecoderLayer, RMSNorm
from lessons.l02_naive_attention.variants.norms_after import AttentionThenNorm, MLPThenNorm
from lessons.toolbox.model.config import ModelConfig


class WideRMSNorm(RMSNorm):
    """An RMSNorm that rounds once, after the weight."""

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(wide.dtype) * normed).to(x.dtype)


class NormOverHeads(WideRMSNorm):
    """One norm of all heads side by side."""

    def forward(self, x: Tensor) -> Tensor:  # [T, H, D] -> [T, H, D]
        return super().forward(x.flatten(-2)).view_as(x)


class NoNorm(nn.Module):
    """In the place of a norm before attention or MLP."""

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> the same
        return x


class OlmoAttention(AttentionThenNorm):
    def __init__(self, config: ModelConfig):
        super().__init__(config, WideRMSNorm)
        self.q_norm = NormOverHeads(self.q_proj.out_features, config.rms_norm_eps)
        self.k_norm = NormOverHeads(self.k_proj.out_features, config.rms_norm_eps)


class OlmoDecoder(Decoder):
    """OLMo 2 and 3: lesson 2's decoder with the parts above in place of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm = WideRMSNorm(config.hidden_size, config.rms_norm_eps)

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.variant != "olmo":
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one of OLMo "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        layer = DecoderLayer(config, OlmoAttention(config), MLPThenNorm(config, WideRMSNorm))
        layer.input_layernorm, layer.post_attention_layernorm = NoNorm(), NoNorm()
        return layer
