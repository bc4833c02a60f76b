"""A batch decoded in lockstep, eagerly: every step launches every operation again, one by one.

One request alone reads all weights for one token; B requests side by side read them once for B
tokens. So the prompts of a wave are prefilled one by one, then all of its requests step together;
who is finished leaves. What the CPU does to launch a step stays: some hundred operations, whatever
the batch. optimized.py removes that.

The waves are static: a place that falls free stays free until the whole wave has ended (lesson 14
fills it).

Source: static batches and what they waste: Yu et al. 2022, Orca, section 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, Request, read_requests, take_next_tokens
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs.slots import (
    SlotCache,
    Step,
    decode_logits,
    new_slot_cache,
    step_inputs,
)

MAX_BATCH = 32  # requests of a wave


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Up to MAX_BATCH prompts at a time. Arguments, result and errors as in lesson 2's `generate`."""
    return batch_loop(eager_step, fused(model), prompts, max_new_tokens, sampling, on_token)


def eager_step(model: Decoder, cache: SlotCache) -> Step:
    """A decode step that launches one operation after the other."""

    def step(inputs: Tensor) -> Tensor:
        # known to Python, so a slice of it costs no wait; it changes from step to step
        longest = int(inputs[3].max())
        return decode_logits(model, cache, inputs.to(model.device), longest)

    return step


@torch.inference_mode()
def batch_loop(
    new_step: Callable[[Decoder, SlotCache], Step],
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    max_batch: int = MAX_BATCH,
) -> list[list[int]]:
    """`generate` in waves of at most `max_batch` requests. new_step(model, cache) -> step(inputs:
    [4, B]) -> logits: [B, V].
    """
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    # a request for 0 tokens needs no slots
    waiting = [request for request in requests if not request.finished]
    if waiting:
        # - 1, because nothing is computed from the last generated token, so it never enters the cache.
        capacity = max(len(request.prompt) + request.max_new_tokens - 1 for request in waiting)
        cache = new_slot_cache(model, min(max_batch, len(waiting)), capacity)
        step = new_step(model, cache)
        for start in range(0, len(waiting), max_batch):
            run_wave(model, cache, step, waiting[start : start + max_batch], on_token)
    return [request.output for request in requests]


def run_wave(
    model: Decoder,
    cache: SlotCache,
    step: Step,
    wave: list[Request],
    on_token: OnToken | None = None,
) -> None:
    """Prefill the requests one by one, then decode all that are not finished, until none is left."""
    for row, request in enumerate(wave):
        tokens = torch.tensor(request.prompt, device=model.device)
        hidden = model(
            tokens, torch.arange(len(tokens), device=model.device), cache.prefilling(row)
        )
        take_next_tokens(model.logits(hidden[-1:]), [request], on_token)
    while running := leave(cache, wave):
        take_next_tokens(step(step_inputs(running, cache.capacity)), running, on_token)
        wave = running


def leave(cache: SlotCache, wave: list[Request]) -> list[Request]:
    """Who goes on, request b in row b of the cache: the last running request moves into the row of
    one that has finished.
    """
    running = list(wave)
    for row in reversed(range(len(running))):
        if running[row].finished:
            last = len(running) - 1
            if row != last:
                cache.move(last, row, len(running[last].prompt) + len(running[last].output) - 1)
            running[row] = running[last]
            running.pop()
    return running
