"""Replicas that share experts step together: a layer of experts ends when all ranks have come.

Here is who sees to it. A round is one step of each replica: its engine's own, or one of no token
where the engine runs nothing, because it has no request or none that can run now. vLLM calls that a
dummy batch. While any replica has a request there are rounds, and then all rest.
"""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue

import torch
from torch import Tensor

from lessons.l23_experts.ranks.load import Load
from reference.engine.engine import Engine
from reference.engine.request import EngineRequest
from reference.parallel.replicas import Replica, ReplicatedEngine
from reference.parallel.talk import end_thread

COUNTED_EVERY = 64  # rounds


class LockstepEngine(ReplicatedEngine):
    """ReplicatedEngine in rounds. ranks: over which each layer's experts are spread.
    expert_imbalance: of these ranks, for monitoring; None: not counted yet.
    """

    def __init__(self, engines: list[Engine], ranks: int, seed: int | None = None):
        super().__init__(engines, seed)
        self.ranks, self.expert_imbalance = ranks, None
        self.numbers = count()
        self.round: tuple[int, list[Future]] | None = None
        self.untold: dict[Future, Replica] = {}  # of the round
        self.rounds: SimpleQueue[tuple[int, list[Future]] | None] = SimpleQueue()
        told = self.rounds, [replica.steps for replica in self.replicas]
        thread = threading.Thread(target=begin_rounds, args=told, name="rounds", daemon=True)
        thread.start()
        self.end_rounds = weakref.finalize(self, end_thread, self.rounds, thread)

    @staticmethod
    def advance_one(engine: Engine) -> list[EngineRequest]:
        """A replica's part of a round."""
        runner, before = engine.runner, engine.runner.num_steps
        try:
            return engine.advance() if engine.has_unfinished_requests else []
        finally:
            # Whatever has happened, because the others wait for it.
            if runner.num_steps == before:
                runner.run_empty()

    def advance(self) -> list[EngineRequest]:
        """As in ReplicatedEngine. A round begins when all of the one before is told."""
        if not self.untold:
            if not any(engine.has_unfinished_requests for engine in self.engines):
                return []
            for replica in self.replicas:
                replica.check()
            if (number := next(self.numbers)) % COUNTED_EVERY == COUNTED_EVERY - 1:
                self.note_imbalance()
            steps = [Future() for _ in self.replicas]
            self.round = number, steps
            self.untold = dict(zip(steps, self.replicas))
        self.rounds.put(self.round)  # again after Ctrl-C
        ended = wait(self.untold, return_when=FIRST_COMPLETED).done.pop()
        return self.untold.pop(ended).told(ended)

    def expert_loads(self) -> dict[int, Load]:
        """{layer: pairs of a token and an expert, by expert}, of all replicas since the start.
        Raises RankError.
        """
        found: dict[int, Tensor] = {}
        for engine in self.engines:
            for counts in engine.runner.talk.ask("expert_counts"):
                for layer, of_experts in counts.items():
                    found[layer] = found.get(layer, 0) + torch.tensor(of_experts)
        return {layer: Load(tuple(total.tolist())) for layer, total in sorted(found.items())}

    def note_imbalance(self) -> None:
        """The mean over the layers of what Load.imbalance says of the ranks. Raises RankError."""
        found = [load.of_ranks(self.ranks).imbalance for load in self.expert_loads().values()]
        self.expert_imbalance = sum(found) / len(found)

    @contextmanager
    def alone(self) -> Iterator[Engine]:
        """Inside it one replica may run steps outside of rounds, as a search for beams does; the
        others run as many of no token.
        """
        if self.untold:
            self.rounds.put(self.round)
            wait(self.untold)
        first, *others = [engine.runner for engine in self.engines]
        first.companions = others
        try:
            yield self.engines[0]
        finally:
            first.companions = ()

    def close(self) -> None:
        """As in ReplicatedEngine."""
        self.end_rounds()
        super().close()


def begin_rounds(rounds: SimpleQueue, queues: list[SimpleQueue]) -> None:
    """A thread's body, which gives a round's steps to the replicas' threads. Ctrl-C, which reaches
    the main thread alone, cannot come between them. A round that is put again has begun already.
    """
    last = None
    while (found := rounds.get()) is not None:
        if found[0] != last:
            last = found[0]
            hand_out(queues, found[1])
        del found  # because an error holds its frames, and they the engine


def hand_out(queues: list[SimpleQueue], steps: list[Future]) -> None:
    """A step to each queue."""
    for queue, step in zip(queues, steps):
        queue.put(step)
