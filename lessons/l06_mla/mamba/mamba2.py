"""A Mamba-2 layer, in the place of attention: what of it mixes no tokens.

It projects, and hands `attend` what its convolution and its state read:

    attend(layer, mixed: [T, C], log_decay: [T, H], dt: [T, H], bias: [C] | None, skip: [H])
        -> [T, H, d_head]

mixed holds x of all heads and B and C of all groups side by side, before the convolution. That, its
bias, the SiLU after it, the state and D · x are `attend`'s: lesson 27's decayed linear attention,
with k = B, v = dt · x and q = C. Parameters carry the names of Hugging Face checkpoints, but for
the norm.

Sources: Dao and Gu 2024, Transformers are SSMs, section 7 (the layer); transformers' modeling_bamba
and modeling_nemotron_h.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lessons.toolbox.model.config import ModelConfig


class GatedNorm(nn.Module):
    """A gate, and RMSNorm after it. Each of `groups` runs of coordinates is normed by itself."""

    def __init__(self, size: int, eps: float, groups: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [T, size] of both -> [T, size]
        wide = torch.promote_types(x.dtype, torch.float32)
        gated = x.to(wide) * silu(gate.to(wide))
        parts = gated.unflatten(-1, (self.groups, -1))  # [T, groups, size / groups]
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.flatten(-2).to(x.dtype)


class Mamba2(nn.Module):
    """The layer. in_proj's rows are those of the gate z, of x, B and C, and of dt, one number a
    head.
    """

    def __init__(self, config: ModelConfig, norm_groups: int):
        super().__init__()
        self.state = state = config.state
        size, heads, channels = config.hidden_size, state.mamba_n_heads, state.conv_dim
        self.widths = [state.value_dim, channels, heads]
        self.in_proj = nn.Linear(size, sum(self.widths), bias=state.mamba_proj_bias)
        # its weight and bias alone: `attend` looks up the weight here by its layer, [C, 1, W]
        self.conv1d = nn.Conv1d(
            channels, channels, state.mamba_d_conv, groups=channels, bias=state.mamba_conv_bias
        )
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.gated_norm = GatedNorm(state.value_dim, config.rms_norm_eps, norm_groups)
        self.out_proj = nn.Linear(state.value_dim, size, bias=state.mamba_proj_bias)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        z, mixed, dt = self.in_proj(x).split(self.widths, dim=-1)
        dt = self.time_steps(dt)
        log_decay = -self.A_log.to(dt.dtype).exp() * dt
        out = attend(mixed, log_decay, dt, self.conv1d.bias, self.D)  # [T, H, d_head]
        return self.out_proj(self.gated_norm(out.flatten(1), z))

    def time_steps(self, dt: Tensor) -> Tensor:
        """How much of a token each head takes, and how much of the state it forgets: [T, H] -> [T,
        H], within the limits, float32 at least.
        """
        wide = torch.promote_types(dt.dtype, torch.float32)
        steps = softplus(dt.to(wide) + self.dt_bias.to(wide))
        return steps.clamp(*self.state.time_step_limit)
