"""Rotary position embedding as checkpoints ask for it: q and k turn by an angle that grows with
the position.

Attention needs it from the first rung on. Lesson 4 derives it, and shows why a score then depends
on the distance only.

Sources: RoFormer (Su et al. 2021); position interpolation (Chen et al. 2023); YaRN (Peng et al.
2023, sections 3.2 to 3.4); LongRoPE (Ding et al. 2024, section 3); the "llama3" rule: the
configuration that Llama 3.1 was published with.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lessons.toolbox.model.config import ModelConfig, RopeScaling

Rotate = Callable[[Tensor], Tensor]  # [T, H, D] -> [T, H, D]


def rotation(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Rotate:
    """The function that turns the rows of x: [T, H, D] to their positions: [T]."""
    cos, sin = rope_tables(config, positions, dtype)
    return lambda x: apply_rope(x, cos, sin)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate coordinate i together with coordinate i + rope_dim / 2. x: [T, H, D] -> [T, H, D].

    cos, sin: [T, 1, rope_dim]. Where heads are wider than rope_dim (DeepSeek's, Phi-3's), only
    their last coordinates turn.
    """
    rope_dim = cos.shape[-1]
    if x.shape[-1] > rope_dim:
        turned = apply_rope(x[..., -rope_dim:], cos, sin)
        return torch.cat([x[..., :-rope_dim], turned], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rope_tables(
    config: ModelConfig,
    positions: Tensor,
    dtype: torch.dtype,
    context_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotation, each [T, 1, rope_dim]: the angles are stored twice, once per
    half (Hugging Face layout).

    context_len: of how many tokens; None: the last of `positions` is the context's last. LongRoPE
    alone asks: it slows a context that is longer than the original one by other factors.
    """
    scaling, is_long = config.rope_scaling, False
    if scaling is not None and scaling.rope_type == "longrope":
        # not in other models, because a GPU's largest position is known only after a wait
        is_long = scaling.is_long(int(positions.max()) + 1 if context_len is None else context_len)
    # float32 at least, because position 100 000 times a frequency has no precision left in bfloat16
    angles = positions[:, None].float() * rope_inv_freq(config, positions.device, is_long)
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]  # [T, 1, rope_dim]
    stretch = 1.0 if scaling is None else scaling.magnitude
    return (angles.cos() * stretch).to(dtype), (angles.sin() * stretch).to(dtype)


# ---------------------------------------------------------------- with a table of all positions


def new_cos_sin_cache(
    config: ModelConfig, num_positions: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The table of all rotations: [num_positions, rope_dim] float32.

    Row p holds cos(p · f) and then sin(p · f) of each frequency f, the name and layout of vLLM's.
    LongRoPE's factors are chosen once, by the longest context that the table serves, as vLLM
    chooses them: keys in a cache cannot be turned again. transformers chooses them in each pass by
    its last position, so the two differ for a context that grows beyond the original one.
    """
    positions = torch.arange(num_positions, device=device)
    cos, sin = rope_tables(config, positions, torch.float32, num_positions)
    half = config.rope_dim // 2  # the other half is the same
    return torch.cat([cos[:, 0, :half], sin[:, 0, :half]], dim=-1)


def new_local_cos_sin_cache(
    config: ModelConfig, num_positions: int, device: torch.device | str = "cpu"
) -> Tensor | None:
    """The table of the layers that rotate otherwise than the others (those of Gemma 3 that have a
    window), or not at all (some of SmolLM3's).
    """
    if not config.has_two_ropes:
        return None
    return new_cos_sin_cache(config.local_rope, num_positions, device)


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """The rows of x: [T, H, D], turned to `positions`: [T] int64 -> [T, H, D].

    cos_sin_cache: [num_positions, rope_dim], from `new_cos_sin_cache`. As `apply_rope`, to
    rounding.
    """
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)  # [T, 1, rope_dim / 2]
    rope_dim = cos_sin_cache.shape[-1]
    first, second = x[..., -rope_dim:].chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > rope_dim:
        parts = [x[..., :-rope_dim], *parts]
    return torch.cat([part.to(x.dtype) for part in parts], dim=-1)


# ---------------------------------------------------------------- frequencies


@lru_cache(maxsize=64)
def rope_inv_freq(
    config: ModelConfig, device: torch.device | str = "cpu", is_long: bool = False
) -> Tensor:
    """Angle per position of each pair: theta^(-2i / rope_dim), stretched as the checkpoint asks.

    is_long: with LongRoPE's factors for a context beyond the original one. [rope_dim / 2] float32.
    """
    dim, scaling = config.rope_dim, config.rope_scaling
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq = 1.0 / config.rope_theta**exponent
    if scaling is not None and scaling.rope_type == "longrope":
        factors = scaling.long_factor if is_long else scaling.short_factor
        inv_freq = inv_freq / torch.tensor(factors)
    elif scaling is not None and scaling.rope_type == "none":
        inv_freq = torch.zeros_like(inv_freq)  # cos 1 and sin 0 at every position
    elif scaling is not None:
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
        # 1e-9, because Llama 4's band has no width
        band = scaling.high_freq_factor - scaling.low_freq_factor or 1e-9
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
