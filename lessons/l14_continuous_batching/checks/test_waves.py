"""Proves static and dynamic waves on random arrivals: who starts when, and who leaves with whom."""

from itertools import chain, groupby

import pytest

from lessons.l14_continuous_batching.clock import Arrival, CostExecutor, Log, VirtualClock, serve
from lessons.l14_continuous_batching.lab.occupancy import one_second
from lessons.l14_continuous_batching.naive import DynamicScheduler, StaticScheduler

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

PLACES, WINDOW_S = 3, 2.5
# (seconds since the one before, prompt tokens, answer tokens)
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=14
)


def served(kind: type, gaps) -> tuple[list[Arrival], Log]:
    """A trace and its log, at a second a step."""
    now, trace = 0.0, []
    for gap, prompt_len, output_len in gaps:
        now += gap
        trace.append(Arrival(now, [1] * prompt_len, output_len))
    clock = VirtualClock()
    is_dynamic = issubclass(kind, DynamicScheduler)
    scheduler = kind(PLACES, WINDOW_S, clock) if is_dynamic else kind(PLACES)
    return trace, serve(scheduler, trace, CostExecutor(clock, one_second), clock)


def waves_of(log: Log) -> list[list[int]]:
    """The requests of each wave: those that leave at the same moment."""
    by_time = sorted(log.left_s, key=lambda row: (log.left_s[row], row))
    return [list(rows) for _, rows in groupby(by_time, key=log.left_s.get)]


def check_waves(kind: type, gaps) -> None:
    """Every rule of a wave, on one history."""
    trace, log = served(kind, gaps)
    assert {row: len(times) for row, times in log.token_s.items()} == {
        row: arrival.output_len for row, arrival in enumerate(trace)
    }, "an answer is too long or too short"
    waves = waves_of(log)
    assert list(chain(*waves)) == list(range(len(trace))), "a request overtook another"
    free_s = 0.0  # when the wave before ended
    for wave in waves:
        starts = {log.token_s[row][0] - 1 for row in wave}
        assert len(wave) <= PLACES and len(starts) == 1, "a wave starts together, in its places"
        longest = max(trace[row].output_len for row in wave)
        assert log.left_s[wave[0]] == min(starts) + longest, "a wave ends with its longest answer"
        assert min(starts) == opens_s(kind, trace, wave, free_s), "a wave opens at another time"
        free_s = log.left_s[wave[0]]


def opens_s(kind: type, trace: list[Arrival], wave: list[int], free_s: float) -> float:
    """When a wave has to open: full, or its window over, or no other request to come."""
    first, last_of_all = trace[wave[0]].arrival_s, trace[-1].arrival_s
    full = wave[0] + PLACES - 1
    reasons = [last_of_all]
    if full < len(trace):
        reasons.append(trace[full].arrival_s)
    if issubclass(kind, DynamicScheduler):
        reasons.append(first + WINDOW_S)
    return max(free_s, min(reasons))


class LetsIn(DynamicScheduler):
    """Fills a wave that runs: no rectangle any more."""

    def schedule(self):
        while self.wave and self.waiting and len(self.wave) < self.max_num_seqs:
            self.wave.append(self.waiting.popleft())
        return super().schedule()


class LetsOut(StaticScheduler):
    """Who has finished leaves before the others."""

    def leave(self):
        done = [sequence for sequence in self.wave if sequence.finished]
        self.wave = [sequence for sequence in self.wave if not sequence.finished]
        return done


class CountsFromTheNewest(DynamicScheduler):
    """Each arrival begins the window anew, so that a steady trickle waits until it is full."""

    @property
    def opens_at_s(self):
        return self.arrived_s[-1] + self.max_wait_s if self.waiting else float("inf")


class CountsTheServed(DynamicScheduler):
    """Keeps the arrivals of those that run, and opens the next wave too early."""

    def schedule(self):
        return StaticScheduler.schedule(self)


@pytest.mark.parametrize("kind", [StaticScheduler, DynamicScheduler])
@pytest.mark.sample(1)
def test_random_waves(kind, request):
    @settings(deadline=None, max_examples=10_000 if request.config.getoption("--all") else 300)
    @given(ARRIVALS)
    def check(gaps):
        check_waves(kind, gaps)

    check()


@pytest.mark.parametrize("slip", [LetsIn, LetsOut, CountsFromTheNewest, CountsTheServed])
def test_a_wrong_wave_is_found(slip):
    @settings(deadline=None, max_examples=300, database=None, phases=[Phase.generate])
    @given(ARRIVALS)
    def check(gaps):
        check_waves(slip, gaps)

    with pytest.raises((AssertionError, KeyError)):
        check()
