"""Exercise 19.4, the kernel's hook for four bits, where a quantized cache is read."""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l19_kv_quantization.pool import QuantizedPool

Stored = tuple[Tensor, Tensor]  # codes and scales of a layer


def read_codes(yours: Callable, original: Callable) -> Callable:
    """int4_decode in place of pool.read_codes, for steps of one token a sequence, in float32, over
    a cache of 4 bits whose heads of K and V are equally wide.
    """

    def read(
        pool: QuantizedPool,
        layer: int,
        q: Tensor,
        keys: Stored,
        values: Stored,
        batch: Batch,
        in_use,
    ) -> Tensor:
        config = pool.config
        is_plain = not config.has_score_rules and config.sliding_window(layer) is None
        is_same = config.head_dim == config.v_head_dim
        is_scaled = config.softmax_scale == config.head_dim**-0.5
        is_asked = pool.format.name == "int4" and q.dtype == torch.float32
        if not (is_asked and is_plain and is_same and is_scaled and batch.max_seqlen_q == 1):
            return original(pool, layer, q, keys, values, batch, in_use)
        k_codes, k_scales, v_codes, v_scales = map(pool.blocks, (*keys, *values))
        # The exercise has the scales of a head side by side: [Hkv, num_blocks, block_size, 2].
        k_scales, v_scales = (x.permute(2, 0, 1, 3).contiguous() for x in (k_scales, v_scales))
        tables = batch.block_table.int(), batch.context_lens.int()
        return yours(q.contiguous(), k_codes, v_codes, k_scales, v_scales, *tables)

    return read
