"""The lesson's experiments on a virtual clock: one loop or many people, users who share, doors that
close, the knee, and clients that hide what they measure.

Everything here is computed from lesson 15's cost of a step (Llama-3-8B on an H100), not measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from lessons.l15_chunked_prefill.preemption import by_arrival
from lessons.l22_serving.admission import Limits
from lessons.l22_serving.fair import by_fair_share
from lessons.l22_serving.lab.simulation import Call, of_user, simulate
from lessons.l22_serving.load import (
    Objectives,
    Served,
    attainment,
    even_arrivals,
    gamma_arrivals,
    goodput_per_s,
    knee,
    percentile,
    tokens_per_s,
)

PROMPT, ANSWER = 512, 64  # tokens of each request
PLACES = 16
OBJECTIVES = Objectives(e2el_s=2.5)
MAX_WAIT_S = 0.5
PATIENCE_S = 10.0  # after which a client hangs up
ORDERS = {"first come, first served": by_arrival, "fair between users": by_fair_share}


def same_requests(arrivals_s: Sequence[float], **more) -> list[Call]:
    """Requests of the lesson's size at these seconds."""
    return [Call(at, PROMPT, ANSWER, **more) for at in arrivals_s]


@lru_cache
def capacity_per_s(count: int = 300) -> float:
    """Requests a second that full places answer, when far more come than that."""
    arrivals = gamma_arrivals(100.0, count, seed=1)
    history, _ = simulate(same_requests(arrivals), max_num_seqs=PLACES)
    return tokens_per_s(history) / ANSWER


# ---------------------------------------------------------------- one loop, or many people


def blocking(calls: Sequence[Call]) -> list[Served]:
    """naive.py: one place, and nobody sees a token before the whole answer."""
    history, _ = simulate(calls, max_num_seqs=1)
    return [replace(one, token_s=(one.end_s,) * len(one.token_s)) for one in history]


class Row(NamedTuple):
    """What a step of the ladder does. Seconds; modest: of the user who asks for little."""

    name: str
    median_ttft_s: float
    p99_ttft_s: float
    modest_p99_ttft_s: float
    p99_itl_s: float
    goodput_per_s: float
    refused: float


def crowd(seconds: float = 12.0, load: float = 1.3, seed: int = 22) -> list[Call]:
    """More than the server can answer: most of it of one user, in bursts, and one request a second of
    another.
    """
    rate = load * capacity_per_s() - 1
    count = int(rate * seconds)
    greedy = same_requests(gamma_arrivals(rate, count, seed, 0.5), user="greedy")
    modest = same_requests(even_arrivals(1.0, int(seconds)), user="modest")
    calls = sorted(greedy + modest, key=lambda call: call.arrival_s)
    return [call._replace(patience_s=PATIENCE_S) for call in calls]


def ladder(calls: list[Call] | None = None) -> list[Row]:
    """The lesson's steps under the same load, each on top of those before."""
    calls = crowd() if calls is None else calls
    limits = Limits(max_wait_s=MAX_WAIT_S)
    timed = [call._replace(timeout_s=OBJECTIVES.e2el_s) for call in calls]
    many = dict(max_num_seqs=PLACES)
    fair = many | dict(order=by_fair_share)
    return [
        row("a blocking loop", blocking(calls)),
        row("an async engine", simulate(calls, **many)[0]),
        row("fair between users", simulate(calls, **fair)[0]),
        row("deadlines", simulate(timed, **fair)[0]),
        row("admission", simulate(timed, **fair, limits=limits)[0]),
    ]


def row(name: str, history: list[Served]) -> Row:
    """Latencies are of those who got tokens; goodput counts the others as missed."""
    seen = [one for one in history if one.token_s]
    modest = [one for one in of_user(history, "modest") if one.token_s]
    gaps = [gap for one in seen for gap in one.itl_s]
    return Row(
        name,
        percentile([one.ttft_s for one in seen], 50),
        percentile([one.ttft_s for one in seen], 99),
        percentile([one.ttft_s for one in modest], 99),
        percentile(gaps, 99),
        goodput_per_s(history, OBJECTIVES),
        fmean(one.why_not == "refused" for one in history),
    )


# ---------------------------------------------------------------- users who share


