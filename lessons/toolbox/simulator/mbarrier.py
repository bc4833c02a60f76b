"""Simulated mbarriers.

A barrier counts phases. A phase is complete when `count` arrivals came and all bytes that were
expected in it are there; then the next phase begins. `wait(barrier, phase)` passes when the phase
before the current one had this parity: on a fresh barrier, in phase 0, a wait for parity 1 passes
at once.
"""

from dataclasses import dataclass

from lessons.toolbox.simulator.machine import line, program, refuse
from lessons.toolbox.simulator.memory import Shared


def MBarrierLayout(*args, **options) -> None:
    """Layouts do not change values."""


@dataclass(eq=False)
class Barrier:
    name: str
    count: int
    missing: int  # arrivals
    bytes_missing: int = 0  # expected and not there; below 0: there before they were expected
    phase: int = 0

    def settle(self) -> None:
        """Complete the phase if nothing is missing."""
        if self.missing < 0:
            raise refuse(f"more arrivals at {self.name} than its count of {self.count}")
        if self.missing == 0 and self.bytes_missing < 0:
            more = -self.bytes_missing
            raise refuse(f"copies bring {more} bytes more to {self.name} than it expects")
        if self.missing == 0 and self.bytes_missing == 0:
            self.phase += 1
            self.missing = self.count

    def bring(self, nbytes: int) -> None:
        """A copy has landed."""
        self.bytes_missing -= nbytes
        self.settle()

    def state(self) -> str:
        """What is missing, in words."""
        arrivals = f"{self.missing} of {self.count} arrivals and {self.bytes_missing} bytes"
        return f"{self.name} is in phase {self.phase}, {arrivals} are missing"


def init(mbarrier: Shared, count: int) -> None:
    """A fresh barrier, in phase 0, that counts so many arrivals."""
    _barriers(mbarrier)[_place(mbarrier)] = Barrier(mbarrier.name, count, count)


def invalidate(mbarrier: Shared) -> None:
    """The memory is no barrier any more."""
    _barriers(mbarrier).pop(_place(mbarrier), None)


def expect(mbarrier: Shared, nbytes: int, /, pred=True) -> None:
    """One arrival, and so many bytes more that copies must bring in this phase."""
    if pred:
        barrier = barrier_of(mbarrier)
        barrier.bytes_missing += nbytes
        barrier.missing -= 1
        barrier.settle()
        program().pause()


def arrive(mbarrier: Shared, *, count: int = 1, pred=True) -> None:
    """Count so many arrivals."""
    if pred:
        barrier = barrier_of(mbarrier)
        barrier.missing -= count
        barrier.settle()
        program().pause()


def wait(mbarrier: Shared, phase: int, pred=True, deps=()) -> None:
    """Go on when the phase of this parity is complete."""
    if not pred:
        return
    if phase not in (0, 1):
        raise refuse(f"wait({mbarrier.name}, {phase}): a parity is 0 or 1")
    barrier, at = barrier_of(mbarrier), line()

    def passes() -> bool:
        return barrier.phase % 2 != phase

    how = "passed at once" if passes() else "had to wait"
    program().running.waits[barrier] = f"{at}, for parity {phase}, {how}"
    program().pause(passes, lambda: f"at {at} for parity {phase} ({barrier.state()})")


def barrier_of(mbarrier: Shared) -> Barrier:
    """The barrier in a view of one element."""
    if mbarrier.data.numel() != 1:
        raise refuse(f"{mbarrier.name} holds {mbarrier.data.numel()} barriers: index() one")
    found = _barriers(mbarrier).get(_place(mbarrier))
    if found is None:
        raise refuse(f"{mbarrier.name} is used before mbarrier.init")
    return found


def _barriers(mbarrier: Shared) -> dict:
    return mbarrier.allocation.barriers


def _place(mbarrier: Shared) -> int:
    return mbarrier.data.storage_offset()
