"""What one writes first: a stopwatch around a call, and a copy in PyTorch.

Read `stopwatch_ms`, then `QueueDevice`, which shows on a CPU what is wrong with the stopwatch: a
device answers before it has worked. Then `scale_copy`.
"""

import queue
import threading
import time
from collections.abc import Callable

from torch import Tensor


def stopwatch_ms(launch: Callable[[], object]) -> float:
    """Milliseconds until one call of `launch` returns. On a device that queues its work, that is
    not when the work is done.
    """
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1e3


class QueueDevice:
    """A worker thread that plays a GPU: `launch` puts work into a queue and returns at once,
    `synchronize` waits for all of it.

    A CUDA stream behaves like this; so do MPS, TPU runtimes and I/O. `setup`: a function that runs
    before the first piece of work, as a GPU loads its driver and compiles its kernels at the first
    call.
    """

    def __init__(self, setup: Callable[[], object] = lambda: None):
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        self._work.put(setup)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()
            self._work.task_done()

    def launch(self, work: Callable[[], object]) -> None:
        """Queue `work` and return."""
        self._work.put(work)

    def synchronize(self) -> None:
        """Return when the queue is empty and its last piece of work has finished."""
        self._work.join()


def scale_copy(x: Tensor, factor: float = 1.0) -> Tensor:
    """x · factor into a new tensor. x: any shape -> the same shape. Reads and writes each element
    once: no kernel moves less.
    """
    return x * factor
