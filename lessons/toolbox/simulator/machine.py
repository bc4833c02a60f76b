"""One program of a simulated kernel: its partitions take turns, and what they started runs beside
them.

A partition is a thread, and one thread runs at a time. It runs until it waits or does something
that another partition could notice; then the scheduler draws what happens next: a partition goes
on, or a piece of work in flight (a copy, a matrix product) ends.

    ends = "random"    work ends at a random moment between its start and the wait for it
    ends = "latest"    work ends only when no partition can go on: as late as the kernel allows

What a kernel does wrong raises Hazard, in words that name its lines and buffers.
"""

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = str(Path(__file__).parent)
ENDS = ("random", "latest")


class Hazard(Exception):
    """A simulated kernel did what a GPU answers with wrong numbers, garbage or standstill."""


class _Cancelled(BaseException):
    """Ends the thread of a partition after another partition failed."""


@dataclass(eq=False)
class Work:
    """A copy or a matrix product in flight. what: "the TMA copy of hopper.py:88"."""

    kind: str  # "load", "store" or "product"
    what: str
    partition: "Partition"  # that started it
    finish: Callable[[], None]


@dataclass(eq=False)
class Partition:
    """A group of warps that runs one function."""

    name: str
    body: Callable[[], object]
    ready: Callable[[], bool] = lambda: True  # whether it can go on
    waits_for: Callable[[], str] = lambda: ""  # in words, for a deadlock
    ended: bool = False
    waits: dict = field(default_factory=dict)  # barrier -> its last wait for it, in words
    result: object = None
    turn: threading.Lock = field(default_factory=threading.Lock)


class Program:
    """One program of the grid. index, grid: (x, y, z)."""

    def __init__(self, index, grid, generator: random.Random, ends: str):
        self.index, self.grid, self.random, self.ends = index, grid, generator, ends
        self.partitions: list[Partition] = []
        self.running: Partition | None = None
        self.in_flight: list[Work] = []
        self.unfenced: list = []  # (view, partition) of ordinary stores to shared memory
        self.failure: BaseException | None = None
        self.back = _held()  # released when a partition gives way
        self.is_inference = torch.is_inference_mode_enabled()  # holds for one thread

    # ------------------------------------------------------------ what the scheduler does

    def run(self, body: Callable[[], object]) -> None:
        """Run the kernel's body, with all that it starts, to the end."""
        self.spawn("the kernel", body)
        while alive := [partition for partition in self.partitions if not partition.ended]:
            events = self._events(alive)
            if not events and self.failure is None:
                self.failure = Hazard(self._deadlock(alive))
            if self.failure is not None:
                self._cancel(alive)
                raise self.failure
            event = self.random.choice(events)
            if isinstance(event, Partition):
                self._resume(event)
            else:
                self._finish(event)
        if self.failure is not None:
            raise self.failure
        if self.in_flight:
            raise Hazard(f"the program ended before {self.in_flight[0].what} had ended")

    def spawn(self, name: str, body: Callable[[], object]) -> Partition:
        """A new partition, ready to go."""
        partition = Partition(name, body, turn=_held())
        self.partitions.append(partition)
        threading.Thread(target=self._thread, args=(partition,), daemon=True).start()
        return partition

    def _thread(self, partition: Partition) -> None:
        partition.turn.acquire()
        try:
            if self.failure is None:
                with torch.inference_mode(self.is_inference):
                    partition.result = partition.body()
        except _Cancelled:
            pass
        except BaseException as error:
            self.failure = error
        partition.ended = True
        self.back.release()

    def _events(self, alive: list[Partition]) -> list:
        ready = [partition for partition in alive if partition.ready()]
        if ready and self.ends == "latest":
            return ready
        firsts = {}  # matrix products of one partition end in their order
        for work in self.in_flight:
            firsts.setdefault(work.partition if work.kind == "product" else work, work)
        return ready + list(firsts.values())

    def _resume(self, partition: Partition) -> None:
        self.running = partition
        partition.turn.release()
        self.back.acquire()

    def _finish(self, work: Work) -> None:
        self.in_flight.remove(work)
        self.running = None
        try:
            work.finish()
        except Hazard as error:
            self.failure = error

    def _cancel(self, alive: list[Partition]) -> None:
        for partition in alive:
            self._resume(partition)

    def _deadlock(self, alive: list[Partition]) -> str:
        waiting = [f"{p.name} waits {p.waits_for()}" for p in alive if p.waits_for()]
        return "deadlock: nothing is in flight, and " + "; ".join(waiting)

    # ------------------------------------------------------------ what a partition does

    def pause(
        self, ready: Callable[[], bool] = lambda: True, waits_for: Callable[[], str] = lambda: ""
    ) -> None:
        """Give way. Come back when ready() holds."""
        me = self.running
        me.ready, me.waits_for = ready, waits_for
        self.back.release()
        me.turn.acquire()
        if self.failure is not None:
            raise _Cancelled

    def start(self, kind: str, what: str, finish: Callable[[], None]) -> None:
        """Put work in flight: finish() runs when it ends."""
        self.in_flight.append(Work(kind, f"{what} of {line()}", self.running, finish))

    def outstanding(self, kind: str, partition: Partition) -> int:
        """How many pieces of work of one kind a partition has in flight."""
        return sum(w.partition is partition and w.kind == kind for w in self.in_flight)


_current: Program | None = None


def program() -> Program:
    """The program that runs."""
    if _current is None:
        raise Hazard("this works in a simulated kernel alone")
    return _current


def run_program(which: Program, body: Callable[[], object]) -> None:
    """Run one program. Programs run one after another."""
    global _current
    _current = which
    try:
        which.run(body)
    finally:
        _current = None


def line() -> str:
    """The line of the kernel that is executed: "hopper.py:88"."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def refuse(message: str) -> Hazard:
    """What is wrong with the line that the running partition executes, or with what just ended."""
    running = program().running
    return Hazard(f"{line()} ({running.name}): {message}" if running else message)


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
