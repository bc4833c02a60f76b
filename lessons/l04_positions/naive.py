"""Rotary positions in plain PyTorch: angles, tables, both layouts, how weights change layout.

Read `inverse_frequencies`, `rotate_half`, `rotate_interleaved`, `half_from_interleaved`, then
lesson 3's `write` (stand_ins.py), which rotates into new tensors and then stores them. Positions
without a rotation, as biases of the scores, are in alibi.py.

Sources: RoFormer (Su et al. 2021, section 3.2.2; in 3.4.2, equation 34, the pairs are neighbours:
interleaved); the half-rotated layout came with GPT-NeoX's code and is that of Hugging Face's Llama
checkpoints.
"""

import torch
from torch import Tensor

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
