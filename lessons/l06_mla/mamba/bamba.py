"""Bamba: lesson 2's decoder, in which most layers have a Mamba-2 in the place of attention.

Half of each head of its attention turns with the position.

Source: transformers' modeling_bamba.
"""

from lessons.l02_naive_attention.decoder import Decoder, DecoderLayer
from lessons.l06_mla.mamba.mamba2 import Mamba2
from lessons.toolbox.model.mamba_config import MambaConfig


class BambaDecoder(Decoder):
    """Bamba. reference/features/states has the `attend` that it needs."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.multipliers is not None or not isinstance(config.state, MambaConfig):
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with a MambaConfig "
                "and no multipliers (others: load_decoder of lessons.l06_mla.deepseek)"
            )
        has_state = index in config.state.layers
        return DecoderLayer(config, Mamba2(config, norm_groups=1) if has_state else None)
