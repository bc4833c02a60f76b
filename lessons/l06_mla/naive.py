"""A cache of latents that decompresses everything at every step: small to keep, dear to read.

Rung by rung: lesson 3's cache keeps k and v of every head; `LatentCache` keeps one row of rank +
rope values, c_kv ‖ k_pe, and makes k and v of all heads from it whenever they are needed.
optimized.py does not make them at all.

Source: DeepSeek-V2 (2024), section 2.1.2, equations 9 to 13.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.request import OnToken
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.cache import KVCache
from lessons.l03_kv_cache.naive import cached_loop
from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.toolbox.model.config import ModelConfig


class LatentCache(KVCache):
    """One row a token and layer, c_kv ‖ k_pe: `keys` is [layers, capacity, 1, rank + rope],
    `values` has no width.

    Lesson 3's cache otherwise: reserve, append, counters. Its `attend` is for a `latent()` twin: k
    is k_pe, v is c_kv.
    """

    def __init__(self, model: DeepseekDecoder, capacity: int):
        super().__init__(model.config, capacity, model.dtype, model.device)
        self.model = model

    @staticmethod
    def rows(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        return (1, config.mla.latent_dim), (1, 0)

    def write(self, layer: int, k_pe: Tensor, c_kv: Tensor) -> None:
        self.keys[layer, self.length : self.length + len(c_kv)] = torch.cat([c_kv, k_pe], dim=-1)

    def expanded(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """k: [end, H, nope + rope] and v: [end, H, v_dim] of the first `end` rows, made from their
        latents.
        """
        rank, rope = self.config.mla.kv_lora_rank, self.config.mla.qk_rope_head_dim
        return self.model.layers[layer].self_attn.expand(
            *self.keys[layer, :end].split([rank, rope], dim=-1)
        )

    def prefill(self, layer: int, q: Tensor, end: int) -> Tensor:
        """The newest tokens attend to the first `end` rows. q: [T, H, nope + rope] -> [T, H,
        v_dim].
        """
        k, v = self.expanded(layer, end)
        return attention(q, k, v, self.config.softmax_scale)

    def decode(self, layer: int, q: Tensor, end: int) -> Tensor:
        """The newest token attends to the first `end` rows. q: [1, H, nope + rope] -> [1, H,
        v_dim].
        """
        return self.prefill(layer, q, end)


def generate(
    model: DeepseekDecoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """One prompt after the other, each with its own LatentCache. As lesson 2's `generate`, for
    models with config.mla.
    """
    return latent_loop(LatentCache, model, prompts, max_new_tokens, sampling, on_token)


def latent_loop(new_cache: Callable, model: DeepseekDecoder, *request) -> list[list[int]]:
    """`cached_loop` for caches of latents: new_cache(twin, max_tokens). Raises ValueError for a
    model without latents.
    """
    if not isinstance(model, DeepseekDecoder):
        raise ValueError(
            f"model: got a {type(model).__name__}; accepted: a DeepseekDecoder, which has latents "
            f"to cache"
        )
    return cached_loop(new_cache, model.latent(), *request)
