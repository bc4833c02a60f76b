"""What the kernels' wrappers refuse, in one line each. Nothing here looks at a value on the GPU,
because that waits for it.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    MAX_ELEMENTS,
    check_apart,
    check_dense,
    check_one_device,
    check_values,
)
from lessons.l04_positions.naive import check_layout

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_rotate_rows(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, last_position: int, layout: str
) -> None:
    """Raise ValueError unless x: [T, H, D], positions: [T] and cos_sin_cache: [num_positions, D]
    can go to rotate_kernel.
    """
    if x.ndim != 3:
        raise ValueError(f"x: got {tuple(x.shape)}; accepted: [T, H, D]")
    if x.dtype not in DTYPES or x.stride(2) != 1:
        raise ValueError(
            f"x: got {x.dtype}, strides {x.stride()}; accepted: float32, float16 or bfloat16, "
            f"stride 1 in the last"
        )
    check_one_device(x=x, positions=positions, cos_sin_cache=cos_sin_cache)
    check_apart(x=x)
    if x.shape[1] * x.stride(1) > MAX_ELEMENTS:  # rotate_kernel counts a token's in 32 bits
        raise ValueError(
            f"x: got heads that are {x.stride(1)} elements apart; accepted: all of a token's "
            f"within {MAX_ELEMENTS}"
        )
    _check_head_dim(x.shape[2])
    _check_table(len(x), x.shape[2], positions, cos_sin_cache, last_position, layout)


def check_rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    last_position: int,
    layout: str,
) -> None:
    """Raise ValueError unless the tensors, with the shapes that `rope_cache` names, fit
    together.
    """
    rows, caches = (q, k, v), (k_cache, v_cache)
    shapes = [tuple(x.shape) for x in rows + caches]
    if (
        any(x.ndim != 3 for x in rows + caches)
        or k.shape != v.shape
        or k_cache.shape != v_cache.shape
        or k_cache.shape[1:] != k.shape[1:]
        or q.shape[::2] != k.shape[::2]
    ):
        raise ValueError(
            f"q, k, v, k_cache, v_cache: got {shapes}; accepted: [T, Hq, D], twice [T, Hkv, D], "
            "twice [slots, Hkv, D]"
        )
    # because each KV head goes with the same number of query heads
    if not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k: got {q.shape[1]} query heads for {k.shape[1]} KV heads; accepted: a multiple"
        )
    if len({x.dtype for x in rows + caches}) > 1 or q.dtype not in DTYPES:
        raise ValueError(
            f"q, k, v, k_cache, v_cache: got {[x.dtype for x in rows + caches]}; accepted: one "
            "dtype for all five, float32, float16 or bfloat16"
        )
    check_one_device(
        q=q,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        positions=positions,
        slot_mapping=slot_mapping,
        cos_sin_cache=cos_sin_cache,
    )
    head_dim = q.shape[2]
    _check_head_dim(head_dim)
    if (
        any(x.stride()[1:] != (head_dim, 1) for x in rows + caches)
        or k_cache.stride() != v_cache.stride()
    ):
        raise ValueError(
            f"q, k, v, k_cache, v_cache: got strides {[x.stride() for x in rows + caches]}; "
            f"accepted: (any, {head_dim}, 1), the same for both caches"
        )
    check_apart(q=q, k_cache=k_cache, v_cache=v_cache)
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (len(q),):
        raise ValueError(
            f"slot_mapping: got {slot_mapping.dtype} {tuple(slot_mapping.shape)}; accepted: int64 "
            f"({len(q)},)"
        )
    check_dense(slot_mapping=slot_mapping)
    check_values(-1, len(k_cache) - 1, slot_mapping=slot_mapping)
    _check_table(len(q), head_dim, positions, cos_sin_cache, last_position, layout)


def _check_head_dim(head_dim: int) -> None:
    # pairs turn, and a head's pairs are in one program
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim: got {head_dim}; accepted: an even number from 2 to {MAX_HEAD_DIM}"
        )


def _check_table(
    num_tokens: int,
    head_dim: int,
    positions: Tensor,
    cos_sin_cache: Tensor,
    last_position: int,
    layout: str,
) -> None:
    check_layout(layout)
    if positions.dtype != torch.int64 or positions.shape != (num_tokens,):
        raise ValueError(
            f"positions: got {positions.dtype} {tuple(positions.shape)}; accepted: int64 "
            f"({num_tokens},)"
        )
    check_dense(positions=positions)
    if (
        cos_sin_cache.dtype != torch.float32
        or cos_sin_cache.ndim != 2
        or cos_sin_cache.shape[1] != head_dim
        or not cos_sin_cache.is_contiguous()
    ):
        raise ValueError(
            f"cos_sin_cache: got {cos_sin_cache.dtype} {tuple(cos_sin_cache.shape)}, strides "
            f"{cos_sin_cache.stride()}; accepted: float32 (num_positions, {head_dim}), contiguous"
        )
    if num_tokens and not 0 <= last_position < len(cos_sin_cache):
        raise ValueError(
            f"last_position: got {last_position}; accepted: 0 to {len(cos_sin_cache) - 1}, the "
            "rows of cos_sin_cache"
        )
