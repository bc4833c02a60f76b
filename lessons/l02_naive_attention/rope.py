"""Rotary position embedding as checkpoints ask for it: q and k turn by an angle that grows with
the position.

Attention needs it from the first rung on. Lesson 4 derives it, and shows why a score then depends
on the distance only.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023); YaRN (Peng et al.
2023, sections 3.2 to 3.4); the "llama3" rule: the configuration that Llama 3.1 was published with.
"""

import math

import torch
from torch import Tensor

from lessons.toolbox.model.config import ModelConfig, RopeScaling, yarn_mscale


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Turn the last rope_dim coordinates of each head to its position: x: [T, H, D] -> [T, H, D].

    positions: [T] int64. cos_sin_cache: [num_positions, rope_dim], from `new_cos_sin_cache`.
    Coordinate i of the turned part turns together with i + rope_dim / 2. Coordinates in front of
    that part carry no position (DeepSeek; all others turn whole heads).
    """
    rope_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)  # [T, 1, rope_dim / 2]
    still, first, second = x.split([x.shape[-1] - rope_dim, rope_dim // 2, rope_dim // 2], dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    # `still` only where it has a width, because torch.cat would copy it
    parts = [still, *turned] if still.shape[-1] else turned
    return torch.cat([part.to(x.dtype) for part in parts], dim=-1)


def new_cos_sin_cache(
    config: ModelConfig, num_positions: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The table of all rotations: [num_positions, rope_dim] float32.

    Row p holds cos(p · f) and then sin(p · f) of each frequency f, the name and layout of vLLM's.
    """
    # float32, because position 100 000 times a frequency has no precision left in bfloat16
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * rope_inv_freq(config, device)  # [num_positions, rope_dim / 2]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return table * rope_magnitude(config.rope_scaling)


def rope_inv_freq(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair: theta^(-2i / rope_dim), stretched as the checkpoint asks.

    [rope_dim / 2] float32.
    """
    dim, scaling = config.rope_dim, config.rope_scaling
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq = 1.0 / config.rope_theta**exponent
    if scaling is not None:
        keep = _kept_share(inv_freq, config.rope_theta, dim, scaling)
        inv_freq = (1 - keep) * inv_freq / scaling.factor + keep * inv_freq
    return inv_freq.to(device)


def _kept_share(inv_freq: Tensor, theta: float, dim: int, scaling: RopeScaling) -> Tensor:
    """How much of each frequency stays as trained: [rope_dim / 2], from 0 (slowed by `factor`) to 1
    (left alone).
    """
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        return torch.zeros_like(inv_freq)
    if scaling.rope_type == "llama3":
        # A blend over the number of turns that a pair makes within the original context.
        turns = context * inv_freq / (2 * math.pi)
        band = scaling.high_freq_factor - scaling.low_freq_factor
        return ((turns - scaling.low_freq_factor) / band).clamp(0, 1)
    # "yarn": a blend over the pair's index, between the indices at which a pair makes beta_fast
    # and beta_slow turns.
    low = _pair_of(scaling.beta_fast, context, theta, dim)
    high = _pair_of(scaling.beta_slow, context, theta, dim)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # 0.001, because a ramp of no width would divide by zero; the published code takes the same
    width = high - low if high != low else 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / width
    return 1 - ramp.clamp(0, 1)


def _pair_of(turns: float, context: int, theta: float, dim: int) -> float:
    """The index of the pair that makes `turns` turns within `context` positions."""
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rope_magnitude(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied with: 1, but for YaRN, which sharpens the softmax as the
    context grows (section 3.4).
    """
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    whole = yarn_mscale(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        # DeepSeek scales all of q · k by mscale_all_dim, and only the rest here
        all_dim = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return yarn_mscale(scaling.factor, scaling.mscale) / all_dim
    return whole
