"""Attention with a soft cap or sinks over any cache of the course: contiguous, or in blocks.

A pool for a model that asks for one of them (Gemma 2, gpt-oss) attends with these functions,
whatever operations it was given, because no kernel of the course knows them. `write` stays the
rung's own.
"""

from functools import partial

import torch
from torch import Tensor

from lessons.l02_naive_attention.variants.score_rules import ruled_attention
from lessons.l03_kv_cache.batch import Batch, sequences
from lessons.toolbox.model.config import ModelConfig


def with_rules(ops, config: ModelConfig):
    """The AttentionOps `ops`, with attention that follows the model's rule for scores. It takes
    `sinks`: [Hq] of the layer as well, or None.
    """
    attend = partial(attend_ruled, cap=config.attn_logit_softcapping)
    return ops._replace(prefill=attend, decode=attend)


def attend_ruled(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
    *,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """New tokens of each sequence, one or many. q: [T, Hq, D] -> [T, Hq, Dv]; k_cache, v_cache:
    [num_blocks, block_size, Hkv, …]; sinks: [Hq].
    """
    outs = []
    for b, (rows, length) in enumerate(sequences(batch)):
        k, v = (rows_of(cache, batch, b, length) for cache in (k_cache, v_cache))
        out = ruled_attention(q[rows], k, v, softmax_scale, window, cap=cap, sinks=sinks)
        outs.append(out)
    return torch.cat(outs)


def rows_of(cache: Tensor, batch: Batch, b: int, length: int) -> Tensor:
    """What sequence b holds. cache: [num_blocks, block_size, Hkv, D] -> [length, Hkv, D]."""
    if batch.block_table is None:  # sequence b owns block b
        return cache[b, :length]
    blocks = batch.block_table[b, : -(-length // cache.shape[1])]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]
