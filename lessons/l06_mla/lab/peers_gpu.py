"""FlashInfer's kernel for absorbed queries, as the benchmark calls it on a GPU: pages of one token,
in order.
"""

from collections.abc import Callable

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch import Tensor


def flashinfer_decode(
    q: Tensor, kv_cache: Tensor, softmax_scale: float, rank: int
) -> Callable[[], Tensor]:
    """A function without arguments that attends: q: [B, H, rank + rope], kv_cache: [B, context,
    rank + rope] -> [B, H, rank].
    """
    (num_sequences, num_heads, dim), context = q.shape, kv_cache.shape[1]
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(2**27, dtype=torch.int8, device=q.device))
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=q.device)
    pages = torch.arange(num_sequences * context, dtype=torch.int32, device=q.device)
    lengths = torch.full((num_sequences,), context, dtype=torch.int32, device=q.device)
    wrapper.plan(
        starts,
        starts * context,
        pages,
        lengths,
        num_heads,
        rank,
        dim - rank,
        1,
        False,
        softmax_scale,
        q.dtype,
        q.dtype,
    )
    rows = kv_cache.view(-1, 1, dim)
    # Parts of one cache need not lie dense: the kernel takes their strides.
    return lambda: wrapper.run(q[..., :rank], q[..., rank:], rows[..., :rank], rows[..., rank:])
