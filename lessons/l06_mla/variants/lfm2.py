"""LFM2: lesson 2's decoder, in which most layers convolve instead of attending.

Such a layer mixes the last few tokens, coordinate by coordinate, between two gates. It hands
`attend` what its convolution reads, as Qwen3-Next's layers do, and has nothing else that mixes
tokens:

    attend(layer, mixed: [T, hidden_size], None, None) -> [T, hidden_size]

Sources: LFM2 (Liquid AI, 2025), its model cards; transformers' modeling_lfm2.
"""

from collections.abc import Callable

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, DecoderLayer
from lessons.toolbox.model.config import ModelConfig


class ShortConv(nn.Module):
    """A gate, a convolution over the last tokens, a gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, width = config.hidden_size, config.state.conv_L_cache
        self.in_proj = nn.Linear(size, 3 * size, bias=False)
        # its weight alone, which `attend` looks up here by its layer: [C, 1, W]
        self.conv1d = nn.Conv1d(size, size, width, groups=size, bias=False)
        self.out_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        before, after, x = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(after * attend(before * x, None, None))


class Lfm2Decoder(Decoder):
    """LFM2. reference/features/states has the `attend` that it needs."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.state is None or config.state.matrix_shape is not None:
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with a ConvConfig "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        convolves = index in config.state.layers
        return DecoderLayer(config, ShortConv(config) if convolves else None)
