"""One new token of every sequence in PyTorch: whatever their lengths, the same operations.

The stand-ins of lessons 3 to 10 go from sequence to sequence and look at the lengths. A step that
is to be captured must not look. Here lengths decide what is masked, and never a shape.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lessons.l03_kv_cache.batch import Batch
from lessons.l05_gqa.optimized import LESSON_05_TORCH
from lessons.l06_mla.naive import LATENTS_TORCH


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """All sequences at once. q: [B, Hq, D] -> [B, Hq, Dv]."""
    rows = slice(0, len(q)), slice(0, batch.max_context_len)
    lens = batch.context_lens
    return batched_decode_attention(q, k_cache[rows], v_cache[rows], lens, softmax_scale, window)


def batched_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    window: int | None = None,
) -> Tensor:
    """One query per sequence over its rows: q: [B, Hq, D]; keys: [B, N, Hkv, D]; values: [B, N,
    Hkv, Dv] -> [B, Hq, Dv].

    context_lens: [B], rows in use; 0 gives zeros. The price of shapes that never change: all N rows
    are read, and what is not in use must be finite. PyTorch's own fused attention, because on a CPU
    two matrix products would first copy K and V into another order.
    """
    row = torch.arange(keys.shape[1], device=q.device)
    sees = row < context_lens[:, None]  # [B, N]
    if window is not None:
        sees = sees & (row >= context_lens[:, None] - window)
    # The query heads of a KV head take the place of a sequence's queries: all see the same keys.
    grouped = q.unflatten(1, (keys.shape[2], -1))  # [B, Hkv, group, D]
    out = scaled_dot_product_attention(
        grouped,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=sees[:, None, None, :],
        scale=softmax_scale,
    )
    # A sequence that sees nothing divides 0 by 0.
    return out.flatten(1, 2).masked_fill(context_lens[:, None, None] == 0, 0)


LESSON_11_TORCH = LESSON_05_TORCH._replace(decode=decode)
LATENTS_11_TORCH = LATENTS_TORCH._replace(decode=decode)
