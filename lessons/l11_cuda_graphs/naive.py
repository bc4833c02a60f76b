"""A batch decoded in lockstep, eagerly: every step launches every operation again, one by one.

One request alone reads all weights for one token. B requests side by side read them once for B
tokens. So the prompts of a wave are read first, packed into as few passes as fit, then all of its
requests step together, and a request that is finished leaves. What the CPU does to launch a step
stays: some hundred operations, whatever the batch. optimized.py removes that.

The waves are static: a place that falls free stays free until the whole wave has ended (lesson 14
fills it).

Source: static batches and what they waste: Yu et al. 2022, Orca, section 3.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.requests import sampling_batch, take_batch_tokens
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, Request, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l06_mla.deepseek import latent
from lessons.l06_mla.optimized import AbsorbedPool
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l10_flash_decoding.mla import LATENTS_10
from lessons.l10_flash_decoding.optimized import LESSON_10
from lessons.l11_cuda_graphs.stand_ins import LATENTS_11_TORCH, LESSON_11_TORCH

MAX_BATCH = 32  # requests of a wave
MAX_PREFILL_TOKENS = 4096  # of prompts in one pass, because its activations need memory

Step = Callable[[Tensor], Tensor]  # inputs: [4, B] on the CPU -> logits: [B, V]
NewStep = Callable[[Decoder, KVPool], Step]

LOCKSTEP = Rung("32 requests in lockstep", LESSON_10, LESSON_11_TORCH, prepare=fused)


def fused_latents(model: Decoder) -> Decoder:
    """The fused twin of a model with latents, which hands them to its cache."""
    return latent(fused(model))


LATENT_LOCKSTEP = Rung(
    "32 requests in lockstep",
    LATENTS_10,
    LATENTS_11_TORCH,
    prepare=fused_latents,
    cache=AbsorbedPool,
)


def lockstep_of(model: Decoder) -> Rung:
    """Which of the two serves this model."""
    return LOCKSTEP if model.config.mla is None else LATENT_LOCKSTEP


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Up to MAX_BATCH prompts at a time. Arguments, result and errors as in lesson 2's
    `generate`.
    """
    return batch_loop(eager_step, model, prompts, max_new_tokens, sampling, on_token)


def eager_step(model: Decoder, pool: KVPool) -> Step:
    """A decode step that launches one operation after the other."""

    def step(inputs: Tensor) -> Tensor:
        # Python knows this number, so it may cut a slice without a wait. It grows step by step.
        longest = int(inputs[3].max())
        return decode_logits(model, pool, decode_batch(inputs.to(model.device), longest))

    return step


# ---------------------------------------------------------------- waves


class Setup(NamedTuple):
    """What waves run on. They belong together, because a captured step reads this pool only."""

    model: Decoder  # as its rung prepares it
    pool: KVPool
    step: Step


def set_up(new_step: NewStep, model: Decoder, num_blocks: int, block_size: int) -> Setup:
    """An empty pool for `num_blocks` requests of up to `block_size` tokens, and a step over it."""
    rung = lockstep_of(model)
    model = rung.prepare(model)
    pool = rung.new_cache(model, num_blocks, block_size)
    return Setup(model, pool, new_step(model, pool))


@torch.inference_mode()
def batch_loop(
    new_step: NewStep,
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    max_batch: int = MAX_BATCH,
) -> list[list[int]]:
    """`generate` in waves of at most `max_batch` requests, each step by new_step(model, pool)."""
    check_call(model, on_token)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        setup = set_up(new_step, model, *room_for(waiting, max_batch))
        run_waves(setup, waiting, on_token)
    return [request.output for request in requests]


def unfinished(requests: list[Request]) -> list[Request]:
    """Those that need a place. A request for 0 tokens is finished before it begins."""
    return [request for request in requests if not request.finished]


def room_for(waiting: list[Request], max_batch: int = MAX_BATCH) -> tuple[int, int]:
    """num_blocks and block_size of a pool for waves of at most `max_batch` requests."""
    longest = max(request.most_cached for request in waiting)
    return min(max_batch, len(waiting)), longest


