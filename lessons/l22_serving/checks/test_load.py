"""Proves the arithmetic of load: arrivals, Little's law, percentiles, goodput, the knee."""

import random
from itertools import pairwise

import pytest

from lessons.l14_continuous_batching.lab.workload import variation
from lessons.l22_serving.lab.simulation import Call, simulate
from lessons.l22_serving.load import (
    Objectives,
    Served,
    attainment,
    duration_s,
    even_arrivals,
    gamma_arrivals,
    goodput_per_s,
    knee,
    little,
    percentile,
    tokens_per_s,
)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_their_bursts(burstiness):
    times = gamma_arrivals(5.0, 20_000, 7, burstiness)
    assert times == sorted(times) == gamma_arrivals(5.0, 20_000, 7, burstiness)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.06)
    gaps = [after - before for before, after in pairwise(times)]
    assert variation(gaps) == pytest.approx(burstiness**-0.5, rel=0.06)


def test_even_arrivals():
    assert even_arrivals(4.0, 3) == [0, 0.25, 0.5]
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="rate_per_s: got"):
            even_arrivals(wrong, 3)
        with pytest.raises(ValueError, match="burstiness: got"):
            gamma_arrivals(1.0, 3, 0, wrong)


def test_littles_law_holds_exactly(seed):
    """L and λW are measured by themselves, one along the clock, the other request by request."""
    for _ in range(50):
        starts = [random.uniform(0, 100) for _ in range(random.randint(1, 40))]
        stays = [(start, start + random.expovariate(0.1)) for start in starts]
        in_system, rate_per_s, stay_s = little(stays)
        assert in_system == pytest.approx(rate_per_s * stay_s, rel=1e-9)
    assert little([(0, 2), (1, 3), (1, 2)]) == pytest.approx((5 / 3, 1.0, 5 / 3))
    for none in ([], [(1, 1)]):
        with pytest.raises(ValueError, match="stays: got"):
            little(none)


def test_littles_law_holds_in_a_server_for_every_part_of_it():
    """For the whole stay, and for the wait in the queue alone, at a load that it cannot keep up
    with.
    """
    calls = [Call(at, 128, 12) for at in gamma_arrivals(80.0, 80, seed=1)]
    history, _ = simulate(calls, max_num_seqs=4)
    for stays in (
        [(served.arrival_s, served.end_s) for served in history],
        [(served.arrival_s, served.token_s[0]) for served in history],
        [(served.token_s[0], served.end_s) for served in history],
    ):
        in_system, rate_per_s, stay_s = little(stays)
        assert in_system == pytest.approx(rate_per_s * stay_s, rel=1e-9)


def served(arrival_s, *token_s, **more) -> Served:
    return Served(arrival_s, max(token_s, default=arrival_s), token_s, **more)


def test_what_a_request_saw():
    one = served(1.0, 3.0, 3.5, 5.0)
    assert (one.ttft_s, one.e2el_s, one.itl_s, one.tpot_s) == (2.0, 4.0, [0.5, 1.5], 1.0)
    assert served(0.0, 1.0).tpot_s == 0 and served(0.0, 1.0).itl_s == []
    several = served(0.0, 1.0, 3.0, generated_tokens=5)  # two parts of a stream with five tokens
    assert several.num_tokens == 5 and several.tpot_s == 0.5


def test_summaries_are_over_the_clock():
    history = [served(0.0, 1.0, 2.0), served(0.0, 1.0, 4.0), served(1.0, why_not="refused")]
    assert duration_s(history) == 4.0 and tokens_per_s(history) == 1.0
    wanted = Objectives(ttft_s=1.0, e2el_s=2.5)
    assert attainment(history, wanted) == 1 / 3 and goodput_per_s(history, wanted) == 0.25
    assert attainment(history, Objectives(tpot_s=3.0)) == 2 / 3
    assert attainment(history, Objectives()) == 2 / 3, "a refused request met an objective"
    with pytest.raises(ValueError, match="ttft_s: got 0"):
        Objectives(ttft_s=0)


def test_percentiles():
    assert percentile(range(101), 99) == 99 and percentile([4.0], 99) == 4
    assert percentile([0, 10], 25) == 2.5 and percentile([], 50) != percentile([], 50)


def test_the_knee_is_where_the_target_is_missed_first():
    points = [(1, 1.0), (2, 0.95), (4, 0.85), (8, 0.95)]
    assert knee(points, 0.9) == pytest.approx(3.0)
    assert knee(points[:2], 0.9) == 2 and knee([(1, 0.5), (2, 1.0)], 0.9) is None
    for wrong in ([], points[::-1]):
        with pytest.raises(ValueError, match="points: got"):
            knee(wrong)


def test_more_bursts_wait_longer():
    """At the same mean rate, below what the server can do."""
    worst = {}
    for burstiness in (0.2, 1.0, 1000.0):
        arrivals = gamma_arrivals(25.0, 150, 3, burstiness)
        history, _ = simulate([Call(at, 128, 12) for at in arrivals], max_num_seqs=4)
        worst[burstiness] = percentile([one.ttft_s for one in history], 95)
    assert worst[0.2] > worst[1.0] > worst[1000.0]
