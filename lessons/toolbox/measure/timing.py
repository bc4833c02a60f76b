"""Honest timing: the work is waited for, a GPU's cache is cold, the median comes with its 20-80 %
band, and a time below the physical floor is flagged.

    measure(fn)                 one function
    interleave({name: fn})      candidates in turn, so that a drifting clock hits all alike
    Stopwatch()                 a block of code; refuses to stop while the GPU is still working

Why this does not call `triton.testing.do_bench` (which is the same in Triton 3.6 and 3.7):

- It times one function at a time and runs it seven times before the first run that counts, so
  candidates cannot take turns.
- Where Python needs longer to launch the function than the GPU needs to flush and run it, a part
  of the launch is inside the time, and it is unknown how large a part.
- It flushes by writing, so the timed run also waits for those lines to be written back.

`do_bench_cudagraph` hides the launch, but it flushes nothing and cannot capture a function that
waits for the GPU. On a CPU `torch.utils.benchmark` also times one function at a time. Caches of a
CPU are not emptied.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lessons.toolbox.measure.device import default_device, synchronize

BUDGET_S = float(os.environ.get("TIMED_S", 0.5))  # for each function and size
MIN_RUNS, MAX_RUNS = 3, 200
# Set by tests that want to see that something runs, and not how fast.
ONCE = "TIMED_ONCE" in os.environ
FLUSH_BYTES = 256 * 2**20  # twice the largest L2, B200's
# Python launches a kernel or two in less than this, and needs longer for a step of a whole model.
HIDDEN_LAUNCH_S = 200e-6
CYCLES_PER_S = 2e9  # of a GPU's clock, which is rarely faster


class UnsynchronisedTiming(RuntimeError):
    """A clock was stopped while the GPU was still working on what it should time."""


@dataclass
class Timing:
    """Seconds per call: the median, the 20 % and 80 % quantiles and the fastest of all runs; and
    warnings.
    """

    median_s: float
    p20_s: float
    p80_s: float
    best_s: float
    runs: int
    flags: list[str]


def measure(fn: Callable, **how) -> Timing:
    """Time `fn()`; the keyword arguments of `interleave`."""
    return interleave({"fn": fn}, **how)["fn"]


def interleave(
    fns: dict[str, Callable],
    *,
    device: torch.device | str | None = None,
    floor_s: float | None = None,
    budget_s: float = BUDGET_S,
) -> dict[str, Timing]:
    """Time all `fns` in turn, in rounds of alternating order.

    floor_s: the physical floor in seconds; a median below it is flagged. budget_s: about how long
    the runs of each function take together. TIMED_ONCE in the environment: one run, without a
    warm-up, which says nothing. Raises UnsynchronisedTiming if device is a CPU and a
    function returns CUDA tensors.
    """
    if not fns:
        raise ValueError("fns is empty; accepted: {name: function}")
    device = torch.device(device or default_device())
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
    if ONCE:
        return {name: summarise([clock.sample(fn)]) for name, fn in fns.items()}
    estimates = [_warm_up(clock, fn, budget_s / 8) for fn in fns.values()]
    rounds = int(budget_s * len(fns) / max(sum(estimates), 1e-9))
    samples = {name: [] for name in fns}
    for i in range(max(MIN_RUNS, min(MAX_RUNS, rounds))):
        for name in list(fns) if i % 2 == 0 else reversed(fns):
            samples[name].append(clock.sample(fns[name]))
    return {name: summarise(samples[name], floor_s, clock.hidden_s(fns[name])) for name in fns}


def summarise(
    samples_s: Sequence[float], floor_s: float | None = None, hidden_s: float = 0.0
) -> Timing:
    """The Timing of given samples, in seconds, with its flags. hidden_s: how long Python took for a
    launch that the samples do not contain.
    """
    p20, median, p80 = np.quantile(samples_s, (0.2, 0.5, 0.8)).tolist()
    flags = []
    if floor_s is not None and median < floor_s:
        flags.append(f"beats the floor of {floor_s:.3g} s: cache-resident data or a wrong floor")
    if p80 - p20 > 0.3 * median:
        flags.append(f"noisy: the 20-80 % band spans {(p80 - p20) / median:.0%} of the median")
    if hidden_s > median:
        flags.append(f"launch not counted: Python needs {hidden_s * 1e6:.0f} µs for it")
    return Timing(median, p20, p80, min(samples_s), len(samples_s), flags)


def _warm_up(clock, fn: Callable, budget_s: float) -> float:
    """Call at least twice, and on until the budget is spent; the fastest sample in seconds."""
    deadline = perf_counter() + budget_s
    best = min(clock.sample(fn), clock.sample(fn))
    while perf_counter() < deadline:
        best = min(best, clock.sample(fn))
    return best


class _CpuClock:
    def sample(self, fn: Callable) -> float:
        """Seconds that one call takes."""
        start = perf_counter()
        result = fn()
        seconds = perf_counter() - start
        if any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves(result)):
            raise UnsynchronisedTiming(
                "the function returns CUDA tensors but device is a CPU: pass device='cuda'"
            )
        return seconds

    def hidden_s(self, fn: Callable) -> float:
        return 0.0


class _CudaClock:
    """CUDA events around one call, behind a read of a buffer larger than the L2 cache.

    A launch is either not in the time at all or in it completely. If Python launches all of a
    function within HIDDEN_LAUNCH_S, the GPU is kept busy that long first, so that it finds the work
    waiting. Otherwise the function is a chain of launches: the GPU waits for them in every real
    program too, so it starts idle and the waiting is timed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.launch_s = {}  # function -> its shortest launch so far

    def sample(self, fn: Callable) -> float:
        """Seconds on the GPU between the start and the end of fn()."""
        with torch.cuda.device(self.device):
            # A read, because written lines would have to go back to memory during the timed run.
            self.flush.sum()
            if self.hidden_s(fn):
                torch.cuda._sleep(int(HIDDEN_LAUNCH_S * CYCLES_PER_S))
            else:
                synchronize(self.device)
            self.start.record()
            began = perf_counter()
            fn()
            launch_s = perf_counter() - began
            self.end.record()
            synchronize(self.device)  # the whole device, because fn may use other streams
        self.launch_s[fn] = min(launch_s, self.launch_s.get(fn, launch_s))
        return self.start.elapsed_time(self.end) / 1e3  # elapsed_time is in milliseconds

    def hidden_s(self, fn: Callable) -> float:
        """Seconds of Python that a sample of `fn` does not contain: its launch, if it is short."""
        launch_s = self.launch_s.get(fn, math.inf)
        return launch_s if launch_s < HIDDEN_LAUNCH_S else 0.0


class Stopwatch:
    """Time a block by the wall clock: `with Stopwatch() as watch: ...; synchronize(device)` and
    then `watch.seconds`, which is NaN before the block has ended.

    Launching GPU work takes microseconds and says nothing about its duration, so the block must
    wait for its own work: leaving it while the current stream is still busy raises
    UnsynchronisedTiming. (Other streams are not watched.)
    """

    def __init__(self, device: torch.device | str | None = None):
        self.device = torch.device(device or default_device())

    def __enter__(self) -> "Stopwatch":
        synchronize(self.device)  # because work launched before the block is not the block's
        self.seconds, self._start = math.nan, perf_counter()
        return self

    def __exit__(self, kind, error, trace) -> None:
        seconds = perf_counter() - self._start
        if kind is not None:
            return
        if self.device.type == "cuda" and not torch.cuda.current_stream(self.device).query():
            raise UnsynchronisedTiming(
                f"after {seconds * 1e6:.0f} µs the GPU is still working on this block: "
                "call synchronize(device) before the block ends"
            )
        self.seconds = seconds