def two_users(many: int = 300) -> dict[str, list[Served]]:
    """One user sends `many` requests at once, another one every half second: {order: what the second
    saw}.
    """
    greedy = same_requests([0.0] * many, user="greedy")
    modest = same_requests([0.25 + 0.5 * index for index in range(12)], user="modest")
    calls = sorted(greedy + modest, key=lambda call: call.arrival_s)
    return {
        name: of_user(simulate(calls, order=order, max_num_seqs=PLACES)[0], "modest")
        for name, order in ORDERS.items()
    }


# ---------------------------------------------------------------- overload


class Overload(NamedTuple):
    """One load, as a share of the capacity, and requests a second that are answered in time."""

    load: float
    offered_per_s: float
    goodput_per_s: dict[str, float]


LOADS = (0.3, 0.6, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)


def overload(loads: Sequence[float] = LOADS, seconds: float = 25.0) -> list[Overload]:
    """Goodput over what arrives: a queue without end, deadlines, and a door that closes."""
    found, capacity = [], capacity_per_s()
    for load in loads:
        rate = load * capacity
        arrivals = gamma_arrivals(rate, max(1, int(rate * seconds)), seed=5)
        calls = same_requests(arrivals, patience_s=PATIENCE_S)
        timed = same_requests(arrivals, timeout_s=OBJECTIVES.e2el_s)
        ways = {
            "takes everybody": simulate(calls, max_num_seqs=PLACES),
            "drops the late": simulate(timed, max_num_seqs=PLACES),
            "turns some away": simulate(
                calls, max_num_seqs=PLACES, limits=Limits(max_wait_s=MAX_WAIT_S)
            ),
        }
        # over the time in which requests came, the same for all
        good = {
            name: sum(map(OBJECTIVES.are_met, history)) / arrivals[-1]
            for name, (history, _) in ways.items()
        }
        found.append(Overload(load, len(calls) / arrivals[-1], good))
    return found


# ---------------------------------------------------------------- the knee


class KneePoint(NamedTuple):
    """A rate, the share of requests in time, and latencies in seconds."""

    rate_per_s: float
    attainment: float
    median_ttft_s: float
    p99_ttft_s: float


BURSTS = {"Poisson": 1.0, "bursts": 0.2}
KNEE_LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


def knee_curves(
    loads: Sequence[float] = KNEE_LOADS, count: int = 500
) -> dict[str, list[KneePoint]]:
    """{kind of arrivals: a point for each load}."""
    capacity, found = capacity_per_s(), {}
    for name, burstiness in BURSTS.items():
        found[name] = []
        for load in loads:
            arrivals = gamma_arrivals(load * capacity, count, 11, burstiness)
            history, _ = simulate(same_requests(arrivals), max_num_seqs=PLACES)
            ttfts = [one.ttft_s for one in history]
            share = attainment(history, OBJECTIVES)
            tail = percentile(ttfts, 99)
            found[name].append(KneePoint(load * capacity, share, percentile(ttfts, 50), tail))
    return found


def knees(curves: dict[str, list[KneePoint]]) -> dict[str, float | None]:
    """{kind of arrivals: the largest rate at which nine of ten requests are in time}."""
    return {
        name: knee([(point.rate_per_s, point.attainment) for point in points])
        for name, points in curves.items()
    }


# ---------------------------------------------------------------- coordinated omission

SERVICE_S, EVERY_S, STALL_AT_S, STALL_S, COUNT = 0.01, 0.1, 30.0, 10.0, 1000


def stalling_server(sent_s: float) -> float:
    """When a request sent at this second is answered: it takes 10 ms, and between the 30th and the 40th
    second nothing moves. There are places enough, so nobody waits for anybody.
    """
    if STALL_AT_S <= sent_s < STALL_AT_S + STALL_S:
        sent_s = STALL_AT_S + STALL_S
    return sent_s + SERVICE_S


def omission() -> dict[str, list[float]]:
    """Latencies in seconds of a thousand requests, one every 100 ms, as two clients measure them: one
    sends the next when it has an answer, and counts from the sending; the other counts from when each
    was meant to be sent.
    """
    closed, sent_s = [], 0.0
    for _ in range(COUNT):
        end_s = stalling_server(sent_s)
        closed.append(end_s - sent_s)
        sent_s = max(end_s, sent_s + EVERY_S)
    intended = [stalling_server(at) - at for at in even_arrivals(1 / EVERY_S, COUNT)]
    return {"counted from the sending": closed, "counted from the intended time": intended}
