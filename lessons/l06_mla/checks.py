"""Bad input to the wrappers of this lesson and of lesson 10's latents, refused in one line each.
Nothing here looks at a value on the GPU, because that waits for it.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.checks import (
    MAX_ELEMENTS,
    check_dense,
    check_grid,
    check_one_device,
    check_values,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_latent_inputs(q: Tensor, kv_cache: Tensor, context_lens: Tensor, rank: int) -> None:
    """Raise ValueError unless q: [B, H, rank + rope], kv_cache: [B, capacity, rank + rope],
    context_lens: [B] fit the kernel.
    """
    if (
        q.ndim != 3
        or kv_cache.ndim != 3
        or q.shape[::2] != kv_cache.shape[::2]
        or context_lens.shape != q.shape[:1]
    ):
        shapes = [tuple(x.shape) for x in (q, kv_cache, context_lens)]
        raise ValueError(
            f"q, kv_cache, context_lens: got {shapes}; accepted: [B, H, D], [B, capacity, D], [B]"
        )
    check_grid("q", len(q), "sequences")
    rope = q.shape[2] - rank
    # tl.arange takes powers of two, tl.dot 16 at least
    if any(n < 16 or n & (n - 1) for n in (rank, rope)) or rank > 512:
        raise ValueError(
            f"kv_lora_rank: got {rank}, which leaves q and kv_cache {rope} rotary values; "
            "accepted: powers of two, 16 to 512 and 16 or more"
        )
    if q.dtype != kv_cache.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"q, kv_cache: got {q.dtype}, {kv_cache.dtype}; accepted: both float32, float16 or "
            "bfloat16"
        )
    if context_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"context_lens: got {context_lens.dtype}; accepted: int32 or int64")
    check_one_device(q=q, kv_cache=kv_cache, context_lens=context_lens)
    if q.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        raise ValueError(
            "q, kv_cache: got a last dimension that is not dense; accepted: stride 1 in it"
        )
    if q.shape[1] * q.stride(1) > MAX_ELEMENTS:  # counted in 32 bits, because 64 would spill
        raise ValueError(
            f"q: got heads that lie {q.stride(1)} elements apart; accepted: all of a token's within "
            f"{MAX_ELEMENTS}"
        )
    check_dense(context_lens=context_lens)
    check_values(0, kv_cache.shape[1], context_lens=context_lens)
