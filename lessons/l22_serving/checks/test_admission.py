"""Proves whom the door turns away, when, and for how long; and what that does under overload."""

import pytest

from lessons.l22_serving.admission import (
    RETRY_S,
    AdmissionControl,
    Limits,
    Overloaded,
    Queue,
    ServiceRate,
    Waiting,
)
from lessons.l22_serving.lab import testing
from lessons.l22_serving.lab.simulation import Call, simulate
from lessons.l22_serving.load import Objectives, attainment, gamma_arrivals, goodput_per_s


def door(kind=AdmissionControl, waiting=(), free_places=0, rate=None, **limits):
    return kind(Limits(**limits), rate or ServiceRate(), lambda: Queue(list(waiting), free_places))


def working(tokens_per_s=1000.0, answer=None) -> ServiceRate:
    """In steps of 10 ms."""
    rate = ServiceRate()
    for _ in range(100):
        rate.ran(int(tokens_per_s / 100), 0.01)
    for _ in range(3 if answer else 0):
        rate.answered(answer)
    return rate


def refuses(door, user="ann", prompt_tokens=10, max_tokens=10, timeout_s=None) -> Overloaded | None:
    try:
        door.admit(user, prompt_tokens, max_tokens, timeout_s)
    except Overloaded as overloaded:
        assert "\n" not in str(overloaded)
        return overloaded


TWO = [Waiting("bob", 50, 50), Waiting("ann", 100, 300)]


def check_limits(kind):
    """Each limit turns away what is beyond it, and nothing else."""
    for limits, waiting, is_refused in (
        (dict(), TWO * 500, False),
        (dict(max_waiting_requests=3), TWO, False),
        (dict(max_waiting_requests=2), TWO, True),
        (dict(max_waiting_requests=0), [], True),
        (dict(max_waiting_per_user=1), TWO, True),
        (dict(max_waiting_per_user=1), TWO[:1], False),
        (dict(max_waiting_tokens=520), TWO, False),
        (dict(max_waiting_tokens=519), TWO, True),
        (dict(max_waiting_tokens=1), [], False),
    ):
        found = refuses(door(kind, waiting, **limits))
        assert bool(found) == is_refused, (limits, waiting)
        assert not is_refused or next(iter(limits)) in str(found)


@pytest.mark.parametrize(
    "limits, waiting, said",
    [
        (
            dict(max_waiting_requests=0),
            [],
            "no place is free, 0 requests wait, the limit is 0 (max",
        ),
        (
            dict(max_waiting_requests=2),
            TWO,
            "2 requests wait, the limit is 2 (max_waiting_requests)",
        ),
        (
            dict(max_waiting_per_user=1),
            TWO,
            "1 of your requests wait, the limit is 1 (max_waiting_p",
        ),
        (
            dict(max_waiting_tokens=519),
            TWO,
            "500 tokens wait, the limit is 519 (max_waiting_tokens)",
        ),
    ],
)
def test_who_is_turned_away_is_told_the_limit(limits, waiting, said):
    assert said in str(refuses(door(waiting=waiting, **limits)))


def check_free_places(kind):
    """A request that finds a place in the next step waits for no other."""
    assert not refuses(door(kind, TWO, free_places=3, max_waiting_requests=0))
    assert refuses(door(kind, TWO, free_places=2, max_waiting_requests=0))


def check_waits(kind):
    """500 tokens that wait are half a second, if answers take all that they may; if they have been
    of 10 tokens lately, 170 tokens are 0.17 s.
    """
    assert not refuses(door(kind, TWO, rate=working(), max_wait_s=0.51))
    assert refuses(door(kind, TWO, rate=working(), max_wait_s=0.49))
    assert not refuses(door(kind, TWO, rate=working(answer=10), max_wait_s=0.18))
    assert refuses(door(kind, TWO, rate=working(answer=10), max_wait_s=0.16))
    # 0.5 s until it begins, 0.01 s for its prompt, and ten steps for its answer
    assert refuses(door(kind, TWO, rate=working()), timeout_s=0.6)
    assert not refuses(door(kind, TWO, rate=working()), timeout_s=0.62)
    assert not refuses(door(kind, TWO, max_wait_s=0.001)), "nothing has run: nothing is known"


def check_retry(kind):
    """When what waits has gone; sooner, all who were refused would come for one place."""
    for waiting, seconds in ((TWO, RETRY_S[0]), (TWO * 9, 5), (TWO * 1000, RETRY_S[1])):
        found = refuses(door(kind, waiting, rate=working(), max_waiting_requests=0))
        assert found.retry_after_s == seconds and type(found.retry_after_s) is int


CHECKS = (check_limits, check_free_places, check_waits, check_retry)


@pytest.mark.parametrize("check", CHECKS)
def test_the_door(check):
    check(AdmissionControl)


@pytest.mark.parametrize("slip", testing.ADMISSION_SLIPS)
def test_slips_are_found(slip):
    def finds(check):
        try:
            check(slip)
        except AssertionError:
            return True

    assert any(map(finds, CHECKS)), f"no check noticed: {slip.__doc__}"


def test_the_rate_is_of_busy_seconds_and_forgets():
    rate = ServiceRate(half_life_s=1.0)
    assert rate.seconds_for(100) == 0
    for _ in range(50):
        rate.ran(100, 0.1)
    assert rate.seconds_for(1000) == pytest.approx(1.0)
    for _ in range(50):
        rate.ran(10, 0.1)  # it has become ten times slower
    assert rate.seconds_for(1000) == pytest.approx(10.0, rel=0.3)


def test_wrong_limits_are_refused():
    for name, wrong in (("max_waiting_requests", -1), ("max_waiting_tokens", 2.5),
                        ("max_waiting_per_user", True), ("max_wait_s", float("nan"))):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got .*; accepted: None, or a") as error:
            Limits(**{name: wrong})
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------- under overload

IN_TIME = Objectives(ttft_s=0.5)


def overload(count=160) -> list[Call]:
    """Twice what 8 places can answer."""
    return [Call(at, 256, 24, patience_s=4.0) for at in gamma_arrivals(60.0, count, seed=22)]


def test_turning_some_away_answers_the_others_in_time():
    open_door, server = simulate(overload(), max_num_seqs=8)
    assert len(open_door) == 160 and not server.engine.sequences
    guarded, _ = simulate(overload(), max_num_seqs=8, limits=Limits(max_wait_s=0.25))
    let_in = [served for served in guarded if served.why_not != "refused"]
    assert attainment(let_in, IN_TIME) > 0.9 and 0.3 < len(let_in) / len(guarded) < 0.8
    assert goodput_per_s(guarded, IN_TIME) > 1.5 * goodput_per_s(open_door, IN_TIME)
    assert all(
        served.end_s == served.arrival_s for served in guarded if served.why_not == "refused"
    )


def test_late_requests_are_dropped_before_they_cost_anything():
    """A request that a deadline drops has hardly been computed; one whose client hangs up has
    been.
    """
    calls = overload()
    _, until_they_leave = simulate([c._replace(patience_s=1.0) for c in calls], max_num_seqs=8)
    deadlines = [c._replace(patience_s=None, timeout_s=1.0) for c in calls]
    history, in_time = simulate(deadlines, max_num_seqs=8)
    assert {served.why_not for served in history} <= {"", "late", "refused"}
    assert in_time.wasted_tokens <= until_they_leave.wasted_tokens
    for served in history:
        assert served.why_not or served.e2el_s <= 1.0 + 0.1
    assert not in_time.here and in_time.engine.scheduler.is_idle
