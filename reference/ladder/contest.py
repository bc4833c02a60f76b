"""Contenders served the same requests in turn, each for a few seconds, so that a drifting machine
hits all alike.

A contender is a rung or a library. Slow ones serve fewer requests: a subset whose prompts and
answers are as long, on average, as those of all requests, so that tokens per second compare.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lessons.toolbox.measure import device as devices
from reference.bench.peers.processes import processor_time

BUDGET_S = 6.0  # of passes for each contender,
TOTAL_S = 120.0  # or its share of this, so that many contenders stay below 3 minutes as well
MOST_PASSES = 5
SLOW_BUDGET_S = 10.0  # of one pass: a rung that would take longer serves fewer requests
WITHOUT_CACHE, ONE_BY_ONE = 4, 8  # requests that such contenders serve


@dataclass
class Contender:
    """A rung or a library, and what running it gave.

    run(prompts, max_new_tokens, on_token) -> the generated tokens of each prompt. served: indices
    of the requests that it serves. outputs: request index -> generated tokens. runs: tokens/s of
    each pass, cpu_runs the same per second of processor time, whatever the number of cores.
    """

    name: str
    run: Callable
    served: list[int]
    lesson: str | None = None
    in_batches: bool = False  # requests side by side, not one by one
    is_guest: bool = False  # a library: if it fails, that is reported, and not fatal
    outputs: dict[int, list[int]] = field(default_factory=dict)
    runs: list[float] = field(default_factory=list)
    cpu_runs: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    not_run: str | None = None
    verdict: str = ""  # why tokens differ, or what excuses it
    kv_bytes_per_token: int = 0
    roofline_share: float = 0.0
    stand_in: str | None = None  # what PyTorch stands in for on this device
    renew: Callable = lambda: None  # called before a pass that may not remember the last one

    @property
    def tokens(self) -> int:
        """Tokens that were generated in one pass, never tokens that were asked for."""
        return sum(map(len, self.outputs.values()))

    @property
    def tokens_per_s(self) -> float | None:
        return median(self.runs) if self.runs else None

    @property
    def tokens_per_cpu_s(self) -> float | None:
        return median(self.cpu_runs) if self.cpu_runs else None

    @property
    def identical(self) -> bool | None:
        return None if not self.runs else not self.verdict.startswith("differs")

    def wants_a_pass(self, budget_s: float) -> bool:
        """Whether one more pass fits into `budget_s` seconds. The first one always does."""
        passes = len(self.runs)
        if self.not_run or passes >= MOST_PASSES:
            return False
        return not passes or self.spent_s * (passes + 1) / passes <= budget_s


def subset(prompts: list[list[int]], limits: list[int], count: int) -> list[int]:
    """Indices of `count` requests whose mean prompt and answer are nearest to those of all.

    Requests for 0 tokens are left out. The same requests every time.
    """
    asking = [index for index, limit in enumerate(limits) if limit > 0]
    if count >= len(asking):
        return asking
    lengths = [(len(prompt), limit) for prompt, limit in zip(prompts, limits)]
    wanted = [fmean(lengths[i][side] for i in asking) for side in (0, 1)]

    def distance(chosen: list[int]) -> float:
        found = [fmean(lengths[i][side] for i in chosen) for side in (0, 1)]
        return sum(abs(a / b - 1) for a, b in zip(found, wanted))

    draw = random.Random(0)
    tries = [sorted(draw.sample(asking, count)) for _ in range(2000)]
    return min(tries, key=distance)


def within_budget(
    run: Callable, prompts, limits, served: list[int], in_batches: bool = False
) -> list[int]:
    """`served`, or half of it, a quarter, … so that one pass stays within SLOW_BUDGET_S."""
    probed = sorted(served, key=lambda index: len(prompts[index]))[len(served) * 2 // 3]
    prompt, tokens = prompts[probed], min(3, limits[probed])  # no more than there is room for

    def seconds(count: int) -> float:
        start = time.perf_counter()
        run([prompt], [count], None)
        return time.perf_counter() - start

    seconds(1)  # the first call also loads and compiles
    first_s = seconds(1)
    next_s = max(0.0, seconds(tokens) - first_s) / (tokens - 1) if tokens > 1 else first_s
    while len(served) > 1:
        if estimated_s(limits, served, in_batches, first_s, next_s) <= SLOW_BUDGET_S:
            break
        served = subset(prompts, limits, len(served) // 2)
    return served


def estimated_s(
    limits: list[int], served: list[int], in_batches: bool, first_s: float, next_s: float
) -> float:
    """Seconds of a pass: for each request its first token, then the others, of a batch at once."""
    others = [limits[index] - 1 for index in served]
    return len(served) * first_s + next_s * (max(others) if in_batches else sum(others))


def run_pass(contender: Contender, prompts, limits, device, tick: Callable) -> None:
    """One timed pass over the requests that it serves, the device waited for."""
    served = contender.served
    devices.synchronize(device)
    start, cpu_start = time.perf_counter(), processor_time()
    outputs = contender.run(
        [prompts[i] for i in served], [limits[i] for i in served], lambda row, token: tick()
    )
    devices.synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - start, processor_time() - cpu_start
    contender.outputs = dict(zip(served, outputs))
    contender.spent_s += seconds
    contender.runs.append(contender.tokens / seconds)
    contender.cpu_runs.append(contender.tokens / max(cpu_seconds, 1e-9))


def take_turns(contenders: list[Contender], prompts, limits, device, console: Console) -> None:
    """Passes of every contender, one a round, until each has had its time."""
    budget_s = min(BUDGET_S, TOTAL_S / len(contenders))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {}
        for contender in contenders:
            total = sum(limits[i] for i in contender.served)
            bars[contender.name] = progress.add_task(contender.name, total=total, start=False)
        while waiting := [c for c in contenders if c.wants_a_pass(budget_s)]:
            for contender in waiting:
                bar = bars[contender.name]
                progress.start_task(bar)
                progress.reset(bar)
                try:
                    if not contender.runs:
                        warm_up(contender, prompts, limits, device)
                    tick = partial(progress.advance, bar)
                    run_pass(contender, prompts, limits, device, tick)
                except Exception as error:
                    if not contender.is_guest:
                        raise
                    contender.not_run = first_line(error)
                speed = (
                    contender.not_run and "not run"
                ) or f"{contender.tokens_per_s:.1f} tokens/s"
                # The total becomes what was generated, because a stop token may end a request.
                done = progress.tasks[bar].completed
                progress.update(bar, total=done, description=f"{contender.name}: {speed}")
                progress.stop_task(bar)


def warm_up(contender: Contender, prompts, limits, device) -> None:
    """Two tokens of one request, or the one it asks for, so that nothing is loaded or compiled in
    a timed pass.

    On a GPU, a contender that serves many at once also gets two tokens of each request, and the
    longest one whole: the pools and graphs of lesson 11 are made for as many and as long ones as
    they see.
    """
    served = contender.served
    contender.run([prompts[served[0]]], [min(2, limits[served[0]])], None)
    if contender.in_batches and device.type == "cuda":
        longest = max(served, key=lambda i: len(prompts[i]) + limits[i])
        some = [limits[i] if i == longest else min(2, limits[i]) for i in served]
        contender.run([prompts[i] for i in served], some, None)


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
