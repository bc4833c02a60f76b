"""Exercise 6.2, a cache of latents, where lesson 6 reads its own."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l06_mla.deepseek import MLAttention
from lessons.l06_mla.naive import LatentPool


def read_absorbed(yours: type, original: Callable) -> Callable:
    """In place of optimized.read_absorbed, which reads the latents for one new token of each
    sequence: an AbsorbedCache of one layer over the rows of each sequence.
    """

    def read(
        pool: LatentPool, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch
    ) -> Tensor:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return original(pool, mla, q, latents, batch)  # because lengths are read below
        widths = [pool.config.mla.kv_lora_rank, pool.config.mla.qk_rope_head_dim]
        model = one_layer(mla, pool, q)
        outs = []
        for b, length in enumerate(batch.context_lens.tolist()):
            cache = yours(model, 0)
            # The pool's own memory. The newest token is in it already, and is stored again.
            cache.rows = latents[b, :, 0][None]
            cache.length = length - 1
            c_kv, k_pe = latents[b, length - 1, None].clone().split(widths, dim=-1)
            outs.append(cache.attend(0, q[b, None], k_pe, c_kv))
        return torch.cat(outs)

    return read


def one_layer(mla: MLAttention, pool: LatentPool, q: Tensor) -> SimpleNamespace:
    """A model of one layer, with what the exercise's cache asks of a model."""
    scale = pool.config.softmax_scale
    config = SimpleNamespace(mla=pool.config.mla, num_hidden_layers=1, softmax_scale=scale)
    layer = SimpleNamespace(self_attn=mla)
    return SimpleNamespace(config=config, layers=[layer], dtype=q.dtype, device=q.device)
