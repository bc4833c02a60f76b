"""What caches write and copy while tokens come in: counted by the caches themselves, not timed."""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.toolbox.model.config import ModelConfig

MIB = 2**20


def no_attention(q: Tensor, *_) -> Tensor:
    """q: [T, Hq, D] as it is, because only what is written counts here."""
    return q


STORE_ONLY = LESSON_03_TORCH._replace(prefill=no_attention, decode=no_attention)


def store(
    cache: ConcatCache | KVPool,
    steps: list[int],
    held: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Store zeros for so many tokens a step, after `held` others, in every layer of a cache for
    one sequence. A pool should have the ops STORE_ONLY; it grows where it must.
    """
    config = cache.config
    for new in steps:
        k, v = torch.zeros(2, new, config.num_key_value_heads, config.head_dim, dtype=dtype)
        q = torch.zeros(new, config.num_attention_heads, config.head_dim, dtype=dtype)
        if isinstance(cache, ConcatCache):
            for layer in range(config.num_hidden_layers):
                cache.append(layer, k, v)
        else:
            cache.reserve(held + new)
            attend = cache.attending(new_batch([([0] * new, held)], cache.block_size))
            for layer in range(config.num_hidden_layers):
                attend(layer, q, k, v)
        held += new


def mib_written(config: ModelConfig, sizes: list[int]) -> dict[str, list[float]]:
    """MiB that each kind of cache has written, copies included, when it holds so many tokens that
    came one by one. sizes: ascending.
    """
    caches = {
        "ConcatCache": ConcatCache(config, sizes[-1]),
        "KVPool, doubling": KVPool(config, 1, 64, STORE_ONLY),
        "KVPool, reserved": KVPool(config, 1, sizes[-1], STORE_ONLY),
    }
    written = {label: [] for label in caches}
    held = 0
    for size in sizes:
        for label, cache in caches.items():
            store(cache, [1] * (size - held), held)
            written[label].append((cache.written_bytes + cache.growth_copy_bytes) / MIB)
        held = size
    return written
