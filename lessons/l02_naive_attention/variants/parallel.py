"""Layers whose attention and MLP read the same normed input, side by side: Cohere's Command R and
R7B, and Microsoft's Phi-1, 1.5 and 2.

    out = x + attention(norm(x)) + MLP(norm(x))

- Cohere: a LayerNorm without bias, and logits times a number. Layers of Cohere 2 without a window
  do not rotate, which is `attend`'s business.
- Phi: a LayerNorm and an MLP without gate, as StarCoder 2 has them, and a bias everywhere, the last
  matrix included.

Sources: GPT-J (Wang and Komatsuzaki 2021), where the form comes from; transformers'
modeling_cohere2 and modeling_phi.
"""

from collections.abc import Callable

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, DecoderLayer
from lessons.l02_naive_attention.variants.granite import DividedLinear
from lessons.l02_naive_attention.variants.starcoder2 import FeedForward
from lessons.toolbox.model.config import ModelConfig


class ParallelLayer(DecoderLayer):
    """norm: of the one norm."""

    def __init__(self, config: ModelConfig, norm: nn.Module, mlp: nn.Module | None = None):
        super().__init__(config, mlp=mlp)
        self.input_layernorm = norm
        del self.post_attention_layernorm

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        normed = self.input_layernorm(x)
        return x + self.self_attn(normed, attend) + self.mlp(normed)


class CohereDecoder(Decoder):
    """Command R and R7B: parallel layers with lesson 2's attention and MLP."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)
        divisor = config.multipliers.logits_scaling
        self.lm_head = DividedLinear(config.hidden_size, config.vocab_size, divisor)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        check_variant(config, "cohere")
        norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)
        return ParallelLayer(config, norm)


class PhiDecoder(Decoder):
    """Phi-1, 1.5 and 2: parallel layers with a FeedForward."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        check_variant(config, "phi")
        norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        return ParallelLayer(config, norm, FeedForward(config))


def check_variant(config: ModelConfig, variant: str) -> None:
    """Raise ValueError unless the model's parts are these."""
    if config.variant != variant:
        raise ValueError(
            f"config: got model_type {config.model_type!r}; accepted: one with variant {variant} "
            "(others: load_decoder of lessons.l06_mla.deepseek)"
        )
