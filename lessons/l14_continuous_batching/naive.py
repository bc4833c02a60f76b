"""Batches that are made once: a wave of requests starts together and ends with its longest answer.

Read `StaticScheduler.schedule`, then `PaddedRunner`. A wave is a rectangle: prompts are padded to
the longest one, and finished rows are computed on until all have finished. A request that arrives
in the meantime waits for the next wave. `DynamicScheduler` makes the same waves, but does not wait
until one is full.

Sources: Yu et al. 2022, Orca, section 3 (batches that end together); NVIDIA, Triton Inference
Server user guide, "Dynamic Batcher" (a window and a largest batch).
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, check_call
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l11_cuda_graphs.naive import eager_step, set_up
from lessons.l11_cuda_graphs.optimized import PADDING
from lessons.l14_continuous_batching.loop import ModelExecutor, new_sequences, run_until_idle
from lessons.l14_continuous_batching.sequence import Chunk, Sequence

MAX_NUM_SEQS = 32
PAD_TOKEN = 0  # any token: it is never attended to, and its logits are never read


class PaddedStep(NamedTuple):
    """One pass over a whole wave: a rectangle of len(wave) rows of `width` tokens.

    chunks: what is asked for in it, of the sequences that are not finished. context: tokens that
    each row sees, as many as the longest.
    """

    chunks: list[Chunk]
    wave: list[Sequence]
    width: int
    context: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes, padding included."""
        return len(self.wave) * self.width

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose K and V the pass reads, padding included."""
        return len(self.wave) * self.context


class StaticScheduler:
    """Opens a wave when it is full, and the next one when all its requests have finished.

    max_num_seqs: requests of a wave. Its methods are those of `ContinuousScheduler`, and `close`.
    """

    def __init__(self, max_num_seqs: int = MAX_NUM_SEQS):
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.wave: list[Sequence] = []
        self.is_closed = False

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.wave

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue."""
        self.waiting.append(sequence)

    def close(self) -> None:
        """No more will come, so no request need wait for a full wave."""
        self.is_closed = True

    @property
    def is_ready(self) -> bool:
        """Whether the next wave may open."""
        return len(self.waiting) >= self.max_num_seqs or self.is_closed

    def schedule(self) -> PaddedStep:
        """The next pass of the wave; no chunks while there is none."""
        if not self.wave and self.is_ready:
            count = min(self.max_num_seqs, len(self.waiting))
            self.wave = [self.waiting.popleft() for _ in range(count)]
        # The prompts, in the first pass of a wave; one token of each in all others.
        chunks = [Chunk(s, s.to_compute) for s in self.wave if not s.finished]
        width = max((chunk.count for chunk in chunks), default=0)
        context = max((chunk.sequence.computed for chunk in chunks), default=0) + width
        return PaddedStep(chunks, self.wave, width, context)

    def finish(self, step: PaddedStep) -> list[Sequence]:
        """Count what the step has computed. Returns the sequences that want a token sampled."""
        for sequence, count in step.chunks:
            sequence.computed += count
        return [chunk.sequence for chunk in step.chunks]

    def leave(self) -> list[Sequence]:
        """The whole wave, once the last of it has finished; none before."""
        if any(not sequence.finished for sequence in self.wave):
            return []
        done, self.wave = self.wave, []
        return done


class DynamicScheduler(StaticScheduler):
    """Opens a wave when it is full, or when the first in the queue has waited long enough.

    max_wait_s: the window. clock(): seconds, from any beginning.
    """

    def __init__(self, max_num_seqs: int, max_wait_s: float, clock: Callable[[], float]):
        super().__init__(max_num_seqs)
        self.max_wait_s = max_wait_s
        self.clock = clock
        self.arrived_s: deque[float] = deque()  # of each in `waiting`

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.arrived_s.append(self.clock())

    @property
    def opens_at_s(self) -> float:
        """When the window of the first in the queue ends."""
        return self.arrived_s[0] + self.max_wait_s if self.waiting else float("inf")

    @property
    def is_ready(self) -> bool:
        return super().is_ready or self.clock() >= self.opens_at_s

    def schedule(self) -> PaddedStep:
        step = super().schedule()
        while len(self.arrived_s) > len(self.waiting):  # those that are in the wave now
            self.arrived_s.popleft()
        return step


# ---------------------------------------------------------------- over the real model


class PaddedRunner:
    """Runs a wave's passes over a pool with one block a row, as long as any request may become."""

    def __init__(self, model: Decoder, max_num_seqs: int, max_context_len: int):
        self.model, self.pool, self.decode = set_up(
            eager_step, model, max_num_seqs, max_context_len
        )

    @torch.inference_mode()
    def __call__(self, step: PaddedStep) -> Tensor:
        """logits: [len(step.chunks), V], in the order of the chunks."""
        if step.chunks[0].sequence.computed == 0:
            return self.run_prompts(step)
        row_of = {sequence.row: row for row, sequence in enumerate(step.wave)}
        rows = [row_of[chunk.sequence.row] for chunk in step.chunks]
        return self.decode(self.columns(step))[rows]

    def run_prompts(self, step: PaddedStep) -> Tensor:
        """All prompts in one rectangle, padded on the right. -> logits: [B, V]

        A prompt's tokens do not see the padding after them, and the answer overwrites its K and V.
        So padding on the right needs no mask. But the logits wanted are those of each prompt's own
        last token, not of the last column.
        """
        padded, last = [], []
        for row, chunk in enumerate(step.chunks):
            padding = [PAD_TOKEN] * (step.width - chunk.count)
            padded.append((chunk.tokens + padding, 0))
            last.append(row * step.width + chunk.count - 1)
        batch = new_batch(padded, self.pool.block_size, self.model.device)
        hidden = self.model(batch.tokens, self.pool.attending(batch))
        return self.model.logits(hidden[last])

    def columns(self, step: PaddedStep) -> Tensor:
        """One column a row of the wave, as lesson 11's step takes them: [4, B] int64. Finished rows
        are computed, too, and written nowhere.
        """
        size = self.pool.block_size
        columns = []
        for row, sequence in enumerate(step.wave):
            held = sequence.computed
            column = (sequence.tokens[-1], held, row * size + held, held + 1)
            columns.append(PADDING if sequence.finished else column)
        return torch.tensor(columns).T.contiguous()


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
) -> list[list[int]]:
    """In static waves. Arguments, result and errors as in lesson 2's `generate`; max_num_seqs:
    requests of a wave.
    """
    check_call(model, on_token)
    sequences = new_sequences(model.config, prompts, max_new_tokens, sampling)
    waiting = [sequence for sequence in sequences if not sequence.finished]
    if waiting:
        longest = max(sequence.most_cached for sequence in waiting)
        runner = PaddedRunner(model, min(max_num_seqs, len(waiting)), longest)
        scheduler = StaticScheduler(max_num_seqs)
        for sequence in waiting:
            scheduler.add(sequence)
        scheduler.close()
        run_until_idle(scheduler, ModelExecutor(runner), on_token)
    return [sequence.output for sequence in sequences]
