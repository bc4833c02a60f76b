"""Bad input to the kernels' wrappers, refused in one line each; lesson 5's check_grouped_inputs
sees to q and the caches.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import MAX_GRID, check_one_device


def check_splits(
    num_splits: int | None, split_size: int | None, max_context_len: int | None, k_cache: Tensor
) -> None:
    """Raise ValueError unless at most one of num_splits and split_size is given, and a grid of them
    can be launched.

    k_cache: [B, capacity, Hkv, D].
    """
    capacity = k_cache.shape[1]
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"num_splits, split_size: got {num_splits} and {split_size}; accepted: one of the two"
        )
    if max_context_len is not None and not 0 <= max_context_len <= capacity:
        raise ValueError(
            f"max_context_len: got {max_context_len}; accepted: None, or 0 to {capacity}, the "
            f"capacity"
        )
    if num_splits is not None and not 1 <= num_splits <= MAX_GRID:
        raise ValueError(f"num_splits: got {num_splits}; accepted: None, or 1 to {MAX_GRID}")
    least = max(1, -(-capacity // MAX_GRID))
    if split_size is not None and split_size < least:
        raise ValueError(f"split_size: got {split_size}; accepted: None, or {least} or more keys")


def check_partials(partial_out: Tensor, partial_lse: Tensor) -> None:
    """Raise ValueError unless partial_out: [B, Hq, S, D] and partial_lse: [B, Hq, S] are float32,
    contiguous, S and D at least 1.
    """
    got = f"partial_out, partial_lse: got {tuple(partial_out.shape)} and {tuple(partial_lse.shape)}"
    if (
        partial_out.ndim != 4
        or partial_out.shape[:3] != partial_lse.shape
        or not partial_out.shape[2]
        or not partial_out.shape[3]
    ):
        raise ValueError(f"{got}; accepted: [B, Hq, S, D] and [B, Hq, S], S and D at least 1")
    if {partial_out.dtype, partial_lse.dtype} != {torch.float32}:
        raise ValueError(
            f"partial_out, partial_lse: got {partial_out.dtype} and {partial_lse.dtype}; accepted: "
            f"float32 for both"
        )
    check_one_device(partial_out=partial_out, partial_lse=partial_lse)
    if not partial_out.is_contiguous() or not partial_lse.is_contiguous():
        raise ValueError(f"{got}, with gaps; accepted: contiguous")
