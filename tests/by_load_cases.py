"""A chooser of the number of drafts on a device that is a formula: what it loses, in expectation,
against the best number at every moment. And choosers with a planted slip.
"""

import random
from collections.abc import Iterable

from lessons.l14_continuous_batching.clock import VirtualClock
from reference.bench.virtual_drafts import Device
from reference.speculation.by_load import ByLoad
from reference.speculation.estimates import Acceptance

MOST = 4
GOOD, USELESS = [0.8] * MOST, [0.02] * MOST


def expected_tokens(rates: list[float], count: int) -> float:
    """The sum over how many tokens stay, of their number and the one that comes in any case."""
    total, all_stay = 0.0, 1.0
    for kept in range(count):
        total += (kept + 1) * all_stay * (1 - rates[kept])
        all_stay *= rates[kept]
    return total + (count + 1) * all_stay


def step_s(device: Device, batch: int, count: int) -> tuple[float, float]:
    """Seconds of the drafter and of the target."""
    return device.draft_s(batch, count), device.pass_s(batch, batch * (1 + count))


def outcome(rates: list[float], count: int, rng: random.Random) -> int:
    """How many of the drafted tokens stay."""
    kept = 0
    while kept < count and rng.random() < rates[kept]:
        kept += 1
    return kept


def loss(
    kind: type[ByLoad],
    device: Device,
    steps: Iterable[tuple[int, list[float]]],
    seed: int = 0,
) -> float:
    """The share of the time in which the best K of each step would have given as many tokens
    already. steps: batch and rates of each.
    """
    clock, rng = VirtualClock(), random.Random(seed)
    chooser, lost_s = kind(MOST, clock=clock), 0.0
    for batch, rates in steps:
        count = chooser.count_for(batch)
        draft_s, pass_s = step_s(device, batch, count)
        clock.now_s += draft_s + pass_s
        kept = [(count, outcome(rates, count, rng)) for _ in range(batch)]
        chooser.note(batch, draft_s, pass_s, kept)
        best = max(
            expected_tokens(rates, k) / sum(step_s(device, batch, k)) for k in range(MOST + 1)
        )
        lost_s += draft_s + pass_s - expected_tokens(rates, count) / best
    return lost_s / clock.now_s


class Flips:
    """A chooser of any number in any step."""

    def __init__(self, most: int, seed: int = 0):
        self.most, self.rng = most, random.Random(seed)

    def count_for(self, batch):
        return self.rng.randint(0, self.most)


class AnyTime:
    """A clock of steps that take as long as chance says, so any number may seem the best."""

    def __init__(self, seed: int = 0):
        self.now_s, self.rng = 0.0, random.Random(seed)

    def __call__(self) -> float:
        self.now_s += self.rng.random()
        return self.now_s


class Table:
    """Costs that are known."""

    def __init__(self, rng: random.Random):
        keys = [(batch, count) for batch in (1, 7, 64) for count in range(MOST + 1)]
        self.of = {key: rng.uniform(1, 4) for key in keys}

    def seconds(self, batch, count):
        return self.of[batch, count]


# ---------------------------------------------------------------- planted slips


class NeverProbes(ByLoad):
    """What it once believed bad it never tries again."""

    def probe(self, batch, best):
        return None


class ProbesForNothing(ByLoad):
    """Probes are not paid for."""

    def note(self, *arguments):
        super().note(*arguments)
        self.purse_s = float("inf")


class KeepsRejected(Acceptance):
    """A drafted token counts as one that stayed."""

    def note(self, places, kept):
        super().note(places, places)


class TestsAfterTheRejection(Acceptance):
    """Tokens after the first rejection count as rejected, although they were never tested."""

    def note(self, places, kept):
        for position in range(places):
            self.rates[position].note(position < kept)


class CountsRejected(ByLoad):
    """With the first of these."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.acceptance = KeepsRejected(self.most)


class CountsUntested(ByLoad):
    """With the second."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.acceptance = TestsAfterTheRejection(self.most)


class CostsOfOne(ByLoad):
    """A step of any batch is believed to cost what a step of one sequence does."""

    def rate(self, batch, count):
        return super().rate(1, count)

    def note(self, batch, *rest):
        super().note(1, *rest)


class IgnoresTheDrafter(ByLoad):
    """Only the target's pass is a cost."""

    def note(self, batch, draft_s, pass_s, outcomes):
        super().note(batch, draft_s and 1e-9, pass_s, outcomes)
