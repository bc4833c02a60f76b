"""Generation with a cache, one request after the other: the same loop for every rung.

    generate(model, prompts, max_new_tokens, rung=PREALLOCATED)

A `Rung` says which cache, which operations, and what to do to the model first. Lessons whose
subject is the loop itself (2, 11, 14 to 16) have a loop of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import (
    OnToken,
    Request,
    check_call,
    read_requests,
    take_next_tokens,
)
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import AttentionOps, KVPool
from lessons.toolbox.model.arguments import check_kind


def as_it_is(model: Decoder) -> Decoder:
    """The model of a rung that changes nothing in it."""
    return model


@dataclass(frozen=True)
class Rung:
    """How a rung of the ladder serves a request.

    kernels: its operations on a GPU, or a function that imports them, so that a CPU does not have
    to. stand_ins: the same in PyTorch, for a CPU, where kernels would be interpreted.
    prepare(model) -> model: done once. cache: KVPool, or a class with its `for_model` and
    `attending`.
    """

    name: str
    kernels: AttentionOps | Callable[[], AttentionOps]
    stand_ins: AttentionOps
    prepare: Callable[[Decoder], Decoder] = as_it_is
    cache: type = KVPool

    def ops(self, device: torch.device) -> AttentionOps:
        """The operations on this device."""
        if device.type != "cuda":
            return self.stand_ins
        return self.kernels if isinstance(self.kernels, AttentionOps) else self.kernels()

    def new_cache(self, model: Decoder, num_blocks: int, block_size: int):
        """An empty cache for `num_blocks` sequences of at most `block_size` tokens."""
        # The default is looked up at the call, because exercise 3.2 can take the place of KVPool.
        cache = KVPool if self.cache is Rung.cache else self.cache
        return cache.for_model(model, num_blocks, block_size, self.ops(model.device))


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    rung: Rung,
) -> list[list[int]]:
    """The generated token ids of each prompt, one prompt after the other, each with its own cache.

    Arguments, result and errors as in lesson 2's `generate`.
    """
    check_call(model, on_token)
    check_kind(Rung, "a Rung, such as PREALLOCATED", rung=rung)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    model = rung.prepare(model)
    for request in requests:
        if not request.finished:  # a request for 0 tokens is finished, and needs no cache
            cache = rung.new_cache(model, 1, request.most_cached)
            run_request(model, cache, request, on_token)
    return [request.output for request in requests]


def run_request(
    model: Decoder, cache: KVPool, request: Request, on_token: OnToken | None = None
) -> None:
    """Run what the cache does not hold yet: the prompt once, and then one token a step."""
    held = 0
    while not request.finished:
        new = request.tokens[held:]
        batch = new_batch([(new, held)], cache.block_size, model.device)
        hidden = model(batch.tokens, cache.attending(batch))
        take_next_tokens(model.logits(hidden[batch.logits_at]), [request], on_token)
        held += len(new)
