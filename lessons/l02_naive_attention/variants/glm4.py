"""What GLM-4 does otherwise than lesson 2's decoder: attention and MLP have a norm before and one
after. Half of a head's coordinates turn, which is in the config.

Source: transformers' modeling_glm4.
"""

from lessons.l02_naive_attention.decoder import Decoder, DecoderLayer
from lessons.l02_naive_attention.variants.norms_after import AttentionThenNorm, MLPThenNorm


class Glm4Decoder(Decoder):
    """GLM-4: lesson 2's decoder with two more norms in a layer."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.variant != "glm4":
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one of GLM-4 "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        return DecoderLayer(config, AttentionThenNorm(config), MLPThenNorm(config))
