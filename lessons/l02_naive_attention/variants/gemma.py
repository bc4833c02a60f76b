"""What Gemma 1, 2 and 3 do otherwise than lesson 2's decoder. Read `decoder.py` first.

- A norm multiplies by 1 + weight. In Gemma 2 and 3 one follows attention and MLP too, before their
  outputs join the residual stream.
- Embeddings are multiplied by √hidden_size, and the MLP's gate is a GELU.
- Logits may be capped softly.

What layers do otherwise in attention (scale, windows, a cap on scores, another RoPE theta in the
layers that have a window) is in the config, and `attend` reads it there.

Sources: Gemma 2 (2024), section 2; Gemma 3 technical report (2025), section 2; transformers'
modeling_gemma3.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Decoder, DecoderLayer, RMSNorm
from lessons.l02_naive_attention.variants.norms_after import AttentionThenNorm
from lessons.toolbox.model.config import ModelConfig


class GemmaRMSNorm(RMSNorm):
    """An RMSNorm whose stored weight is the difference from 1."""

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        # 1 + weight in the wide type, because 16 bits would round most of a small weight away
        return (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)


class GeluMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        gate = nn.functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class GemmaMLP(GeluMLP):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm_after = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.norm_after(super().forward(x))


class GemmaAttention(AttentionThenNorm):
    def __init__(self, config: ModelConfig):
        super().__init__(config, GemmaRMSNorm)
        if config.qk_norm:
            self.q_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, hidden_size]
        # rounded as the published code rounds it, to the dtype of the model
        scale = torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype, device="cpu")
        return super().forward(tokens) * scale.item()


class CappedLinear(nn.Linear):
    """A linear layer whose outputs stay between -cap and cap."""

    def __init__(self, in_features: int, out_features: int, cap: float):
        super().__init__(in_features, out_features, bias=False)
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        return self.cap * torch.tanh(super().forward(x) / self.cap)


class GemmaDecoder(Decoder):
    """Gemma 1, 2 and 3 (text): lesson 2's decoder with the parts above in place of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.final_logit_softcapping is not None:
            sizes = config.hidden_size, config.vocab_size
            self.lm_head = CappedLinear(*sizes, config.final_logit_softcapping)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if not config.norms_after and config.variant != "gemma":
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with norms of Gemma "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        if config.norms_after:
            layer = DecoderLayer(config, GemmaAttention(config), GemmaMLP(config))
        else:
            layer = DecoderLayer(config, mlp=GeluMLP(config))
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, GemmaRMSNorm(config.hidden_size, config.rms_norm_eps))
        return layer
