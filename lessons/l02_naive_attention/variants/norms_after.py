"""Attention and MLP whose output is normed once more before it joins the residual stream.

The norm is inside the part, so that a layer stays what it is in `decoder.py`: two parts, each added
to what came in.
"""

from collections.abc import Callable

from torch import Tensor

from lessons.l02_naive_attention.decoder import MLP, Attention, RMSNorm
from lessons.toolbox.model.config import ModelConfig


class AttentionThenNorm(Attention):
    """norm: its class."""

    def __init__(self, config: ModelConfig, norm: type[RMSNorm] = RMSNorm):
        super().__init__(config)
        self.norm_after = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        return self.norm_after(super().forward(x, attend))


class MLPThenNorm(MLP):
    """norm: its class."""

    def __init__(self, config: ModelConfig, norm: type[RMSNorm] = RMSNorm):
        super().__init__(config)
        self.norm_after = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> the same
        return self.norm_after(super().forward(x))
