"""The library beside which the benchmark stands on a GPU: FlashInfer's batch decode, the cache cut
into pages of 16 tokens.
"""

from collections.abc import Callable

import flashinfer
import torch
from torch import Tensor

PAGE_SIZE = 16  # tokens; FlashInfer's pages are views of our cache, so nothing is copied
WORKSPACE_BYTES = 128 * 2**20


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Callable[[], Tensor]:
    """A function that attends over full caches. q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv,
    D] -> [B, Hq, D].

    Its tensor-core path, which packs the query heads of a group into a tile as ours does. Planning
    is not timed: an engine plans once for all layers. Raises ValueError for a capacity that is no
    multiple of PAGE_SIZE.
    """
    (batch, num_heads, head_dim), (_, capacity, num_kv_heads, _) = q.shape, k_cache.shape
    if capacity % PAGE_SIZE:
        raise ValueError(f"k_cache: got capacity {capacity}; accepted: a multiple of {PAGE_SIZE}")
    pages = capacity // PAGE_SIZE
    int32 = {"dtype": torch.int32, "device": q.device}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device),
        "NHD",
        use_tensor_cores=True,
    )
    wrapper.plan(
        torch.arange(0, batch * pages + 1, pages, **int32),
        torch.arange(batch * pages, **int32),
        torch.full((batch,), PAGE_SIZE, **int32),
        num_heads,
        num_kv_heads,
        head_dim,
        PAGE_SIZE,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    paged = tuple(cache.view(-1, PAGE_SIZE, num_kv_heads, head_dim) for cache in (k_cache, v_cache))
    return lambda: wrapper.run(q, paged)