def run_waves(setup: Setup, waiting: list[Request], on_token: OnToken | None = None) -> None:
    """One wave after the other, each as many requests as the pool has blocks."""
    size = setup.pool.num_blocks
    for start in range(0, len(waiting), size):
        run_wave(*setup, waiting[start : start + size], on_token)


def run_wave(
    model: Decoder,
    pool: KVPool,
    step: Step,
    wave: list[Request],
    on_token: OnToken | None = None,
) -> None:
    """Read all prompts, then decode all requests that are not finished, until none is left."""
    for first, group in prompt_groups(wave):
        prefill(model, pool, first, group, on_token)
    while wave := leave(pool, wave):
        # made anew, because the requests that stay have other rows now
        batch = sampling_batch(wave, model.device)
        while not any(request.finished for request in wave):
            logits = step(step_inputs(wave, pool.block_size))
            take_batch_tokens(logits, batch, wave, on_token)


def prompt_groups(wave: list[Request]) -> Iterator[tuple[int, list[Request]]]:
    """(first row, requests) of each pass: at most MAX_PREFILL_TOKENS, but one prompt at least."""
    first, group, tokens = 0, [], 0
    for row, request in enumerate(wave):
        if group and tokens + len(request.prompt) > MAX_PREFILL_TOKENS:
            yield first, group
            first, group, tokens = row, [], 0
        group.append(request)
        tokens += len(request.prompt)
    yield first, group


def prefill(
    model: Decoder,
    pool: KVPool,
    first: int,
    group: list[Request],
    on_token: OnToken | None = None,
) -> None:
    """Run the prompts of `group`, packed, into the pool's blocks from `first` on, and sample."""
    chunks = [(request.prompt, 0) for request in group]
    tables = [[first + row] for row in range(len(group))]
    batch = new_batch(chunks, pool.block_size, model.device, tables)
    hidden = model(batch.tokens, pool.attending(batch, first_block=first))
    logits = model.logits(hidden[batch.logits_at])
    take_batch_tokens(logits, sampling_batch(group, model.device), group, on_token)


def leave(pool: KVPool, wave: list[Request]) -> list[Request]:
    """The requests that go on, request b in block b of the pool: the last running request moves
    into the block of one that has finished.
    """
    running = list(wave)
    for row in reversed(range(len(running))):
        if not running[row].finished:
            continue
        last = running.pop()
        if row < len(running):
            pool.move(len(running), row, len(last.tokens) - 1)
            running[row] = last
    return running


# ---------------------------------------------------------------- one step


def step_inputs(running: list[Request], capacity: int) -> Tensor:
    """What changes from step to step, one column a request: [4, B] int64, on the CPU.

    Rows: the token to run, its position, the slot of its K and V, how many slots it sees with
    its own. Request b owns the slots b · capacity … (b + 1) · capacity - 1.
    """
    # - 1, because the newest token has not run yet
    held = [len(request.tokens) - 1 for request in running]
    return torch.tensor(
        [
            [request.output[-1] for request in running],
            held,
            [row * capacity + length for row, length in enumerate(held)],
            [length + 1 for length in held],
        ]
    )


def decode_batch(inputs: Tensor, max_context_len: int) -> Batch:
    """The step of one new token a sequence, over views of inputs: [4, B] int64, on the device.

    max_context_len: at least the longest of inputs[3], known to Python.
    """
    tokens, positions, slot_mapping, context_lens = inputs
    counted = torch.arange(inputs.shape[1] + 1, dtype=torch.int32, device=inputs.device)
    return Batch(
        tokens,
        positions,
        slot_mapping,
        cu_seqlens_q=counted,
        context_lens=context_lens,
        logits_at=counted[:-1],
        max_seqlen_q=1,
        max_context_len=max_context_len,
    )


def decode_logits(model: Decoder, pool: KVPool, batch: Batch) -> Tensor:
    """One decode step: logits: [B, V]. Looks at no value of the batch's tensors from Python."""
    return model.logits(model(batch.tokens, pool.attending(batch)))
