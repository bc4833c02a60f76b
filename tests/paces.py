"""How fast the steps of an engine come, so that no test asks which thread is faster: neither a
reader that a busy machine holds up nor an engine that is held up changes what a test sees.

Each wraps AsyncLLMEngine.step, so that a step that waits here takes no time by the engine's clock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reference.engine.async_engine import AsyncLLMEngine

PATIENCE_S = 60.0  # after which what a step waits for will not come


class Gate:
    """Lets the engine's steps through one by one, so that a test knows where the engine is."""

    def __init__(self, served: AsyncLLMEngine):
        self.passes = threading.Semaphore(0)
        self.is_open = False
        self.steps = 0
        self.step = served.step
        served.step = self

    def __call__(self):
        if not self.is_open:
            assert self.passes.acquire(timeout=PATIENCE_S), "no test let the step through"
        self.steps += 1
        return self.step()

    def let_all(self):
        self.is_open = True
        self.passes.release()


def step_when(served: AsyncLLMEngine, may_go: Callable[[], bool]) -> None:
    """Let no step begin before may_go()."""
    step = served.step

    def patient():
        end = time.monotonic() + PATIENCE_S
        while not may_go():
            assert time.monotonic() < end, "what a step waits for did not come"
            time.sleep(0.0005)
        return step()

    served.step = patient


def for_commands(served: AsyncLLMEngine) -> threading.Event:
    """A step waits for a command, which is obeyed after it, until the event is set. So a request
    has not ended, however late the next command is.
    """
    is_open = threading.Event()
    step_when(served, lambda: is_open.is_set() or not served.commands.empty())
    return is_open


@contextmanager
def for_readers(served: AsyncLLMEngine) -> Iterator[None]:
    """A step waits until every reader has taken its last output, so that none is skipped."""

    def all_have_read() -> bool:
        return not any(waiter.mailbox.newest for waiter in list(served.waiters.values()))

    step = served.step
    step_when(served, all_have_read)
    try:
        yield
    finally:
        served.step = step
