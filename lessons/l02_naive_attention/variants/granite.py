"""What Granite 3 does otherwise than lesson 2's decoder: it multiplies by numbers of its config.

Embeddings are multiplied by embedding_multiplier, the outputs of attention and MLP by
residual_multiplier before they join the residual stream, and logits are divided by logits_scaling.
Scores are multiplied by attention_multiplier in place of 1 / √D, which is `attend`'s business.

Sources: Granite 3.0 language models (2024), section 3; transformers' modeling_granite.
"""

from collections.abc import Callable

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, DecoderLayer
from lessons.toolbox.model.config import ModelConfig


class GraniteAttention(Attention):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.multiplier = config.multipliers.residual_multiplier

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        return super().forward(x, attend) * self.multiplier


class GraniteMLP(MLP):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.multiplier = config.multipliers.residual_multiplier

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> the same
        return super().forward(x) * self.multiplier


class MultipliedEmbedding(nn.Embedding):
    def __init__(self, num_embeddings: int, embedding_dim: int, multiplier: float):
        super().__init__(num_embeddings, embedding_dim)
        self.multiplier = multiplier

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, hidden_size]
        return super().forward(tokens) * self.multiplier


class DividedLinear(nn.Linear):
    """A linear layer whose outputs are divided by a number."""

    def __init__(self, in_features: int, out_features: int, divisor: float):
        super().__init__(in_features, out_features, bias=False)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        return super().forward(x) / self.divisor


class GraniteDecoder(Decoder):
    """Granite 3: lesson 2's decoder with the parts above in place of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        size, numbers = config.hidden_size, config.multipliers
        self.embed_tokens = MultipliedEmbedding(
            config.vocab_size, size, numbers.embedding_multiplier
        )
        self.lm_head = DividedLinear(size, config.vocab_size, numbers.logits_scaling)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.multipliers is None:
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with multipliers "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        return DecoderLayer(config, GraniteAttention(config), GraniteMLP(config))
