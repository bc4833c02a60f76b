"""A runner whose model lies in the workers: ModelRunner's interface, in the engine's process.

A step is one order to all workers, and the logits that the sampler needs are another. The engine
does not wait for the first: what it returns is a name for hidden states that stay where they are.

Why the sampler stays here: then nothing above the runner knows that there are workers. The price is
that logits travel, 4 bytes · V for each row. vLLM samples in its workers instead, and sends tokens.
"""

import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lessons.l12_paged_kv.blocks import BlockManager, Copy
from lessons.l12_paged_kv.more.swap import HostSwap, read_blocks, write_blocks
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.swap import Lender
from lessons.l20_parallelism.processes.launch import RankError
from lessons.toolbox.model.config import ModelConfig
from reference.features.decode_graphs import Chunks

if TYPE_CHECKING:
    from reference.features.lora import Adapters

THREAD_S = 5.0  # how long the end of a thread is waited for


class Workers(Protocol):
    """Who obeys: ProcessWorkers or RayWorkers. An order is a pickled (method of Worker,
    arguments).
    """

    def wait_until_ready(self) -> None:
        """Until all have loaded their parts. Raises Refused, RankError."""

    def tell(self, order: bytes) -> None:
        """Give an order to all. Raises RankError."""

    def ask(self, order: bytes) -> list:
        """The same; returns what each rank returns. Raises Refused, RankError."""

    def close(self) -> None:
        """End all of them."""


class Talk:
    """One thread that talks to the workers, so that Ctrl-C, which reaches the main thread alone,
    never cuts a message in two. Orders are obeyed in the order in which they are given.
    """

    def __init__(self, workers: Workers):
        self.orders: SimpleQueue = SimpleQueue()
        self.workers = workers
        self.ended: Future = Future()  # holds the error that has ended it
        told = workers, self.orders, self.ended
        thread = threading.Thread(target=talk, args=told, name="talk", daemon=True)
        thread.start()
        # Not a method, because that would keep this object alive. It is called at exit, too.
        self.close = weakref.finalize(self, end, workers, self.orders, thread)

    def tell(self, method: str, *arguments) -> None:
        """Let all workers do something. Whether it went well is found out by the next `ask`."""
        # Pickled now, because the caller may change a list before the thread comes to it.
        self.orders.put((None, pickle.dumps((method, arguments))))

    def ask(self, method: str, *arguments) -> list:
        """What it returns on each rank, when they have done all that they were told. Raises
        RankError.
        """
        self.check()
        reply: Future = Future()
        self.orders.put((reply, pickle.dumps((method, arguments))))
        return reply.result()

    def check(self) -> None:
        """Raise RankError if the workers have ended."""
        if not self.close.alive:
            raise RuntimeError("the engine's workers were ended by shutdown()")
        if self.ended.done():
            raise_again(self.ended.result())

    def wait_until_ready(self) -> None:
        """Until all have loaded. Raises Refused, RankError."""
        reply: Future = Future()
        self.orders.put((reply, None))
        reply.result()


def talk(workers: Workers, orders: SimpleQueue, ended: Future) -> None:
    """The thread's body. The first error ends the workers; who asks later gets it, too."""
    while True:
        item = orders.get()
        if item is None:
            return
        reply, order = item
        try:
            if ended.done():
                raise_again(ended.result())
            if reply is None:
                workers.tell(order)
            else:
                reply.set_result(
                    workers.wait_until_ready() if order is None else workers.ask(order)
                )
        except RankError as error:
            if not ended.done():
                workers.close()
                ended.set_result(error)
            if reply is not None:
                reply.set_exception(error)


def end(workers: Workers, orders: SimpleQueue, thread: threading.Thread) -> None:
    """End the workers and the thread."""
    workers.close()  # first, because the thread may wait for them
    end_thread(orders, thread)


def end_thread(orders: SimpleQueue, thread: threading.Thread) -> None:
    """Let a thread that reads this queue come to its end, because one that still runs while Python
    shuts down may take the process with it.
    """
    orders.put(None)
    if thread is not threading.current_thread():
        thread.join(THREAD_S)


def raise_again(error: RankError) -> None:
    """The same error without the places where it was raised before."""
    raise error.with_traceback(None)


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
    """In the place of ModelRunner. held: what each rank holds (Held). No graphs, taps or
    pictures."""

    captured = features = sight = None
    new_batch = None  # of the workers
    companions: Sequence[
        "DistributedRunner"
    ] = ()  # each step of this one is an empty one of theirs

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
        if hidden.number != self.num_steps:
            raise RuntimeError(
                f"hidden states of step {hidden.number} are gone, {self.num_steps} ran"
            )
        [logits] = [found for found in self.talk.ask("logits", rows) if found is not None]
        return torch.from_numpy(np.require(logits, requirements="W"))  # the sampler writes into it

    def new_swap(self, blocks: BlockManager, others: Sequence = ()) -> "RemoteSwap":
        """As in ModelRunner. others: in this process."""
        return RemoteSwap(self, blocks, others)

    def close(self) -> None:
        """End the workers."""
        self.talk.close()


def filled(chunks: Chunks, late: Callable[[Tensor], None]) -> Chunks:
    """The chunks with the tokens that `late` writes: here, because the sampler is here."""
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
