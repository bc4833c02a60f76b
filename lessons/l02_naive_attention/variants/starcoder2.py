"""What StarCoder 2 does otherwise than lesson 2's decoder: its norms are LayerNorms, which subtract
the mean first, and its MLP has no gate.

Sources: StarCoder 2 and The Stack v2 (2024), section 5; Layer normalization (Ba et al. 2016);
transformers' modeling_starcoder2.
"""

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, DecoderLayer
from lessons.toolbox.model.config import ModelConfig


class FeedForward(nn.Module):
    """Two matrices with a GELU between them. They have the names of an MLP's, so that ranks cut
    them as they cut an MLP's.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.down_proj(nn.functional.gelu(self.up_proj(x), approximate="tanh"))


class Starcoder2Decoder(Decoder):
    """StarCoder 2: lesson 2's decoder with LayerNorms and a FeedForward in each layer."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.variant != "starcoder2":
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one of StarCoder 2 "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        layer = DecoderLayer(config, mlp=FeedForward(config))
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, nn.LayerNorm(config.hidden_size, config.rms_norm_eps))
        return layer
