"""Granite 4: lesson 2's Granite, in which most layers have a Mamba-2 in the place of attention, and
an MLP stands beside the experts of each layer, if it has any.

Its attention layers do not rotate, which is `attend`'s business. Granite 4.0 Micro has attention in
every layer; GraniteDecoder serves it.

Source: transformers' modeling_granitemoehybrid.
"""

from collections.abc import Callable

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import DecoderLayer
from lessons.l02_naive_attention.variants.granite import (
    GraniteAttention,
    GraniteDecoder,
    GraniteMLP,
)
from lessons.l06_mla.mamba.mamba2 import Mamba2
from lessons.l06_mla.moe import MoE
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.mamba_config import MambaConfig


class GraniteMamba2(Mamba2):
    """All coordinates are normed together."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, norm_groups=1)
        self.multiplier = config.multipliers.residual_multiplier

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        return super().forward(x, attend) * self.multiplier


class GraniteMoE(nn.Module):
    """A part of its own around lesson 6's, so that lesson 23's takes the place of that."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.mixture = MoE(config)
        self.multiplier = config.multipliers.residual_multiplier

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> the same
        return self.mixture(x) * self.multiplier


class GraniteHybridDecoder(GraniteDecoder):
    """Granite 4. reference/features/states has the `attend` that it needs."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.multipliers is None or not isinstance(config.state, MambaConfig):
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with multipliers and "
                "a MambaConfig (others: load_decoder of lessons.l06_mla.deepseek)"
            )
        has_state = index in config.state.layers
        mixer = GraniteMamba2(config) if has_state else GraniteAttention(config)
        mlp = GraniteMLP(config) if config.moe is None else GraniteMoE(config)
        return DecoderLayer(config, mixer, mlp)
