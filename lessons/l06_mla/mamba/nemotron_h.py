"""Nemotron-H and Nemotron 3: each layer is one norm and one part, which is a Mamba-2, attention, an
MLP or experts.

    x = x + part(norm(x))

Its attention does not rotate, which is `attend`'s business. MLPs and experts have no gate, and
square what their ReLU lets through.

Sources: Nemotron-H (NVIDIA, 2025), section 2.1; Primer (So et al. 2021), section 4 (the squared
ReLU); transformers' modeling_nemotron_h.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import relu

from lessons.l02_naive_attention.decoder import Attention, Decoder, RMSNorm
from lessons.l02_naive_attention.variants.parallel import check_variant
from lessons.l06_mla.mamba.mamba2 import Mamba2
from lessons.l06_mla.moe import MoE
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.mamba_config import EXPERTS_ALONE, HAS_STATE, MLP_ALONE


class SquaredReluMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.down_proj(relu(self.up_proj(x)).square())


def new_experts(config: ModelConfig) -> MoE:
    """Lesson 6's mixture, its MLPs without gates. The routed ones never have a bias."""
    mixture, moe, size = MoE(config), config.moe, config.hidden_size
    mixture.experts = nn.ModuleList(
        SquaredReluMLP(size, moe.moe_intermediate_size, bias=False)
        for _ in range(moe.n_routed_experts)
    )
    mixture.shared_experts = SquaredReluMLP(size, moe.shared_width, config.mlp_bias)
    return mixture


class MixingLayer(nn.Module):
    """A layer that mixes tokens: a Mamba-2 or attention."""

    def __init__(self, config: ModelConfig, self_attn: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        return x + self.self_attn(self.input_layernorm(x), attend)


class FeedForwardLayer(nn.Module):
    """A layer that does not: an MLP or experts."""

    def __init__(self, config: ModelConfig, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        return x + self.mlp(self.input_layernorm(x))


class NemotronHDecoder(Decoder):
    """Nemotron-H and Nemotron 3. reference/features/states has the `attend` that it needs."""

    def new_layer(self, index: int) -> nn.Module:
        config = self.config
        check_variant(config, "nemotron_h")
        kind = config.state.layer_types[index]
        if kind == MLP_ALONE:
            mlp = SquaredReluMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
            return FeedForwardLayer(config, mlp)
        if kind == EXPERTS_ALONE:
            return FeedForwardLayer(config, new_experts(config))
        if kind == HAS_STATE:
            return MixingLayer(config, Mamba2(config, norm_groups=config.state.mamba_n_groups))
        return MixingLayer(config, Attention(config))
