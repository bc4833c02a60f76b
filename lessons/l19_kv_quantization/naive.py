"""Naive: the pages become numbers in memory, then lesson 12 attends to them.

The cache is smaller, but a step moves more bytes than before: it reads the codes, writes the
numbers and reads them again. optimized.py reads the codes and stops there.
"""

import torch
from torch import Tensor

from lessons.l12_paged_kv.naive import gathered_attention
from lessons.l19_kv_quantization.formats import RowFormat


def dequantized_attention(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    format: RowFormat,
    **options,
) -> Tensor:
    """The newest tokens of each sequence over all of it. q: [T, Hq, D] -> [T, Hq, Dv].

    k_codes, v_codes: [num_blocks, block_size, Hkv, bytes of a row] uint8; k_scales, v_scales:
    [num_blocks, block_size, Hkv, scales of a row]; the rest, and the options, as in lesson 12's
    `gathered_attention`.
    """
    k_cache = format.dequantize(k_codes, k_scales)
    v_cache = format.dequantize(v_codes, v_scales)
    return gathered_attention(
        q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, **options
    )


def dequantized_decode(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    format: RowFormat,
    **options,
) -> Tensor:
    """The same for one new token of each sequence. q: [B, Hq, D] -> [B, Hq, Dv]."""
    starts = torch.arange(len(q) + 1, device=q.device)
    return dequantized_attention(
        q,
        k_codes,
        v_codes,
        k_scales,
        v_scales,
        block_table,
        starts,
        context_lens,
        format,
        **options,
    )
