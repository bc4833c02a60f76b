"""A real model as a device of this lesson: on a GPU nothing but `read` waits.

Python may run ahead of a GPU until it asks for something that the GPU has to answer. Three habits
of a serial loop ask too early, and each has its replacement here:

    torch.tensor(..., device="cuda")   a copy from ordinary memory, which waits for all earlier work
        -> `send`: from pinned memory, non-blocking
    the last token from a list         known to the host only when the step has ended
        -> `launch` takes it from the tokens of the pass before, on the GPU
    tokens.tolist()                    a copy at the end of the queue, so after the *next* pass
        -> `sample` begins the copy right after the tokens and records an event; `read` waits for it

On a CPU each operation has ended when Python goes on, so there is nothing to overlap, and the
tokens are the same.
"""

from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch, read_tokens
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.runner import step_batch
from lessons.l14_continuous_batching.loop import StepRunner, StepSampler
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l25_one_step_ahead.device import PLACEHOLDER, Pass


class ModelDevice:
    """Lesson 14's runner and sampler, cut where the host would wait."""

    def __init__(self, runner: StepRunner):
        self.runner = runner
        self.device = runner.model.device
        self.sampler = StepSampler(new_sampling_batch)

    @torch.inference_mode()
    def launch(self, step: Step, before: Pass | None = None) -> Pass:
        """As Device.launch."""
        passed = Pass.of(step)
        # Any id will do where a placeholder is, because it is written over.
        chunks = [(known(chunk.tokens), chunk.sequence.computed) for chunk in step.chunks]
        tables = [self.runner.blocks.tables[chunk.sequence.row] for chunk in step.chunks]
        batch = batch_sent(self.runner.pool, chunks, tables)
        if before is not None:
            put_tokens(batch.tokens, step, before)
        rows = [row for row, chunk in enumerate(step.chunks) if chunk.is_sampled]
        passed.logits = self.runner.run(batch, batch.logits_at[send(rows, self.device)])
        return passed

    @torch.inference_mode()
    def sample(self, passed: Pass, sequences: list[Sequence]) -> None:
        """As Device.sample. tokens: a Drawn."""
        passed.sequences = list(sequences)
        if not sequences:
            return
        logits = passed.logits
        if len(sequences) < len(passed.ending):
            wanted = set(sequences)
            rows = [row for row, s in enumerate(passed.ending) if s in wanted]
            logits = logits[send(rows, self.device)]
        passed.tokens = Drawn.of(self.sampler.draw(logits, passed.sequences))

    def read(self, passed: Pass) -> list[int]:
        """As Device.read."""
        return passed.tokens.read() if passed.sequences else []


@dataclass
class Drawn:
    """Tokens on the device, and on their way to the host. event: the copy has arrived."""

    tokens: Tensor  # [S] int64
    on_host: Tensor  # the same; on a GPU pinned, and garbage before the event
    event: "torch.cuda.Event | None" = None

    @classmethod
    def of(cls, tokens: Tensor) -> "Drawn":
        """Begin the copy of tokens: [S]. It is queued here, so it does not wait for what is
        launched later.
        """
        if not tokens.is_cuda:
            return cls(tokens, tokens)
        on_host = torch.empty_like(tokens, device="cpu", pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tokens.device))
        return cls(tokens, on_host, event)

    def read(self) -> list[int]:
        """Wait for the copy, and for nothing else."""
        if self.event is not None:
            self.event.synchronize()
        return read_tokens(self.on_host)


# ---------------------------------------------------------------- into the next pass


def known(tokens: list[int]) -> list[int]:
    """Ids that the model can be given: 0 where a placeholder is, which the device writes over."""
    return [0 if token == PLACEHOLDER else token for token in tokens]


def put_tokens(tokens: Tensor, step: Step, before: Pass) -> None:
    """Write the tokens of the pass before over the placeholders, in place. tokens: [T] int64.

    The rows of two passes differ as soon as a sequence has come, gone, or been preempted, so each
    sequence is looked up by what it is.
    """
    to, source, start = [], [], 0
    rows = {sequence: row for row, sequence in enumerate(before.sequences)}
    for chunk in step.chunks:
        start += chunk.count
        # A placeholder is the newest token, so it can only be the last of a chunk.
        if chunk.tokens[-1] == PLACEHOLDER:
            to.append(start - 1)
            source.append(rows[chunk.sequence])
    if to:
        ids = before.tokens.tokens[send(source, tokens.device)]
        # -1 is a row with bad logits. It ends when it is read; until then any id will do, but one
        # that is no row of the embedding would end the program of a GPU.
        tokens[send(to, tokens.device)] = ids.clamp(min=0)


# ---------------------------------------------------------------- copies that do not wait


def batch_sent(pool: KVPool, chunks: list[tuple[list[int], int]], tables: list[list[int]]) -> Batch:
    """Lesson 12's `step_batch`; for a GPU it is made on the host and sent. Arguments as there."""
    device = pool.k_slots.device
    if device.type == "cpu":
        return step_batch(pool, chunks, tables)
    return sent(new_batch(chunks, pool.block_size, torch.device("cpu"), tables), device)


def send(values: list[int], device: torch.device) -> Tensor:
    """A list as a tensor on the device: [len(values)] int64."""
    return sent(torch.tensor(values, dtype=torch.int64), device)


def sent(values, device: torch.device):
    """A tensor of the host on the device, or a dataclass with all tensors in it. Nothing waits: the
    copy is made from pinned memory, which PyTorch keeps until the copy has been made.
    """
    if device.type == "cpu":
        return values
    if isinstance(values, Tensor):
        pinned = values.pin_memory() if device.type == "cuda" else values
        return torch.empty_like(values, device=device).copy_(pinned, non_blocking=True)
    if isinstance(values, (list, tuple)):
        return type(values)(sent(value, device) for value in values)
    if not is_dataclass(values):
        return values
    tensors = {}
    for name in (field.name for field in fields(values)):
        value = getattr(values, name)
        if isinstance(value, (Tensor, list)) or is_dataclass(value):
            tensors[name] = sent(value, device)
    return replace(values, **tensors)


def new_sampling_batch(sequences: list[Sequence], device: torch.device) -> SamplingBatch:
    """Lesson 2's batch for these sequences, made on the host and sent."""
    return sent(sampling_batch(sequences, "cpu"), device)
