"""Honest timing: the work is waited for, caches are cold on a GPU, the median comes with its band,
a miracle is flagged.

    measure(fn)                 one function
    interleave({name: fn})      candidates in turn, round by round, so that a drifting clock or a busy neighbour hits all alike
    Stopwatch()                 a block of code; refuses to stop while the GPU is still working

On a GPU every run is timed by CUDA events behind a read of a large buffer. That read empties the L2
cache of the function's data (it reads, because freshly written lines would have to be written back
during the timed run), and it keeps the GPU busy while Python launches the function, so that the
launch itself is not timed. Caches of a CPU are not emptied: rotate the inputs.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lessons.toolbox.measure.device import default_device, synchronize

BUDGET_S = 0.5
MIN_RUNS, MAX_RUNS = 3, 200
# at least; read in 60 µs by an H200, which outlasts a launch from Python
FLUSH_BYTES = 256 * 2**20
UNKNOWN_CACHE_BYTES = 32 * 2**20
# inputs of 5 times the cache: by the time the first comes round again it is gone
ROTATION = 5


class UnsynchronisedTiming(RuntimeError):
    """A clock was stopped while the GPU was still working on what it should time."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, the 20 % and the 80 % quantile, the samples in the order of the
    rounds, and warnings.
    """

    median_s: float
    p20_s: float
    p80_s: float
    samples_s: tuple[float, ...]
    flags: tuple[str, ...] = ()

    @property
    def runs(self) -> int:
        return len(self.samples_s)


@dataclass(frozen=True)
class Ratio:
    """How many times faster, from pairs of runs of the same round; no unit."""

    median: float
    p20: float
    p80: float


def measure(
    fn: Callable,
    *,
    device: torch.device | str | None = None,
    floor_s: float | None = None,
    inputs: Sequence[tuple] | None = None,
    budget_s: float = BUDGET_S,
) -> Timing:
    """Time `fn()`, or `fn(*inputs[i])` with the inputs taken in turn; `rotating_inputs` makes
    enough of them.

    floor_s: the physical floor in seconds; a median below it is flagged. budget_s: about how long
    the runs take together. Raises UnsynchronisedTiming if device is a CPU and fn returns CUDA
    tensors.
    """
    return interleave({"fn": fn}, device=device, floor_s=floor_s, inputs=inputs, budget_s=budget_s)[
        "fn"
    ]


def interleave(
    fns: dict[str, Callable],
    *,
    device: torch.device | str | None = None,
    floor_s: float | None = None,
    inputs: Sequence[tuple] | None = None,
    budget_s: float = BUDGET_S,
) -> dict[str, Timing]:
    """Time all `fns` in turn, in rounds of alternating order; the same arguments as `measure`,
    `budget_s` for each function.
    """
    if not fns:
        raise ValueError("fns is empty; accepted: {name: function}")
    if inputs is not None and not len(inputs):
        raise ValueError("inputs is empty; accepted: None or a list of argument tuples")
    inputs = [()] if inputs is None else inputs
    device = torch.device(device or default_device())
    sample = _CudaClock(device).sample if device.type == "cuda" else _sample_on_cpu
    estimates = [
        _warm_up(lambda i, fn=fn: sample(fn, inputs[i % len(inputs)]), budget_s / 4)
        for fn in fns.values()
    ]
    rounds = int(budget_s * len(fns) / max(sum(estimates), 1e-9))
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for i in range(max(MIN_RUNS, min(MAX_RUNS, rounds))):
        for name in list(fns) if i % 2 == 0 else reversed(fns):
            samples[name].append(sample(fns[name], inputs[i % len(inputs)]))
    return {name: summarise(s, floor_s) for name, s in samples.items()}


def speedup(slow: Timing, fast: Timing) -> Ratio:
    """How many times faster `fast` is, pair by pair; both from one `interleave`. Raises ValueError
    if the runs do not pair up.
    """
    if slow.runs != fast.runs:
        raise ValueError(
            f"slow has {slow.runs} runs, fast has {fast.runs}; accepted: two timings of one "
            f"`interleave`"
        )
    return Ratio(*_median_and_band([a / b for a, b in zip(slow.samples_s, fast.samples_s)]))


def summarise(samples_s: Sequence[float], floor_s: float | None = None) -> Timing:
    """The Timing of given samples, in seconds, with its flags."""
    median, p20, p80 = _median_and_band(samples_s)
    flags = []
    if floor_s is not None and median < floor_s:
        flags.append(f"beats the floor of {floor_s:.3g} s: cache-resident data or a wrong floor")
    if p80 - p20 > 0.3 * median:
        flags.append(f"noisy: the 20-80 % band spans {(p80 - p20) / median:.0%} of the median")
    if len(samples_s) < 5:
        flags.append(f"only {len(samples_s)} runs")
    return Timing(median, p20, p80, tuple(samples_s), tuple(flags))


def _median_and_band(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return (values[0],) * 3
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), p20, p80


def _warm_up(sample: Callable[[int], float], budget_s: float) -> float:
    """Call until two runs in a row agree within 5 %, the first not counted, or the budget is spent;
    last sample in seconds.
    """
    deadline, before = perf_counter() + budget_s, sample(0)
    for i in range(1, MAX_RUNS):
        now = sample(i)
        if (i > 1 and abs(now - before) < 0.05 * now) or perf_counter() > deadline:
            break
        before = now
    return now


# ---------------------------------------------------------------- clocks


def _sample_on_cpu(fn: Callable, arguments: tuple) -> float:
    start = perf_counter()
    result = fn(*arguments)
    elapsed = perf_counter() - start
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves(result)):
        raise UnsynchronisedTiming(
            "the function returns CUDA tensors but device is a CPU: pass device='cuda'"
        )
    return elapsed


class _CudaClock:
    """CUDA events around one call, behind a read of a buffer larger than the L2 cache."""

    def __init__(self, device: torch.device):
        self.device = device
        flush_bytes = max(2 * cache_bytes(device), FLUSH_BYTES)
        self._flush = torch.zeros(flush_bytes // 4, dtype=torch.float32, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self, fn: Callable, arguments: tuple) -> float:
        """Seconds on the GPU between the start and the end of fn(*arguments), host gaps between its
        kernels included.
        """
        with torch.cuda.device(self.device):
            self._flush.sum()
            self._start.record()
            fn(*arguments)
            self._end.record()
            # the whole device, because fn may use other streams
            torch.cuda.synchronize(self.device)
        return self._start.elapsed_time(self._end) / 1e3  # elapsed_time is in milliseconds


class Stopwatch:
    """Time a block by the wall clock: `with Stopwatch() as watch: ...; synchronize(device)` and
    then `watch.seconds`.

    Launching GPU work takes microseconds and says nothing about its duration, so the block must
    wait for its own work: leaving it while the current stream is still busy raises
    UnsynchronisedTiming. (Other streams are not watched.)
    """

    def __init__(self, device: torch.device | str | None = None):
        self.device = torch.device(device or default_device())
        self._seconds: float | None = None

    def __enter__(self) -> "Stopwatch":
        synchronize(self.device)  # because work launched before the block is not the block's
        self._seconds, self._start = None, perf_counter()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        seconds = perf_counter() - self._start
        if kind is not None:
            return
        if self.device.type == "cuda" and not torch.cuda.current_stream(self.device).query():
            raise UnsynchronisedTiming(
                f"after {seconds * 1e6:.0f} µs the GPU is still working on this block: "
                "call synchronize(device) before the block ends"
            )
        self._seconds = seconds

    @property
    def seconds(self) -> float:
        """Seconds from entering the block to leaving it."""
        if self._seconds is None:
            raise RuntimeError(
                "the stopwatch has no time yet: read `seconds` after its block has ended"
            )
        return self._seconds


# ---------------------------------------------------------------- cold inputs


def cache_bytes(device: torch.device | str) -> int:
    """Size of the last-level cache in bytes: L2 of a GPU, the largest cache of a CPU (32 MiB if the
    system does not tell).
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [
        _parse_size(p.read_text())
        for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


def _parse_size(text: str) -> int:
    """ "480K" -> 491520, as the kernel writes cache sizes."""
    text = text.strip()
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text.rstrip("KMG") or 0) * unit


def rotating_inputs(
    make: Callable[[], tuple], device: torch.device | str | None = None, limit_bytes: int = 2**30
) -> list[tuple]:
    """Call make() until its tensors hold 5 times the cache, or `limit_bytes`: so many inputs that
    none is still cached.

    A CUDA graph replayed in a loop, or any function on a CPU, otherwise finds its data in the cache
    and beats the floor.
    """
    target = min(ROTATION * cache_bytes(device or default_device()), limit_bytes)
    inputs, total = [], 0
    while not inputs or total < target:
        inputs.append(make())
        size = sum(
            x.numel() * x.element_size()
            for x in tree_leaves(inputs[-1])
            if isinstance(x, torch.Tensor)
        )
        if not size:
            raise ValueError(
                "make() returned no tensor data; accepted: a tuple of arguments with at least one "
                "tensor"
            )
        total += size
    return inputs
