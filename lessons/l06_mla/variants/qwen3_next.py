"""Qwen3-Next: three of four layers keep a state in the place of keys and values.

Such a layer projects, and hands `attend` what its convolution and its state read:

    attend(layer, mixed: [T, C], log_decay: [T, H], beta: [T, H]) -> [T, H, Dv]

mixed holds q, k and v of all heads side by side, before the convolution. That, the SiLU after it,
the lengths of q and k, and the state are `attend`'s, because each mixes tokens or needs what does:
lesson 27, and reference/features/states. What else is the family's own: a gate after attention, one
shared expert with a gate, and Gemma's norms. Parameters carry the names of Hugging Face
checkpoints.

Sources: Yang et al. 2024, Gated Delta Networks, section 3.3 (the layer); Qwen3-Next-80B-A3B's model
card and transformers' modeling_qwen3_next.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, DecoderLayer, RMSNorm
from lessons.l02_naive_attention.variants.gemma import GemmaRMSNorm
from lessons.l06_mla.moe import MoE
from lessons.toolbox.model.config import ModelConfig


class GatedAttention(Attention):
    """Attention whose output each coordinate of a gate weighs. q_proj holds, head by head, the rows
    of q and then those of the gate.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        q_size = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * q_size, bias=config.qkv_bias)
        self.q_norm = GemmaRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hkv, D]
        out = attend(self.q_norm(q), self.k_norm(k), v)  # [T, Hq, D]
        return self.o_proj((out * gate.sigmoid()).flatten(-2))


class GatedRMSNorm(RMSNorm):
    """RMSNorm, and a gate after it."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [..., size] of both -> [..., size]
        wide = torch.promote_types(x.dtype, torch.float32)
        return (super().forward(x) * silu(gate.to(wide))).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """A layer with a state. Of the projections, each key head has its rows one after the other: of
    q, k, and for its value heads v and z (in_proj_qkvz), or b and a (in_proj_ba).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.state, size, state = config.state, config.hidden_size, config.state
        heads, width = state.linear_num_value_heads, state.linear_conv_kernel_dim
        channels = state.conv_dim
        self.in_proj_qkvz = nn.Linear(size, channels + state.value_dim, bias=False)
        self.in_proj_ba = nn.Linear(size, 2 * heads, bias=False)
        # its weight alone, which `attend` looks up here by its layer: [C, 1, W]
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = GatedRMSNorm(state.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(state.value_dim, size, bias=False)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        state, each_v = self.state, self.state.values_per_key * self.state.linear_value_head_dim
        widths = [state.linear_key_head_dim] * 2 + [each_v] * 2
        by_key_head = (state.linear_num_key_heads, -1)
        *qkv, z = self.in_proj_qkvz(x).unflatten(-1, by_key_head).split(widths, dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, by_key_head).chunk(2, dim=-1)
        mixed = torch.cat([part.flatten(1) for part in qkv], dim=-1)  # [T, C]
        beta = b.flatten(1).sigmoid()  # [T, H]
        out = attend(mixed, self.log_decay(a.flatten(1)), beta)  # [T, H, Dv]
        return self.out_proj(self.norm(out, z.reshape(out.shape)).flatten(1))

    def log_decay(self, a: Tensor) -> Tensor:
        """The logarithm of what stays of a state, below 0: [T, H] -> [T, H], float32 at least."""
        wide = torch.promote_types(a.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * softplus(a.to(wide) + self.dt_bias.to(wide))


class Qwen3NextDecoder(Decoder):
    """Qwen3-Next. reference/features/states has the `attend` that it needs."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.state is None or config.moe is None:
            raise ValueError(
                f"config: got model_type {config.model_type!r}; accepted: one with state and moe "
                "(others: load_decoder of lessons.l06_mla.deepseek)"
            )
        has_state = index in config.state.layers
        mixer = GatedDeltaNet(config) if has_state else GatedAttention(config)
        mlp = MoE(config) if config.moe.has_experts(index) else MLP(config)
        layer = DecoderLayer(config, mixer, mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, GemmaRMSNorm(config.hidden_size, config.rms_norm_eps))
        return layer
