"""Replicas that share experts step together: a layer of experts ends when all ranks have come.

Here is who sees to it. A round is one step of each replica: its engine's own, or one of no token
where the engine runs nothing, because it has no request or none that can run now. vLLM calls that a
dummy batch. While any replica has a request there are rounds, and then all rest.
"""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l23_experts.ranks.load import Load
from reference.engine.engine import Engine
from reference.engine.expert_arguments import EPLBConfig
from reference.engine.request import EngineRequest
from reference.parallel.balance import Balance, Placements
from reference.parallel.replicas import Replica, ReplicatedEngine
from reference.parallel.talk import Talk, end_thread

COUNTED_EVERY = 64  # rounds


class Round(NamedTuple):
    """A step of each replica, in their order. untold: those whose end was not told. placements: of
    each layer's experts in it; has_moved: other ones than in the round before.
    """

    number: int
    steps: list[Future]
    untold: dict[Future, Replica]
    placements: Placements
    has_moved: bool


class LockstepEngine(ReplicatedEngine):
    """ReplicatedEngine in rounds. placements: of each layer's experts. eplb: whether and how they
    are placed anew. expert_imbalance: of the ranks that share experts, for monitoring; None: not
    counted yet.
    """

    def __init__(
        self,
        engines: list[Engine],
        placements: Placements,
        eplb: EPLBConfig | None = None,
        seed: int | None = None,
    ):
        super().__init__(engines, seed)
        self.balance = None if eplb is None else Balance(eplb, {})
        self.expert_imbalance: float | None = None
        self.numbers = count()
        self.round = Round(-1, [], {}, placements, has_moved=False)
        self.rounds: SimpleQueue[Round | None] = SimpleQueue()
        talks = [engine.runner.talk for engine in engines]
        told = self.rounds, [replica.steps for replica in self.replicas], talks
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
        """Let all replicas go on, and wait for all. Returns the requests that got a token. If a
        step raised, the others are told first, and the next call raises.
        """
        if not self.round.untold:
            if not any(engine.has_unfinished_requests for engine in self.engines):
                return []
            for replica in self.replicas:
                replica.check()
            self.round = self.next_round()
        self.rounds.put(self.round)  # again after Ctrl-C
        untold = self.round.untold
        wait(untold)
        good = [step for step in untold if step.exception() is None]
        if not good:
            step, replica = untold.popitem()
            return replica.told(step)  # which raises
        return [request for step in good for request in untold.pop(step).told(step)]

    def next_round(self) -> Round:
        """Counted, and with experts placed anew, if it is time for that. Raises RankError."""
        number, placements = next(self.numbers), self.round.placements
        if number % COUNTED_EVERY == COUNTED_EVERY - 1:
            self.note_imbalance()
        if self.balance is not None:
            config = self.balance.config
            if number and number % config.step_interval == 0:
                placements = self.balance.next_placements(self.expert_loads(), placements)
            if (number + config.window_size) % config.step_interval == 0:
                self.balance = Balance(config, self.expert_loads())
        has_moved = placements != self.round.placements
        steps = [Future() for _ in self.replicas]
        return Round(number, steps, dict(zip(steps, self.replicas)), placements, has_moved)

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
        """The mean over the layers of Load.imbalance, of ranks that have the experts of now and all
        tokens so far. Raises RankError.
        """
        placements, loads = self.round.placements, self.expert_loads()
        ranks = [placements[layer].load_of_ranks(load.counts) for layer, load in loads.items()]
        self.expert_imbalance = sum(load.imbalance for load in ranks) / len(ranks)

    @contextmanager
    def alone(self) -> Iterator[Engine]:
        """Inside it one replica may run steps outside of rounds, as a search for beams does; the
        others run as many of no token.
        """
        if self.round.untold:
            self.rounds.put(self.round)
            wait(self.round.untold)
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


def begin_rounds(rounds: SimpleQueue, queues: list[SimpleQueue], talks: list[Talk]) -> None:
    """A thread's body, which gives a round's steps to the replicas' threads. Ctrl-C, which reaches
    the main thread alone, cannot come between them. A round that is put again has begun already.
    """
    last = None
    while (found := rounds.get()) is not None:
        if found.number != last:
            last = found.number
            begin(found, queues, talks)
        del found  # because an error holds its frames, and they the engine


def begin(found: Round, queues: list[SimpleQueue], talks: list[Talk]) -> None:
    """Tell all workers of experts that move, then hand out the steps."""
    if found.has_moved:
        for talk in talks:
            talk.tell("place_experts", found.placements)
    for queue, step in zip(queues, found.steps):
        queue.put(step)
