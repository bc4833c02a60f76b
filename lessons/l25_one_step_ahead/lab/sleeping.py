"""The same device in real time: a thread that sleeps for as long as each piece of work takes.

Nothing computes while a thread sleeps, so host and device overlap on any machine, and a clock on
the wall shows what the order of the work gains.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lessons.l25_one_step_ahead.lab.timeline import HOST_MS, BusyDevice, Host, serve


class SleepingStream:
    """Does one thing after the other, in a thread of its own."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)

    def launch(self, name: str, seconds: float, run: Callable[[], None]) -> Future:
        """Begin as soon as all earlier work is done. Returns at once."""

        def work() -> None:
            time.sleep(seconds)
            run()

        return self.thread.submit(work)

    def wait(self, work: Future) -> None:
        """Until this work is done, and with it all that was launched before."""
        work.result()


class IdleDevice(BusyDevice):
    """Reads and writes no memory, so that a clock shows the sleeping alone: what it says depends on
    how many tokens a sequence has.
    """

    def run(self, passed, chunks, copies, before):
        passed.logits = {chunk.sequence: [chunk.start] for chunk in chunks}


def served(loop: type, device_ms: float, answer: int) -> list[list[int]]:
    """What timeline.recorded serves, in real time."""
    host, stream = Host(dict(HOST_MS), time.perf_counter, time.sleep), SleepingStream()
    try:
        return serve(loop, host, stream, device_ms, answer, IdleDevice)
    finally:
        stream.thread.shutdown()
