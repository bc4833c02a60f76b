"""Rotary positions in plain PyTorch: angles, tables, both layouts, how weights change layout; a
cache that rotates, then writes.

Read `inverse_frequencies`, `rotate_half`, `rotate_interleaved`, `half_from_interleaved`, then
`RotatingKVCache.attend`. Positions without a rotation, as biases of the scores, are in alibi.py.

Sources: RoFormer (Su et al. 2021, section 3.2.2; in 3.4.2, equation 34, the pairs are neighbours:
interleaved); the half-rotated layout came with GPT-NeoX's code and is that of Hugging Face's Llama
checkpoints.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken
from lessons.l02_naive_attention.rope import rope_inv_freq, rope_magnitude
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.cache import KVCache
from lessons.l03_kv_cache.naive import cached_loop
from lessons.toolbox.model.config import ModelConfig

# ---------------------------------------------------------------- angles


def inverse_frequencies(rotary_dim: int, theta: float = 10000.0) -> Tensor:
    """Angle per position of each pair: theta^(-2i / rotary_dim), i = 0 … rotary_dim / 2 - 1.
    [rotary_dim / 2] float64.

    Raises ValueError for an odd rotary_dim.
    """
    if rotary_dim < 2 or rotary_dim % 2:  # because a rotation turns pairs
        raise ValueError(f"rotary_dim: got {rotary_dim}; accepted: an even number, 2 or more")
    return theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def new_cos_sin_cache(inv_freq: Tensor, num_positions: int, magnitude: float = 1.0) -> Tensor:
    """The table of all rotations: [num_positions, D], row p holds cos(p · inv_freq), then sin(p ·
    inv_freq), times `magnitude`.

    inv_freq: [D / 2], whose dtype the table has: float32 at least, because in bfloat16 the position
    257 is 256 already. Raises ValueError for another dtype, or no positions.
    """
    if inv_freq.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"inv_freq: got {inv_freq.dtype}; accepted: float32 or float64, because half precision "
            f"loses positions"
        )
    if num_positions < 1:
        raise ValueError(f"num_positions: got {num_positions}; accepted: 1 or more")
    positions = torch.arange(num_positions, dtype=inv_freq.dtype, device=inv_freq.device)
    angles = positions[:, None] * inv_freq  # [num_positions, D / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * magnitude


@lru_cache(maxsize=8)
def cos_sin_cache_of(config: ModelConfig, device: torch.device) -> Tensor:
    """A model's table, stretched as its checkpoint asks, for all its positions:
    [max_position_embeddings, D] float32.
    """
    inv_freq = rope_inv_freq(config, device)
    return new_cos_sin_cache(
        inv_freq, config.max_position_embeddings, rope_magnitude(config.rope_scaling)
    )


# ---------------------------------------------------------------- rotations


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn coordinate i together with i + D/2, the layout of Hugging Face. x: [T, H, D]; cos, sin:
    [T, 1, D / 2] -> [T, H, D].
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn coordinate 2i together with 2i + 1, the layout of Meta's and DeepSeek's weights. Shapes
    as in `rotate_half`.

    A pair is a complex number, and turning it is one multiplication by cos + i sin.
    """
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))  # complex numbers exist from float32 on
    turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(
        cos, sin
    )
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


ROTATIONS = {"half": rotate_half, "interleaved": rotate_interleaved}


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, layout: str = "half") -> Tensor:
    """x: [T, H, D] turned to `positions`: [T] int64, by the rows of cos_sin_cache: [num_positions,
    D]. Returns [T, H, D].

    Only some of the coordinates turn? Then give these, `x[..., :rotary_dim]`. Raises ValueError.
    """
    check_layout(layout)
    if x.shape[-1] % 2 or cos_sin_cache.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"x, cos_sin_cache: got {tuple(x.shape)}, {tuple(cos_sin_cache.shape)}; accepted: [T, "
            f"H, D] and "
            "[num_positions, D] with an even D"
        )
    # The kernel's wrapper does not look: on a GPU this comparison would wait for all work before
    # it.
    if positions.numel() and not 0 <= positions.min() <= positions.max() < len(cos_sin_cache):
        raise ValueError(
            f"positions: got {int(positions.min())} to {int(positions.max())}; accepted: 0 to "
            f"{len(cos_sin_cache) - 1}, the rows of cos_sin_cache"
        )
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)  # [T, 1, D / 2]
    return ROTATIONS[layout](x, cos, sin)


def check_layout(layout: str) -> None:
    """Raise ValueError unless `layout` is one of ROTATIONS."""
    if layout not in ROTATIONS:
        raise ValueError(f"layout: got {layout!r}; accepted: {', '.join(ROTATIONS)}")


# ---------------------------------------------------------------- checkpoints


def half_from_interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q_proj or k_proj (or its bias) from Meta's order to Hugging Face's: [num_heads · D,
    …] -> the same shape.

    Within each head the even rows come first, then the odd ones. q and k must change together;
    their products, and so the model, stay what they were, because a dot product does not mind the
    order of its terms. Raises ValueError.
    """
    return _by_head(weight, num_heads).unflatten(1, (-1, 2)).transpose(1, 2).reshape(weight.shape)


def interleaved_from_half(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `half_from_interleaved`: [num_heads · D, …] -> the same shape. Raises
    ValueError.
    """
    return _by_head(weight, num_heads).unflatten(1, (2, -1)).transpose(1, 2).reshape(weight.shape)


def _by_head(weight: Tensor, num_heads: int) -> Tensor:
    """[num_heads · D, …] -> [num_heads, D, …]."""
    if num_heads < 1 or len(weight) % (2 * num_heads):
        raise ValueError(
            f"num_heads: got {num_heads} for {len(weight)} rows; accepted: heads of an even number "
            f"of rows each"
        )
    return weight.unflatten(0, (num_heads, -1))


# ---------------------------------------------------------------- generation


class RotatingKVCache(KVCache):
    """KVCache for a decoder that leaves positions to `attend` (`model.unrotated()`): it rotates q
    and k, then writes k and v.

    A key enters turned to its own position and stays so; only the newest tokens are ever rotated.
    Raises ValueError for a token beyond the last position that the model accepts.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, capacity, dtype, device)
        self.cos_sin_cache = cos_sin_cache_of(config, torch.device(device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate, append, attend: q: [T, Hq, D] and k, v: [T, Hkv, D] of the newest tokens,
        unrotated -> [T, Hq, D].
        """
        # not from 0: old tokens stand before
        positions = torch.arange(self.length, self.length + len(q), device=q.device)
        # v carries no position
        q, k = (rotate(x, positions, self.cos_sin_cache) for x in (q, k))
        return super().attend(layer, q, k, v)


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """One prompt after the other, each with its own RotatingKVCache. Arguments, result and errors
    as in lesson 2's `generate`.
    """

    def new_kv_cache(model: Decoder, max_tokens: int) -> KVCache:
        return RotatingKVCache(model.config, max_tokens, model.dtype, model.device)

    return cached_loop(new_kv_cache, model.unrotated(), prompts, max_new_tokens, sampling, on_token)
