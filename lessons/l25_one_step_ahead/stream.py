"""A device whose latency can be set, on a clock that is advanced: nothing sleeps, a run repeats.

`VirtualStream` does two things that a GPU does. Work that was launched takes time while the host
goes on. And it is done in order, and as late as it may be: only when the host waits for it. So a
loop that changes what a running pass still needs gets wrong tokens, as it may on a GPU.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lessons.l14_continuous_batching.clock import VirtualClock


@dataclass(eq=False)
class Work:
    """Something that a stream was told to do, and when it begins and ends, in seconds."""

    name: str
    run: Callable[[], None]
    start_s: float
    end_s: float
    is_done: bool = False


class VirtualStream:
    """Does one thing after the other, in the order in which it was told."""

    def __init__(self, clock: VirtualClock):
        self.clock = clock
        self.free_at_s = 0.0
        self.waiting: deque[Work] = deque()
        self.done: list[Work] = []

    def launch(self, name: str, seconds: float, run: Callable[[], None]) -> Work:
        """Begin as soon as all earlier work is done. Returns at once."""
        start_s = max(self.clock.now_s, self.free_at_s)
        self.free_at_s = start_s + seconds
        work = Work(name, run, start_s, self.free_at_s)
        self.waiting.append(work)
        return work

    def wait(self, work: Work) -> None:
        """Until this work is done, and with it all that was launched before."""
        self.clock.now_s = max(self.clock.now_s, work.end_s)
        while not work.is_done:
            earliest = self.waiting.popleft()
            earliest.run()
            earliest.is_done = True
            self.done.append(earliest)
