"""From recomputing everything to remembering: a KV cache that concatenates.

Rung by rung: lesson 2's `generate` recomputes K and V of the whole sequence at every step.
`ConcatCache` keeps them, so a step computes one token, but it copies everything kept so far to make
room for it. cache.py stops copying.

Source: Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.request import check_all_attend
from lessons.l02_naive_attention.rope import new_cos_sin_cache, new_local_cos_sin_cache, rotate
from lessons.l02_naive_attention.variants.score_rules import attention_for, sinks_of
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps, check_at_least_one
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.toolbox.model.arguments import check_kind
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.placement import read_device


class ConcatCache:
    """K and V of one sequence's tokens so far, one tensor a layer: [length, Hkv, D].

    written_bytes counts K and V of new tokens, growth_copy_bytes what torch.cat copied again only
    to make room for them: after n single-token steps kv_bytes_per_token · n (n - 1) / 2, quadratic.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        device: torch.device | str = "cpu",
    ):
        check_kind(ModelConfig, "a ModelConfig", config=config)
        check_all_attend(config)
        check_at_least_one(max_tokens=max_tokens)
        device = read_device(device, "meta")
        self.config = config
        self.block_size = max_tokens
        self.cos_sin_cache = new_cos_sin_cache(config, max_tokens, device)
        self.local_cos_sin_cache = new_local_cos_sin_cache(config, max_tokens, device)
        # layer -> K or V of its tokens so far
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.sinks: list[Tensor | None] = [None] * config.num_hidden_layers  # `for_model` has them
        self.written_bytes = 0
        self.growth_copy_bytes = 0

    @classmethod
    def for_model(
        cls,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        ops: AttentionOps,
    ) -> "ConcatCache":
        """An empty cache for one sequence of at most `block_size` tokens; it has no use for ops."""
        cache = cls(model.config, block_size, model.device)
        cache.sinks = sinks_of(model)
        return cache

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add new tokens after the old ones. k: [T, Hkv, D]; v: [T, Hkv, Dv]."""
        self.written_bytes += k.nbytes + v.nbytes
        if layer in self.keys:
            old_k, old_v = self.keys[layer], self.values[layer]
            self.growth_copy_bytes += old_k.nbytes + old_v.nbytes
            k = torch.cat([old_k, k])
            v = torch.cat([old_v, v])
        self.keys[layer] = k
        self.values[layer] = v

    def attending(self, batch: Batch) -> Attend:
        """The decoder's `attend` for one step: rotate, append, attend to everything."""
        config = self.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            is_local = config.has_local_rope(layer)
            cos_sin_cache = self.local_cos_sin_cache if is_local else self.cos_sin_cache
            q = rotate(q, batch.positions, cos_sin_cache)
            k = rotate(k, batch.positions, cos_sin_cache)
            self.append(layer, k, v)
            keys, values = self.keys[layer], self.values[layer]
            window = config.sliding_window(layer)
            attend_to = attention_for(config, attention, self.sinks[layer])
            return attend_to(q, keys, values, config.softmax_scale, window=window)

        return attend


CONCATENATED = Rung("KV cache, concatenated", LESSON_03_TORCH, LESSON_03_TORCH, cache=ConcatCache)
