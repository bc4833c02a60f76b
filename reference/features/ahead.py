"""async_scheduling=True: the engine schedules and launches a step while the one before it runs.

Lesson 25's loop as a part of the engine: its `run` takes the place of the engine's own. The tokens
are the serial engine's. What a step has sampled is told one step later, and so is an end by a stop
token or a stop string, whose row of the pass that is running then is lost.

The placeholder of a token that is on its way is the last of `all_tokens` alone. `output` holds what
is known, so the sampler, the detokenizer and the client never meet it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lessons.l14_continuous_batching.loop import StepSampler
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.l25_one_step_ahead.device import PLACEHOLDER
from lessons.l25_one_step_ahead.model_device import (
    Drawn,
    batch_sent,
    known,
    new_sampling_batch,
    put_tokens,
    send,
)
from reference.engine.nucleus import searching_batch
from reference.engine.request import EngineRequest, EngineSequence, ends
from reference.engine.sampler import adjust, constrained, likeliest, logprobs_of

if TYPE_CHECKING:
    from reference.engine.engine import Engine


@dataclass(eq=False)
class Launched:
    """A pass that was sampled and not told. raw: [B, V] log-probabilities of all tokens, if a
    request asks for some.
    """

    sequences: list[EngineSequence]
    tokens: Drawn  # [B]
    raw: Tensor | None

    def read(self) -> list[tuple]:
        """Wait for it. Returns (sequence, token, its log-probabilities) of each row."""
        tokens = self.tokens.read()
        return list(zip(self.sequences, tokens, logprobs_of(self.raw, tokens, self.sequences)))


class KnownChunk(Chunk):
    """A chunk as a runner is given it: an id where a placeholder is, which is written over."""

    @property
    def tokens(self) -> list[int]:
        return known(super().tokens)


class Ahead:
    """A part of an engine that is one step ahead of its runner."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.launched: Launched | None = None
        self.draw = StepSampler(sampling_batch_sent)
        engine.runner.new_batch = batch_sent

    def run(self, step: Step) -> list[EngineRequest]:
        """Launch a step, tell the one before it, sample. Returns the requests that got a token. If
        it raises, neither step is told.
        """
        launched = None
        try:
            hidden = self.launch(step) if step.chunks else None
            touched = self.tell()
            launched = None if hidden is None else self.sample(step, hidden)
        finally:
            self.launched = launched
            self.engine.under_way = [] if launched is None else launched.sequences
        return touched

    def launch(self, step: Step) -> Tensor:
        """Begin the pass. The tokens of the one before are put into it on the device. Returns
        hidden: [T, hidden_size].
        """
        engine = self.engine
        if self.launched is not None:
            engine.runner.late = partial(put_tokens, step=step, before=self.launched)
        chunks = [KnownChunk(*chunk) for chunk in step.chunks]
        try:
            hidden = engine.runner(Step(chunks, step.copies), engine.scheduler.blocks.tables)
        finally:
            engine.runner.late = None
        engine.score_prompts(step, hidden)
        return hidden

    def tell(self) -> list[EngineRequest]:
        """Wait for the pass before, and give its tokens to the sequences that still want them."""
        if self.launched is None:
            return []
        scheduler, now, touched = self.engine.scheduler, time.monotonic(), {}
        for sequence, token, logprobs in self.launched.read():
            if sequence.finished:
                continue  # aborted since
            sequence.all_tokens.pop()
            sequence.take(token, logprobs)
            # Preempted by the step that was scheduled meanwhile, so it waits to be computed again.
            if sequence.finished and sequence in scheduler.waiting:
                scheduler.abort(sequence)
            metrics = sequence.request.metrics
            metrics.first_token = metrics.first_token or now
            metrics.last_token = now
            touched[sequence.request] = None
        scheduler.leave()
        return list(touched)

    def sample(self, step: Step, hidden: Tensor) -> Launched | None:
        """Begin to draw for the sequences that are still here, and for those that fork from them
        now. All tokens before are known, so biases and structures are as in the serial loop.
        hidden: [T, hidden_size]. None: no sequence wants a token.
        """
        scheduler = self.engine.scheduler
        here = set(scheduler.running)
        wanted = {sequence for sequence in scheduler.finish(step) if sequence in here}
        rows, sequences = [], []
        for row, chunk in ends(step):
            if (parent := chunk.sequence) in wanted:
                children, parent.request.waiting_to_fork = parent.request.waiting_to_fork, []
                for child in children:
                    scheduler.fork(parent, child)
                rows += [row] * (1 + len(children))
                sequences += [parent, *children]
        if not sequences:
            return None
        launched = self.begin(hidden, rows, sequences)
        for sequence in sequences:
            sequence.all_tokens.append(PLACEHOLDER)
            # It ends by its limit, which needs no token to be known.
            if len(sequence.output) + 1 >= sequence.max_new_tokens:
                scheduler.abort(sequence)
        return launched

    def begin(self, hidden: Tensor, rows: list[int], sequences: list[EngineSequence]) -> Launched:
        """Begin to draw a token for each of these rows of hidden: [T, hidden_size]."""
        # By a tensor that is sent: for a list of rows Python would wait.
        if rows != list(range(len(hidden))):
            hidden, rows = hidden[send(rows, hidden.device)], list(range(len(rows)))
        return self.drawn(self.engine.runner.logits(hidden, rows), sequences)

    @torch.inference_mode()
    def drawn(self, logits: Tensor, sequences: list[EngineSequence]) -> Launched:
        """A token for each row, as Sampler draws it, which the host does not wait for. logits: [B,
        V], which are changed.
        """
        raw = logits.float().log_softmax(-1) if any(s.wants_logprobs for s in sequences) else None
        must_end = constrained(logits, [s.constraint and s.constraint.row() for s in sequences])
        for row, sequence in enumerate(sequences):
            adjust(logits, row, sequence, must_end=must_end[row])
        if not all(sequence.is_greedy for sequence in sequences):
            tokens = self.draw.draw(logits, sequences)
        elif logits.is_cuda:
            tokens = logits.argmax(dim=-1)
            is_finite = logits.gather(1, tokens[:, None])[:, 0].isfinite()
            tokens = torch.where(is_finite, tokens, -1)
        else:
            tokens = torch.tensor(likeliest(logits))
        return Launched(sequences, Drawn.of(tokens), raw)


def sampling_batch_sent(sequences: list[EngineSequence], device: torch.device):
    """The engine's batch for these sequences. For a GPU it is made on the host and sent."""
    if device.type == "cpu":
        return searching_batch(sequences, device)  # which finds top-p by looking at values
    return new_sampling_batch(sequences, device)
