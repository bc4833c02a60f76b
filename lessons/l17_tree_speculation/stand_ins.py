"""PyTorch instead of the kernel, for machines without a GPU: gather a sequence's blocks, then
PyTorch's own attention with the tree's mask.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lessons.l03_kv_cache.batch import Batch, sequences
from lessons.l12_paged_kv.kernels import stand_ins as paged
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH, chunk_attention, gathered


def sees(table: Tensor, held: int, window: int | None = None) -> Tensor:
    """Which key each node sees: [N, held + N] bool. table: [N, N] int8 of one tree, as in tree.py;
    held: tokens before the root.
    """
    # A key that was held is this many tokens above a node, itself counted: depth + 1 + held -
    # key.
    in_front = torch.arange(held, 0, -1, device=table.device)
    above = torch.cat([table[:, :1] + in_front, table], dim=1)
    found = above > 0
    return found if window is None else found & (above <= window)


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Any new tokens: trees, and prompts beside them. q: [T, Hq, D] -> [T, Hq, Dv]; caches as in
    lesson 12.
    """
    if batch.tree is None:
        return paged.prefill(q, k_cache, v_cache, batch, softmax_scale, window)
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for b, (rows, length) in enumerate(sequences(batch)):
        k, v = (gathered(cache, batch, b, length) for cache in (k_cache, v_cache))
        count = rows.stop - rows.start
        table = batch.tree[rows, :count]
        if table[0, 0] == 0:  # a prompt
            out[rows] = chunk_attention(q[rows], k, v, softmax_scale, window)
            continue
        heads = (x.transpose(0, 1)[None] for x in (q[rows], k, v))
        mask = sees(table, length - count, window)
        attended = scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


LESSON_17_TORCH = LESSON_12_TORCH._replace(prefill=prefill)
