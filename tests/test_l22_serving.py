"""Lesson 22: excerpts are lines of the sources, and the README quotes what the code says."""

from pathlib import Path
from statistics import fmean

import pytest

from lessons.l22_serving.admission import AdmissionControl, Queue, ServiceRate, Waiting
from lessons.l22_serving.fair import FairQueue
from lessons.l22_serving.lab import benchmark, experiments
from lessons.l22_serving.lab.simulation import Call, simulate
from lessons.l22_serving.load import little, percentile
from tests.excerpts import plain_readme, stray_excerpts
from tests.test_pages import guide

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l22_serving"
README = plain_readme(ROOM)


def test_the_excerpts_are_lines_of_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_readme_quotes_the_step_of_the_benchmark():
    assert f"whose step is `{1e3 * benchmark.STEP_S:.0f} ms` of sleep" in README


def test_the_readme_quotes_the_simulation():
    """The bottleneck, steps 5 and 9, and the table."""
    ((alone,), _), capacity = simulate([Call(0.0, 512, 64)]), experiments.capacity_per_s()
    assert f"64 out, in {alone.e2el_s:.2f} s by lesson 15's cost" in README
    assert f"gives {1 / alone.e2el_s:.1f} answers per second" in README
    assert f"(16 *places*), the same engine gives {capacity:.1f}" in README
    assert experiments.PLACES == 16 and experiments.PROMPT == 512
    assert f"W = 16 / {capacity:.1f} = {16 / capacity:.2f} s" in README
    assert f"up to the capacity of {capacity:.1f}. Beyond it" in README
    loop_alone, async_engine, fair, deadlines, admission = experiments.ladder()
    assert loop_alone.median_ttft_s == pytest.approx(experiments.PATIENCE_S), "when others hung up"
    assert fair.modest_p99_ttft_s < async_engine.modest_p99_ttft_s / 10, "fairness: who waits"
    assert fair.goodput_per_s == pytest.approx(async_engine.goodput_per_s, rel=0.01)
    assert fair.goodput_per_s < deadlines.goodput_per_s < admission.goodput_per_s, "how many"
    for row in (loop_alone, async_engine, fair, deadlines, admission):
        seconds = f"`{row.median_ttft_s:.2f}` | `{row.modest_p99_ttft_s:.2f}`"
        assert f"| {row.name} | {seconds} | `{row.goodput_per_s:.1f}` |" in README
    loop = experiments.blocking(experiments.crowd())
    answered = sum(not one.why_not for one in loop)
    assert f"With the blocking loop `{answered}` of `{len(loop)}` requests got an answer" in README
    hidden, seen = (percentile(every, 99) for every in experiments.omission().values())
    said = f"percentile is {1e3 * hidden:.0f} ms. But a hundred users wanted to ask in these"
    assert f"{said} seconds. Counted from then, it is {1e3 * seen:.0f} ms" in README
    assert f"{1e3 * hidden:.0f} ms for the client, {1e3 * seen:.0f} ms for its users" in guide(
        "sends the next request"
    )


@pytest.mark.sample(1, of="simulations")
@pytest.mark.parametrize(
    "what", ["knee", "tests that are too short", "a door that was not needed", "users"]
)
def test_the_readme_quotes_longer_simulations(what):
    """Steps 7 and 10, and where it loses."""
    if what == "knee":
        around = {"Poisson": (0.85, 0.9), "bursts": (0.6, 0.65)}
        found = experiments.knees(experiments.knee_curves(around))
        alone, bursty = (rate / experiments.capacity_per_s() for rate in found.values())
        assert f"up to {alone:.0%} of its capacity if requests come independently" in README
        assert f"up to {bursty:.0%} if they come in bursts" in README
        assert f"{bursty:.0%} or {alone:.0%} for the same server" in README
        assert f"{bursty:.0%} or {alone:.0%} of the capacity" in guide("at 70")
    elif what == "tests that are too short":
        at_capacity = {"Poisson": (1.0,)}
        shares = [
            experiments.knee_curves(at_capacity, 800, seed)["Poisson"][0].attainment
            for seed in (11, 13)
        ]
        said = "In one run {:.0%} of the first tokens were in time, in the other {:.0%}"
        assert said.format(*shares) in README
        for text in (README, guide("a load test of half a minute")):
            assert "{:.0%} in time with one draw of arrivals, {:.0%}".format(*shares) in text
    elif what == "users":
        first_come, fair = (
            [one.ttft_s for one in seen] for seen in experiments.two_users().values()
        )
        assert min(first_come) > 9 and 14 < max(first_come) < 15, "nine to fourteen seconds"
        assert max(fair) < 1
        first_come, fair = (
            fmean(one.e2el_s for one in seen)
            for seen in experiments.two_users(whose="greedy").values()
        )
        said = f"waits {fair:.1f} s on average for an answer, instead of {first_come:.1f} s"
        assert said in README
    else:
        ((load, _, good),) = experiments.overload((0.8,))
        door, all_in = good["turns some away"], good["takes all"]
        said = f"At `{load}` times the capacity admission control turns away a few requests"
        assert f"{said} that would have been in time: `{door:.1f}` instead of `{all_in:.1f}`" in (
            README
        )


def test_the_readme_quotes_the_examples():
    """Steps 2 and 5 to 7, and the quiz, by the lesson's own code where it has some."""
    law = little([(0, 4), (1, 3), (2, 6)])
    assert law == pytest.approx((10 / 6, 3 / 6, 10 / 3))
    assert f"W = (4 + 2 + 4) / 3 = {law.stay_s:.2f} s,   L = 10 / 6 = {law.in_system:.2f}" in README
    assert f"1000 · 1001 / 2 = {sum(range(1001)):,} tokens" in README
    for waiting, each, rate, said in [(40, 600, 12_000, "wait = 40"), (30, 400, 8_000, "30")]:
        service = ServiceRate()
        service.ran(rate, 1.0)
        queue = [Waiting("", each - 100, 100)] * waiting
        door = AdmissionControl(None, service, lambda queue=queue: Queue(queue, 0))
        wait_s = door.wait_s(queue)
        number = f"{rate:,}" if rate > 10_000 else str(rate)
        assert f"{said} · {each} / {number} = {wait_s:.1f} s" in README
        assert door.retry_after_s(wait_s) == 2
    fair = FairQueue()
    tickets = [fair.arrive(*request) for request in (("ann", 10), ("ann", 10), ("bob", 5))]
    assert [ticket.start for ticket in tickets] == [0, 10, 0]
    assert "ann: 0–10, 10–20      bob: 0–5      order of the starts 0, 0, 10" in README
    assert f"L = 24 · 2.5 = {24 * 2.5:.0f} on average" in README
    share_per_s = 9000 // 10
    assert f"60 / 9000 = {60 / 9000 * 1e3:.1f} ms of the engine" in README
    assert f"is {share_per_s} tokens per second, so {60 / share_per_s:.3f} s" in README
