"""From recomputing everything to remembering: a KV cache that concatenates.

Rung by rung: lesson 2's `generate` recomputes K and V of the whole sequence at every step;
`ConcatCache` keeps them, so a step computes one token, but copies everything kept so far to make
room for it; optimized.py stops copying.

Source: Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.request import OnToken, read_requests, take_next_tokens
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.toolbox.model.config import ModelConfig


class ConcatCache:
    """K and V of the tokens so far, one tensor a layer: [length, Hkv, D]. Its `attend` is what the
    decoder calls.

    written_bytes counts K and V of new tokens, growth_copy_bytes what torch.cat copied again only
    to make room for them: after n single-token steps kv_bytes_per_token · n (n - 1) / 2, quadratic.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.keys: list[Tensor | None] = [None] * config.num_hidden_layers
        self.values: list[Tensor | None] = [None] * config.num_hidden_layers
        self.written_bytes = 0
        self.growth_copy_bytes = 0

    @property
    def length(self) -> int:
        """Tokens that every layer holds. The next token's position, because positions count from 0."""
        return 0 if self.keys[-1] is None else len(self.keys[-1])

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add new tokens behind the old ones. k, v: [T, Hkv, D]."""
        self.written_bytes += k.nbytes + v.nbytes
        if self.keys[layer] is None:
            self.keys[layer], self.values[layer] = k, v
            return
        self.growth_copy_bytes += self.keys[layer].nbytes + self.values[layer].nbytes
        self.keys[layer] = torch.cat([self.keys[layer], k])
        self.values[layer] = torch.cat([self.values[layer], v])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append, then attend to everything: q: [T, Hq, D] of the last T tokens; k, v: [T, Hkv, D]
        -> [T, Hq, D].
        """
        self.append(layer, k, v)
        return attention(
            q,
            self.keys[layer],
            self.values[layer],
            self.config.softmax_scale,
            window=self.config.sliding_window(layer),
        )


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """One prompt after the other, each with its own ConcatCache. Arguments, result and errors as in
    lesson 2's `generate`.
    """
    return cached_loop(
        lambda model, max_tokens: ConcatCache(model.config),
        model,
        prompts,
        max_new_tokens,
        sampling,
        on_token,
    )


@torch.inference_mode()
def cached_loop(
    new_cache: Callable,
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """`generate` with a memory: run what the cache does not hold yet, that is the prompt once and
    then one token a step.

    new_cache(model, max_tokens) -> an object with `length` and `attend`, empty, that will be asked
    to hold max_tokens at most.
    """
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    # a request for 0 tokens is finished, and needs no cache
    for request in (r for r in requests if not r.finished):
        # - 1, because nothing is computed from the last generated token, so it never enters the cache.
        cache = new_cache(model, len(request.prompt) + request.max_new_tokens - 1)
        while not request.finished:
            new = torch.tensor(request.tokens[cache.length :], device=model.device)
            positions = torch.arange(cache.length, cache.length + len(new), device=model.device)
            hidden = model(new, positions, cache.attend)
            take_next_tokens(model.logits(hidden[-1:]), [request], on_token)
    return [request.output for request in requests]
