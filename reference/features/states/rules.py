"""Which rule of lesson 27 a layer with a state follows: from what its convolution gives to the
layer's output.

    after_convolution(config, y, run, *inputs) -> [T, H, Dv]

y: [T, C], what the convolution gives. inputs: what the layer hands `attend` beside what is
convolved. run(rule, q, k, v, log_decay, …) -> [T, H, Dv] computes "gated_delta" or "decayed" over
the states of a step's sequences, or over one sequence from its beginning. A new kind of layer is a
function here, its row in RULES, and its shape in the toolbox.

Sources: transformers' modeling_qwen3_next, modeling_bamba and modeling_nemotron_h.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from lessons.l08_online_softmax.naive import wide
from lessons.toolbox.model.mamba_config import MambaConfig
from lessons.toolbox.model.state_config import ConvConfig, Kinds, StateConfig

LENGTH_EPS = 1e-6  # fixed in the published code, whatever rms_norm_eps says

Run = Callable[..., Tensor]


def after_convolution(config: Kinds, y: Tensor, run: Run, *inputs: Tensor | None) -> Tensor:
    """y: [T, C] -> [T, H, Dv]; of a layer with a convolution alone y itself."""
    return RULES[type(config)](config, y, run, *inputs)


def convolution_alone(config: ConvConfig, y: Tensor, run: Run, *inputs: None) -> Tensor:
    """LFM2. y: [T, C] -> the same."""
    return y


def gated_delta_net(
    config: StateConfig, y: Tensor, run: Run, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Qwen3-Next. y: [T, C], log_decay, beta: [T, H] -> [T, H, Dv]."""
    return run("gated_delta", *heads_of(y, config), log_decay, beta)


def mamba2(
    config: MambaConfig,
    y: Tensor,
    run: Run,
    log_decay: Tensor,
    dt: Tensor,
    bias: Tensor | None,
    skip: Tensor,
) -> Tensor:
    """Mamba-2: q = C, k = B, v = dt · x, and D · x beside what is read. y: [T, C], log_decay, dt:
    [T, H], bias: [C] of the convolution or None, skip: [H], D -> [T, H, Dv].
    """
    y = wide(y) if bias is None else wide(y) + wide(bias)
    widths = [config.value_dim, config.key_dim, config.key_dim]
    x, k, q = silu(y).split(widths, dim=-1)
    x = x.unflatten(-1, (config.mamba_n_heads, -1))
    k, q = (of_each_head(part, config) for part in (k, q))
    return run("decayed", q, k, x * dt[..., None], log_decay) + wide(skip)[:, None] * x


RULES = {ConvConfig: convolution_alone, StateConfig: gated_delta_net, MambaConfig: mamba2}


# ---------------------------------------------------------------- what a rule reads


def heads_of(y: Tensor, config: StateConfig) -> tuple[Tensor, Tensor, Tensor]:
    """What the delta rule reads, out of what the convolution wrote. y: [T, C] -> q, k: [T, H, Dk],
    v: [T, H, Dv], float32 at least.

    q and k have length 1, because the delta rule replaces what is read by k; q then counts by 1 /
    √Dk. A q and a k serve several heads of v.
    """
    widths = [config.key_dim, config.key_dim, config.value_dim]
    q, k, v = wide(silu(y)).split(widths, dim=-1)
    q, k = (unit(x.unflatten(-1, (-1, config.linear_key_head_dim))) for x in (q, k))
    q = q * config.linear_key_head_dim**-0.5
    q, k = (x.repeat_interleave(config.values_per_key, dim=1) for x in (q, k))
    return q, k, v.unflatten(-1, (-1, config.linear_value_head_dim))


def unit(x: Tensor) -> Tensor:
    """x: [..., D], each row with length 1 (a little less for short ones)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def of_each_head(x: Tensor, config: MambaConfig) -> Tensor:
    """B or C of all groups, [T, groups · Dk], as each head reads it: [T, H, Dk]. Nothing is copied
    where there is one group.
    """
    groups = x.unflatten(-1, (config.mamba_n_groups, 1, -1))
    return groups.expand(-1, -1, config.heads_per_group, -1).flatten(1, 2)
