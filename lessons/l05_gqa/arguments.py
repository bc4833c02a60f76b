"""Bad input to the wrappers of this lesson and of lesson 10, refused in one line each. Nothing here
looks at a value on the GPU, because that waits for it.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    MAX_ELEMENTS,
    check_dense,
    check_grid,
    check_one_device,
    check_values,
    check_window,
)
from lessons.l05_gqa.tiles import tiles_for

# beyond these the query tile and its sums spill registers
MAX_HEAD_DIM, MAX_GROUP, MAX_QUERY_TILE = 256, 64, 8192
# elements between two rows of a cache, because 128 rows of a tile are counted in 32 bits
MAX_ROW_STRIDE = 2**24
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_grouped_inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens: Tensor, window: int | None
) -> None:
    """Raise ValueError unless q: [B, Hq, D], k_cache, v_cache: [B, capacity, Hkv, D], context_lens:
    [B] fit, and the kernel.
    """
    three = (q, k_cache, v_cache)
    _check_shapes(q, k_cache, v_cache, context_lens)
    if len({x.dtype for x in three}) > 1 or q.dtype not in DTYPES:
        raise ValueError(
            f"q, k_cache, v_cache: got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}; accepted: one "
            f"dtype of {', '.join(map(str, DTYPES))}"
        )
    if context_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"context_lens: got {context_lens.dtype}; accepted: int32 or int64")
    check_window(window)
    check_one_device(q=q, k_cache=k_cache, v_cache=v_cache, context_lens=context_lens)
    strides = [x.stride() for x in three]
    if any(x.stride(-1) != 1 for x in three):
        raise ValueError(f"q, k_cache, v_cache: got strides {strides}; accepted: last one 1")
    if max(k_cache.stride(1), v_cache.stride(1)) > MAX_ROW_STRIDE:
        raise ValueError(
            f"k_cache, v_cache: got strides {strides[1:]}; accepted: rows up to {MAX_ROW_STRIDE} "
            "elements apart"
        )
    check_dense(context_lens=context_lens)
    check_values(0, k_cache.shape[1], context_lens=context_lens)


def check_query_heads(q: Tensor) -> None:
    """Raise ValueError if lesson 5's kernel cannot count q: [B, Hq, D] in 32 bits. Lesson 10's
    counts in 64.
    """
    if q.shape[1] * q.stride(1) > MAX_ELEMENTS:  # because 64 bits would spill
        raise ValueError(
            f"q: got heads that are {q.stride(1)} elements apart; accepted: all of a token's "
            f"within {MAX_ELEMENTS}"
        )


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens: Tensor) -> None:
    if (
        q.ndim != 3
        or k_cache.ndim != 4
        or v_cache.shape != k_cache.shape
        or q.shape[::2] != k_cache.shape[::3]
        or context_lens.shape != q.shape[:1]
    ):
        shapes = [tuple(x.shape) for x in (q, k_cache, v_cache, context_lens)]
        raise ValueError(
            f"q, k_cache, v_cache, context_lens: got {shapes}; accepted: [B, Hq, D], "
            "[B, capacity, Hkv, D] twice, [B]"
        )
    (num_sequences, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    check_grid("q", num_sequences, "sequences")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q, k_cache: got {num_heads} query heads and {num_kv_heads} KV heads; accepted: a "
            "multiple of these"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: got head_dim {head_dim}; accepted: 1 to {MAX_HEAD_DIM}")
    group = num_heads // num_kv_heads
    size = tiles_for(group, head_dim, True)
    if size["BLOCK_M"] > (most := min(MAX_GROUP, MAX_QUERY_TILE // size["BLOCK_D"])):
        raise ValueError(
            f"q, k_cache: got {group} query heads a KV head; accepted: at most {most} at head_dim "
            f"{head_dim}"
        )
