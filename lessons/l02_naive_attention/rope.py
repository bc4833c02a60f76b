"""Rotary position embedding as checkpoints ask for it: q and k turn by an angle that grows with the
position.

The decoder needs it from the first rung; lesson 4 derives it, and shows why a score then depends on
the distance only.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023); YaRN (Peng et al.
2023, sections 3.2 to 3.4); the "llama3" rule: the configuration that Llama 3.1 was published with.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lessons.toolbox.model.config import ModelConfig, RopeScaling, yarn_mscale

Rotate = Callable[[Tensor], Tensor]  # [T, H, D] -> [T, H, D]


def rotation(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Rotate:
    """The function that turns the rows of x: [T, H, D] to their positions: [T]."""
    cos, sin = rope_tables(config, positions, dtype)
    return lambda x: apply_rope(x, cos, sin)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate coordinate i together with coordinate i + D/2. x: [T, H, D] -> [T, H, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rope_tables(
    config: ModelConfig, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotation, each [T, 1, D]: the angles stand twice, once per half (Hugging
    Face layout).
    """
    # float32 at least, because position 100 000 times a frequency has no precision left in
    # bfloat16.
    angles = positions[:, None].float() * rope_inv_freq(config, positions.device)  # [T, D / 2]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    stretch = rope_magnitude(config.rope_scaling)
    return (angles.cos() * stretch).to(dtype), (angles.sin() * stretch).to(dtype)


@lru_cache(maxsize=64)
def rope_inv_freq(config: ModelConfig, device: torch.device) -> Tensor:
    """Angle per position of each pair of coordinates, [D / 2], float32: theta^(-2i / D), stretched
    as the checkpoint asks.
    """
    dim, scaling = config.rope_dim, config.rope_scaling
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq = 1.0 / config.rope_theta**exponent
    if scaling is not None:
        keep = _kept_share(inv_freq, config.rope_theta, dim, scaling)
        inv_freq = (1 - keep) * inv_freq / scaling.factor + keep * inv_freq
    return inv_freq.to(device)


def _kept_share(inv_freq: Tensor, theta: float, dim: int, scaling: RopeScaling) -> Tensor:
    """How much of each frequency stays as trained, [D / 2] from 0 (slowed by `factor`) to 1 (left
    alone).
    """
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return torch.zeros_like(inv_freq)
    if scaling.rope_type == "llama3":
        # A blend over the number of turns that a pair makes within the original context.
        turns = context * inv_freq / (2 * math.pi)
        return (
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ).clamp(0, 1)
    # "yarn": a blend over the pair's index i, between the indices at which a pair makes beta_fast
    # and beta_slow turns.
    low, high = (
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # + 0.001, because a ramp of no width would divide by zero; the published code takes the same.
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (
        high - low if high != low else 0.001
    )
    return 1 - ramp.clamp(0, 1)


def rope_magnitude(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied with: 1, but for YaRN, which sharpens the softmax as the
    context grows (section 3.4).
    """
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    # DeepSeek scales all of q·k by mscale_all_dim, and only the rest here
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor)
