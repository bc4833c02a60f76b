"""A runner whose model lies in the workers: ModelRunner's interface, in the engine's process.

A step is one order to all workers, and its tokens are another. The engine does not wait for the
first: what it returns is a name for hidden states that stay where they are. So do their logits,
V numbers a row: remote_sampler.py lets the workers sample. Only beams, and drafts that were drawn,
fetch logits.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lessons.l12_paged_kv.blocks import BlockManager, Copy
from lessons.l12_paged_kv.more.swap import HostSwap, read_blocks, write_blocks
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Lender
from lessons.toolbox.model.config import ModelConfig
from reference.features.decode_graphs import Chunks
from reference.parallel.talk import Talk

if TYPE_CHECKING:
    from reference.features.lora import Adapters


class RemoteModel:
    """What the engine asks of a model that it does not hold. device: where logits arrive."""

    device = torch.device("cpu")

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32):
        self.config, self.dtype = config, dtype


@dataclass
class RemotePool:
    """What the engine asks of a pool that it does not hold. bytes_per_token: on all ranks."""

    num_blocks: int
    block_size: int
    bytes_per_token: int


class RemoteHidden(NamedTuple):
    """The hidden states of a step, which lie in the workers until the next one."""

    number: int


class DistributedRunner:
    """In the place of ModelRunner. held: what each rank holds (Held). companions: run a step of no
    token with each step of this one. No graphs, taps or pictures.
    """

    captured = features = sight = None
    new_batch = None  # of the workers
    companions: Sequence["DistributedRunner"] = ()
    new_scheduler = ChunkedScheduler  # as in ModelRunner

    def __init__(
        self,
        talk: Talk,
        config: ModelConfig,
        pool: RemotePool,
        max_model_len: int,
        held,
        dtype: torch.dtype = torch.float32,
    ):
        self.talk = talk
        self.model = RemoteModel(config, dtype)
        self.pool = pool
        self.max_model_len = max_model_len
        self.held = held
        self.num_steps = 0
        self.adapters: Adapters | None = None
        self.groups = None  # each process holds its own share of a block
        self.late: Callable[[Tensor], None] | None = None  # as in ModelRunner

    def __call__(self, step: Step, tables: dict[int, list[int]]) -> RemoteHidden:
        """As in ModelRunner."""
        self.copy(step.copies)
        chunks = [(chunk.tokens, chunk.sequence.computed) for chunk in step.chunks]
        owned = [tables[chunk.sequence.row] for chunk in step.chunks]
        if self.adapters is None:
            return self.run(chunks, owned)
        with self.adapters.rows_of(step) as row_slots:
            return self.run(chunks, owned, row_slots)

    def run(
        self, chunks: Chunks, tables: list[list[int]], row_slots: list[int] | None = None
    ) -> RemoteHidden:
        """As in ModelRunner. Raises RankError if the workers have ended before."""
        self.talk.check()
        if self.late is not None:
            chunks = filled(chunks, self.late)
        self.talk.tell("run", chunks, tables, *([] if row_slots is None else [row_slots]))
        self.num_steps += 1
        for other in self.companions:
            other.run_empty()
        return RemoteHidden(self.num_steps)

    def run_empty(self) -> None:
        """A step of no token: the workers' experts serve the other replicas (lockstep.py)."""
        self.talk.tell("run_empty")
        self.num_steps += 1

    def copy(self, copies: list[Copy]) -> None:
        """As in ModelRunner."""
        if copies:
            self.talk.tell("copy", copies)

    def logits(self, hidden: RemoteHidden, rows: list[int]) -> Tensor:
        """Of rows of the last step: [len(rows), V] on the CPU, float32 or wider. Raises
        RankError.
        """
        return self.read_logits(self.ask_of(hidden, "logits", rows))

    def read_logits(self, reply: Future) -> Tensor:
        """Wait for logits: [R, V]. Raises RankError."""
        # the sampler writes into them
        return torch.from_numpy(np.require(told_of(reply), requirements="W"))

    def scores(self, hidden: RemoteHidden, rows: list[int], tokens: list[int], count: int) -> list:
        """As in ModelRunner. Raises RankError."""
        return told_of(self.ask_of(hidden, "scores", rows, tokens, count))

    def ask_of(self, hidden: RemoteHidden, method: str, *arguments) -> Future:
        """Ask the workers for something of the last step."""
        if hidden.number != self.num_steps:
            raise RuntimeError(
                f"hidden states of step {hidden.number} are gone, {self.num_steps} ran"
            )
        return self.talk.ask_later(method, *arguments)

    def new_swap(self, blocks: BlockManager, others: Sequence = ()) -> "RemoteSwap":
        """As in ModelRunner. others: in this process."""
        return RemoteSwap(self, blocks, others)

    def when_dead(self, tell: Callable[[BaseException], None]) -> None:
        """tell(error) in another thread, as soon as a worker dies."""
        self.talk.workers.on_death = tell

    def close(self) -> None:
        """End the workers."""
        self.talk.close()


def told_of(reply: Future):
    """What one of the ranks has told. Raises RankError."""
    [found] = [each for each in reply.result() if each is not None]
    return found


def filled(chunks: Chunks, late: Callable[[Tensor], None]) -> Chunks:
    """The chunks with the tokens that `late` writes into those of all: [T] int64, as soon as the
    workers have told them.
    """
    tokens = torch.tensor([token for new, _ in chunks for token in new])
    late(tokens)
    parts = tokens.split([len(new) for new, _ in chunks])
    return [(part.tolist(), held) for part, (_, held) in zip(parts, chunks)]


class RemoteSwap(HostSwap):
    """Lesson 12's HostSwap whose blocks lie in the workers. Each keeps its part of them; here is
    only who is away, and what it has in `others`, the pools of this process.
    """

    def __init__(self, runner: DistributedRunner, blocks: BlockManager, others: Sequence = ()):
        super().__init__(Lender(runner.pool, blocks))
        self.talk, self.others = runner.talk, others

    def swap_out(self, sequence: int) -> None:
        """As in lesson 12."""
        table, lender = self.runner.blocks.tables[sequence], self.runner
        self.talk.tell("swap_out", sequence, table)
        kept = [read_blocks(pool, pool.tensors, table) for pool in self.others]
        self.away[sequence] = lender.held[sequence], kept
        self.count(table)
        lender.free(sequence)

    def swap_in(self, sequence: int) -> None:
        """As in lesson 12."""
        lender, (held, kept) = self.runner, self.away[sequence]
        lender.blocks.grow(sequence, 0, held)
        del self.away[sequence]
        lender.held[sequence] = held
        self.talk.tell("swap_in", sequence, lender.blocks.tables[sequence])
        for pool, blocks in zip(self.others, kept):
            write_blocks(pool, pool.tensors, lender.blocks.tables[sequence], blocks)
        self.count(lender.blocks.tables[sequence])

    def forget(self, sequence: int) -> None:
        """As in lesson 12."""
        if sequence in self.away:
            self.talk.tell("forget", sequence)
        super().forget(sequence)

    def count(self, table: list[int]) -> None:
        pool = self.runner.pool
        self.swapped_bytes += len(table) * pool.block_size * pool.bytes_per_token
