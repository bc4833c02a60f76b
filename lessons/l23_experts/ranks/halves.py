"""Two halves of a batch in turns, for real: a thread for each half, and a line on which rows travel
meanwhile.

    line = Line(byte_s=1e-8)                      # as if a byte took so long
    first, second = in_turns(model, [x1, x2], group, line)

The model is not changed. Its layers talk through a Group, and each half gets a twin of the model
whose group hands the turn on before it waits:

    thread 0    compute  send ┐           take, compute  send ┐
    thread 1                  compute  send ┐                 take, compute …
    the line         [ rows of 0      ][ rows of 1      ]

Only the thread that has the turn computes, so the halves do not compete for a GPU. Turns go round
in a fixed order, even if the other half's rows are there first. So all ranks start their exchanges
in the same order, which collectives need. vLLM's Dual Batch Overlap (vllm/v1/worker/ubatching.py)
does the same with CUDA streams and events in the place of the line.
"""

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts.ranks.overlap import COMPUTE, NETWORK


class Span(NamedTuple):
    """What a half did, and from when to when in seconds since the start."""

    half: int
    lane: str
    start_s: float
    end_s: float


class Line:
    """Exchanges one after the other, in the order in which they were sent, beside the threads that
    compute. Each takes latency_s longer than it does here, and byte_s for each byte that this rank
    puts in.
    """

    def __init__(self, byte_s: float = 0.0, latency_s: float = 0.0):
        self.byte_s, self.latency_s = byte_s, latency_s
        self.spans: list[Span] = []
        self.began_s = time.perf_counter()
        self.worker = ThreadPoolExecutor(max_workers=1)

    def now_s(self) -> float:
        """Seconds since the line was made."""
        return time.perf_counter() - self.began_s

    def send(self, half: int, exchange: Callable[..., Tensor], *args) -> Future:
        """Begin exchange(x, ...), x of any shape; the result is what the exchange returns."""
        return self.worker.submit(self._carry, half, exchange, *args)

    def _carry(self, half: int, exchange: Callable[..., Tensor], x: Tensor, *args) -> Tensor:
        start_s = self.now_s()
        result = exchange(x, *args)
        time.sleep(self.latency_s + self.byte_s * x.nbytes)
        self.spans.append(Span(half, NETWORK, start_s, self.now_s()))
        return result

    def close(self) -> None:
        """Wait for what is under way."""
        self.worker.shutdown()


class Turns:
    """Which of several threads may compute."""

    def __init__(self, count: int):
        self.changed = threading.Condition()
        self.is_running = [True] * count
        self.has_turn = 0

    def wait_for(self, number: int) -> None:
        """Return when it is this thread's turn."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_turn == number)

    def hand_on(self, number: int) -> None:
        """Give the turn to the next thread that still runs, which may be the same."""
        with self.changed:
            count = len(self.is_running)
            following = [(number + step) % count for step in range(1, count + 1)]
            self.has_turn = next((n for n in following if self.is_running[n]), -1)
            self.changed.notify_all()

    def leave(self, number: int) -> None:
        """The thread has nothing more to do, or failed; it has the turn."""
        self.is_running[number] = False
        self.hand_on(number)


class TurnGroup(Group):
    """The same ranks, for one of several threads: it hands its turn on while its tensors travel.

    Of the collectives those that layers of experts use. Shapes are those of Group's methods.
    """

    def __init__(self, group: Group, number: int, turns: Turns, line: Line):
        super().__init__(group.members, group.rank, group.handle)
        self.wire = group.wire
        self.number, self.turns, self.line = number, turns, line
        self.since_s = 0.0  # since when this thread computes

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._travel(super().all_reduce, x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self._travel(super().all_gather, x, dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._travel(super().reduce_scatter, x)

    def all_to_all(self, x: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        return self._travel(super().all_to_all, x, to_each, from_each)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return self._travel(super().broadcast, x, source)

    def begin(self) -> None:
        """Wait for the turn, and compute."""
        self.turns.wait_for(self.number)
        self.since_s = self.line.now_s()

    def end(self) -> None:
        """Compute no longer, and still have the turn."""
        self.line.spans.append(Span(self.number, COMPUTE, self.since_s, self.line.now_s()))

    def _travel(self, exchange: Callable[..., Tensor], *args) -> Tensor:
        self.end()
        under_way = self.line.send(self.number, exchange, *args)
        self.turns.hand_on(self.number)
        self.turns.wait_for(self.number)
        # the turn is kept while waiting, because the order of turns is fixed
        result = under_way.result()
        self.since_s = self.line.now_s()
        return result


def on_group(module: nn.Module, group: Group) -> nn.Module:
    """A twin of a module whose layers talk through `group`. All weights are shared."""
    twin = copy.copy(module)
    twin._modules = {name: on_group(child, group) for name, child in module._modules.items()}
    if hasattr(twin, "group"):
        twin.group = group
    return twin


def in_turns(model: nn.Module, inputs: Sequence[Tensor], group: Group, line: Line) -> list[Tensor]:
    """model(x) for each x of inputs: [T, H], in turns. Raises what the first thread raised.

    model: layers with a `group`, which has to be one of this process's ranks.
    """
    turns = Turns(len(inputs))
    # Each thread has a switch and a number of its own. With another number of OpenMP threads a
    # product adds in another order, so its bits differ.
    has_grad, num_threads = torch.is_grad_enabled(), torch.get_num_threads()
    groups = [TurnGroup(group, number, turns, line) for number in range(len(inputs))]

    def run(own: TurnGroup, x: Tensor) -> Tensor:
        own.begin()
        torch.set_num_threads(num_threads)
        try:
            with torch.set_grad_enabled(has_grad):
                return on_group(model, own)(x)
        finally:
            own.end()
            turns.leave(own.number)

    with ThreadPoolExecutor(max_workers=len(inputs)) as threads:
        running = [threads.submit(run, own, x) for own, x in zip(groups, inputs)]
        return [each.result() for each in running]
