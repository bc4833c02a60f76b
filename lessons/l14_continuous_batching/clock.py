"""Requests that arrive over time, served on a virtual clock: nothing sleeps, and a run repeats.

Read `serve`. The clock is a number of seconds that an executor moves: `CostExecutor` by a formula,
`Timed` by what the real model has just needed. So one loop gives both a simulation of an hour in a
second, and a measurement under a trace of arrivals without the waiting.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l14_continuous_batching import sequence as scheduled
from lessons.l14_continuous_batching.loop import Executor, Scheduler, run_step
from lessons.l14_continuous_batching.naive import DynamicScheduler, StaticScheduler
from lessons.l14_continuous_batching.sequence import Step


class Arrival(NamedTuple):
    """One line of a trace. output_len: how many tokens the answer has, which no scheduler knows."""

    arrival_s: float
    prompt: list[int]
    output_len: int


class VirtualClock:
    """Seconds since the trace began."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    @contextmanager
    def at(self, seconds: float) -> Iterator[None]:
        """Within it, the clock shows `seconds`."""
        before, self.now_s = self.now_s, seconds
        yield
        self.now_s = before


@dataclass
class CostExecutor:
    """No model: a step takes cost(step) seconds, and every token is 0."""

    clock: VirtualClock
    cost: Callable[[Step], float]

    def __call__(self, step: Step) -> list[int]:
        self.clock.now_s += self.cost(step)
        return [0] * len(step.chunks)


@dataclass
class Timed:
    """Another executor, whose measured seconds move the clock."""

    clock: VirtualClock
    execute: Executor

    def __call__(self, step: Step) -> list[int]:
        begin = perf_counter()
        tokens = self.execute(step)  # read back by Python, so the device has finished
        self.clock.now_s += perf_counter() - begin
        return tokens


class Pass(NamedTuple):
    """What one step was: when, for whom, and how many tokens of what it computed were wanted."""

    start_s: float
    end_s: float
    rows: list[int]
    wanted_tokens: int
    computed_tokens: int


@dataclass
class Log:
    """All that happened. Times are seconds on the clock, by the number of a request."""

    passes: list[Pass] = field(default_factory=list)
    arrived_s: dict[int, float] = field(default_factory=dict)
    token_s: dict[int, list[float]] = field(default_factory=dict)
    left_s: dict[int, float] = field(default_factory=dict)

    @property
    def makespan_s(self) -> float:
        return self.passes[-1].end_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time: what was asked for, no padding."""
        return sum(map(len, self.token_s.values())) / self.makespan_s

    def latencies_s(self) -> list[float]:
        """From arrival to the whole answer, of each request in the order of their numbers."""
        return [self.left_s[row] - self.arrived_s[row] for row in sorted(self.left_s)]

    def ttfts_s(self) -> list[float]:
        """From arrival to the first token, of each request in the order of their numbers."""
        return [self.token_s[row][0] - self.arrived_s[row] for row in sorted(self.token_s)]


def serve(
    scheduler: Scheduler, trace: Sequence[Arrival], execute: Executor, clock: VirtualClock
) -> Log:
    """Hand each request to the scheduler when it arrives, and run until all are answered.

    trace: in the order of arrival. execute moves `clock`.
    """
    log = Log()
    coming = deque(enumerate(trace))

    def on_token(row: int, token: int) -> None:
        log.token_s.setdefault(row, []).append(clock())

    while coming or not scheduler.is_idle:
        while coming and coming[0][1].arrival_s <= clock():
            row, arrival = coming.popleft()
            log.arrived_s[row] = arrival.arrival_s
            # A server is told at the arrival itself, although a step was running then.
            with clock.at(arrival.arrival_s):
                scheduler.add(new_sequence(row, arrival))
        if not coming and isinstance(scheduler, StaticScheduler):
            scheduler.close()
        start_s = clock()
        step, left = run_step(scheduler, execute, on_token)
        log.left_s.update((sequence.row, clock()) for sequence in left)
        if step.chunks:
            log.passes.append(new_pass(step, start_s, clock()))
        else:
            clock.now_s = next_event_s(scheduler, coming)
    return log


def next_event_s(scheduler: Scheduler, coming: deque[tuple[int, Arrival]]) -> float:
    """When something can change although nothing runs: a request arrives, or a window ends."""
    events = [coming[0][1].arrival_s] if coming else []
    if isinstance(scheduler, DynamicScheduler):
        events.append(scheduler.opens_at_s)
    return min(events)


def new_pass(step: Step, start_s: float, end_s: float) -> Pass:
    """The record of a step that took from start_s to end_s, in seconds."""
    rows = [chunk.sequence.row for chunk in step.chunks]
    wanted = sum(chunk.count for chunk in step.chunks)
    return Pass(start_s, end_s, rows, wanted, step.num_tokens)


def new_sequence(row: int, arrival: Arrival) -> scheduled.Sequence:
    """A greedy request that ends after output_len tokens, and at no other place."""
    return scheduled.Sequence(row, arrival.prompt, arrival.output_len, GREEDY, frozenset())
