"""The loop of a server: schedule, run, sample, tell. It is the same for every scheduler.

Read `run_step`, then `generate`, which is this lesson's rung: a ContinuousScheduler, and one ragged
forward a step over lesson 12's pool.

A scheduler says what runs next. An executor runs it and returns a token for each sequence that
wants one: `ModelExecutor` by a model, clock.py's `CostExecutor` by a formula for the time.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import Batch
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.runner import new_pool, paged_rung_of, step_batch
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.toolbox.model.config import ModelConfig

MAX_NUM_SEQS = 32
BLOCK_SIZE = 16  # tokens


class Scheduler(Protocol):
    """What the loop asks of a scheduler. The order of a step: schedule, finish, leave."""

    is_idle: bool

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue."""

    def schedule(self) -> Step:
        """What runs next."""

    def finish(self, step: Step) -> list[Sequence]:
        """Count what has run. Returns the sequences that want a token, in the chunks' order."""

    def leave(self) -> list[Sequence]:
        """Finished sequences give back their places. Returns them."""


Executor = Callable[[Step], list[int]]  # a token for each sequence that is sampled


def run_step(
    scheduler: Scheduler, execute: Executor, on_token: OnToken | None = None
) -> tuple[Step, list[Sequence]]:
    """One turn of the loop. Returns what has run, and the sequences that have left. A step without
    chunks: nothing could run.
    """
    step = scheduler.schedule()
    if not step.chunks:
        return step, []
    tokens = execute(step)
    for sequence, token in zip(scheduler.finish(step), tokens):
        sequence.append(token)
        if on_token is not None:
            on_token(sequence.row, token)
    return step, scheduler.leave()


def run_until_idle(
    scheduler: Scheduler, execute: Executor, on_token: OnToken | None = None
) -> None:
    """Serve all that are in the queue. Raises RuntimeError if the scheduler has requests and runs
    none, because the loop would never end.
    """
    while not scheduler.is_idle:
        step, _ = run_step(scheduler, execute, on_token)
        if not step.chunks:
            raise RuntimeError("schedule() returned an empty step while requests were waiting")


# ---------------------------------------------------------------- the model


class StepRunner:
    """One pass of the model over what a scheduler chose, over a pool of blocks."""

    def __init__(self, model: Decoder, blocks: BlockManager, max_context_len: int):
        self.model = paged_rung_of(model).prepare(model)
        self.blocks = blocks
        self.pool = new_pool(self.model, blocks.num_blocks, blocks.block_size, max_context_len)

    @torch.inference_mode()
    def __call__(self, step: Step) -> Tensor:
        """logits: [S, V] of the S chunks that are sampled, in their order."""
        chunks = [(chunk.tokens, chunk.sequence.computed) for chunk in step.chunks]
        tables = [self.blocks.tables[chunk.sequence.row] for chunk in step.chunks]
        batch = step_batch(self.pool, chunks, tables)
        sampled = [index for index, chunk in enumerate(step.chunks) if chunk.is_sampled]
        # Before the model runs, because a list becomes a copy to the GPU, and the copy waits for
        # it.
        return self.run(batch, batch.logits_at[sampled])

    def run(self, batch: Batch, rows: Tensor) -> Tensor:
        """The pass itself. rows: [S] int64, of `hidden`, which become logits: [S, V]."""
        hidden = self.model(batch.tokens, self.pool.attending(batch))
        return self.model.logits(hidden[rows])


class StepSampler:
    """Logits to tokens for the sequences of a step. Their sampling batch is kept while they stay,
    because in most steps the same sequences come again. new_batch: makes it, of them and a device.
    """

    def __init__(self, new_batch: Callable[..., SamplingBatch] = sampling_batch):
        self.new_batch = new_batch
        self.rows: list[int] = []
        self.batch: SamplingBatch | None = None

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """A token for each row of logits: [S, V]."""
        return read_tokens(self.draw(logits, sequences))

    @torch.inference_mode()
    def draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """The same on the device, which Python does not wait for. -> [S] int64"""
        rows = [sequence.row for sequence in sequences]
        if rows != self.rows:
            self.rows, self.batch = rows, self.new_batch(sequences, logits.device)
        tokens = sample_batch(logits, self.batch)
        self.batch.append(tokens)
        return tokens


class ModelExecutor:
    """Runs a step and samples it. run(step) -> logits: [S, V] of the chunks that are sampled."""

    def __init__(self, run: Callable[[Step], Tensor]):
        self.run = run
        self.sample = StepSampler()

    def __call__(self, step: Step) -> list[int]:
        logits = self.run(step)
        return self.sample(logits, [chunk.sequence for chunk in step.chunks if chunk.is_sampled])


# ---------------------------------------------------------------- this lesson's rung


def new_sequences(
    config: ModelConfig,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
) -> list[Sequence]:
    """The arguments of `generate` as sequences. Raises ValueError, as lesson 2's read_requests."""
    requests = read_requests(config, prompts, max_new_tokens, sampling)
    return [Sequence.of(request) for request in requests]


def blocks_of(sequences: list[Sequence], max_num_seqs: int, block_size: int) -> int:
    """How many blocks let any `max_num_seqs` of these sequences run side by side."""
    needs = sorted(-(-sequence.most_cached // block_size) for sequence in sequences)
    return sum(needs[-max_num_seqs:])


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
) -> list[list[int]]:
    """Finished requests leave and waiting ones come in, after every step. Arguments, result and
    errors as in lesson 2's `generate`; max_num_seqs: places.
    """
    check_call(model, on_token)
    sequences = new_sequences(model.config, prompts, max_new_tokens, sampling)
    waiting = [sequence for sequence in sequences if not sequence.finished]
    if waiting:
        blocks = BlockManager(blocks_of(waiting, max_num_seqs, BLOCK_SIZE), BLOCK_SIZE)
        scheduler = ContinuousScheduler(blocks, max_num_seqs)
        runner = StepRunner(model, blocks, max(s.most_cached for s in waiting))
        for sequence in waiting:
            scheduler.add(sequence)
        run_until_idle(scheduler, ModelExecutor(runner), on_token)
    return [sequence.output for sequence in sequences]
