"""Loads for the lesson's figures and benchmarks: length mixes, and a memory that serves them.

`simulate` lets requests arrive, grow by a token a step, and leave, in a memory of some tokens that
is handed out in one of four ways. It counts where the memory goes. No model runs.

Source of the means: Kwon et al. 2023, PagedAttention, figure 11 (Alpaca: 19.31 tokens in, 58.45
out; ShareGPT: 161.31 in, 337.99 out). The shape, exponential, is ours.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from lessons.l12_paged_kv.more.waste import Arena, Lengths, Waste, waste_of_arena, waste_of_blocks

MAX_TOKENS = 2048  # the longest that a request may become
MEMORY_TOKENS = 16000  # the classic pool: 1000 blocks of 16


@dataclass(frozen=True)
class Mix:
    """Lengths of requests: exponential with these means, cut to fit MAX_TOKENS."""

    name: str
    mean_prompt: float
    mean_answer: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """(prompt, answer) tokens of a request, one at least of each."""
        prompt = 1 + min(int(rng.expovariate(1 / self.mean_prompt)), MAX_TOKENS // 2 - 1)
        answer = 1 + min(int(rng.expovariate(1 / self.mean_answer)), MAX_TOKENS // 2 - 1)
        return prompt, answer

    def lengths(self, count: int, seed: int = 0) -> list[int]:
        """Tokens of `count` requests when they end."""
        rng = random.Random(seed)
        return [sum(self.draw(rng)) for _ in range(count)]


ALPACA = Mix("instructions (Alpaca)", 19.31, 58.45)
SHAREGPT = Mix("chat (ShareGPT)", 161.31, 337.99)


@dataclass
class Running:
    """A request in the simulation: what it holds now and at its end, and its piece of an arena."""

    now: int
    at_end: int
    start: int = -1

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.now, self.at_end)


def longest(request: Running) -> int:
    """Reserve what any request may become."""
    return MAX_TOKENS


def power_of_two(request: Running) -> int:
    """Reserve the next power of two of what it will become, as if one could guess so well."""
    return 1 << (request.at_end - 1).bit_length()


def exactly(request: Running) -> int:
    """Reserve what it will become: an oracle."""
    return request.at_end


POLICIES = {
    "reserve 2048": longest,
    "reserve 2ⁿ (knows the answer)": power_of_two,
    "reserve exactly (an oracle)": exactly,
}


@dataclass(frozen=True)
class Report:
    """Means over a simulation's steps."""

    waste: dict[str, float]  # share of the memory, by Waste's names
    at_once: float  # requests that run side by side
    empty_share: float  # of what sequences own

    @classmethod
    def of(cls, found: list[tuple[Waste, int]]) -> "Report":
        """found: waste and running requests, step by step."""
        total = sum(found[0][0])
        shares = {
            name: fmean(getattr(waste, name) / total for waste, _ in found)
            for name in Waste._fields
        }
        at_once = fmean(count for _, count in found)
        owned = shares["used"] + shares["reserved"] + shares["internal"]
        return cls(shares, at_once, 1 - shares["used"] / owned)


def arrivals(mix: Mix, seed: int) -> Iterator[Running]:
    """Requests without end: a request always waits."""
    rng = random.Random(seed)
    while True:
        prompt, answer = mix.draw(rng)
        yield Running(prompt, prompt + answer)


def simulate_pieces(mix: Mix, wanted, steps: int = 1500, seed: int = 0) -> Report:
    """The memory in contiguous pieces of wanted(request) tokens, first fit, first come first
    served.
    """
    arena, running, waiting = Arena(MEMORY_TOKENS), [], arrivals(mix, seed)
    first, found = next(waiting), []
    for step in range(steps):
        while (start := arena.allocate(wanted(first))) is not None:
            first.start = start
            running.append(first)
            first = next(waiting)
        if step >= steps // 3:  # before, every request is young
            pieces = {request.start: request.lengths for request in running}
            found.append((waste_of_arena(arena, pieces, wanted(first)), len(running)))
        for request in running:
            request.now += 1
            if request.now >= request.at_end:
                arena.free(request.start)
        running = [request for request in running if request.now < request.at_end]
    return Report.of(found)


def simulate_blocks(mix: Mix, block_size: int = 16, steps: int = 1500, seed: int = 0) -> Report:
    """The memory in blocks that are given as requests grow; the newest waits when none is free."""
    num_blocks = MEMORY_TOKENS // block_size
    running, waiting, found = [], arrivals(mix, seed), []
    queue = deque([next(waiting)])

    def blocks(request: Running, more: int = 0) -> int:
        return -(-(request.now + more) // block_size)

    for step in range(steps):
        # Room for the next token of every request, else the newest goes and keeps its tokens.
        while sum(blocks(request, 1) for request in running) > num_blocks:
            queue.appendleft(running.pop())
        used = sum(blocks(request, 1) for request in running)
        while used + blocks(queue[0], 1) + len(running) <= num_blocks:
            used += blocks(queue[0], 1)
            running.append(queue.popleft())
            if not queue:
                queue.append(next(waiting))
        if step >= steps // 3:
            lengths = [request.lengths for request in running]
            found.append((waste_of_blocks(lengths, num_blocks, block_size), len(running)))
        for request in running:
            request.now += 1
        running = [request for request in running if request.now < request.at_end]
    return Report.of(found)


def reports(mix: Mix, steps: int = 1500) -> dict[str, Report]:
    """The four ways to hand out the memory, for one mix."""
    found = {name: simulate_pieces(mix, wanted, steps) for name, wanted in POLICIES.items()}
    return found | {"blocks of 16": simulate_blocks(mix, 16, steps)}
