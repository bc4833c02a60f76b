"""The lesson's experiments on a virtual clock: one loop or many people, users who share, doors that
close, the knee, and clients that hide what they measure.

Everything here is computed from lesson 15's cost of a step (Llama-3-8B on an H100), not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from lessons.l14_continuous_batching.lab.workload import draw, uniform
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
)

PROMPT = 512  # tokens
ANSWERS = (32, 96)  # tokens: each length between them is as likely as every other
MAX_TOKENS = 128  # that each request asks for at most
PLACES = 16
OBJECTIVES = Objectives(e2el_s=3.0)
MAX_WAIT_S = 0.5
PATIENCE_S = 10.0  # after which a client hangs up
ORDERS = {"first come, first served": by_arrival, "fair between users": by_fair_share}


def requests_at(arrivals_s: Sequence[float], seed: int = 64, **more) -> list[Call]:
    """Requests of the lesson's sizes at these seconds."""
    answers = draw(uniform(*ANSWERS), len(arrivals_s), seed)
    more |= dict(max_tokens=MAX_TOKENS)
    return [Call(at, PROMPT, answer, **more) for at, answer in zip(arrivals_s, answers)]


@lru_cache
def capacity_per_s(count: int = 400) -> float:
    """Requests a second that full places answer: far more come, and the time when places fill at
    the beginning, or run empty at the end, is left out.
    """
    history, _ = simulate(requests_at(gamma_arrivals(100.0, count, 1)), max_num_seqs=PLACES)
    ends = sorted(one.end_s for one in history)
    first, last = count // 4, 3 * count // 4
    return (last - first) / (ends[last] - ends[first])


# ---------------------------------------------------------------- one loop, or many people


def blocking(calls: Sequence[Call]) -> list[Served]:
    """naive.py: one place, and no client sees a token before the whole answer. One who hangs up
    while the engine works for it counts with the time until then.
    """
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
    """More than the server can answer: most of it of one user, in bursts, and one request a second
    of another.
    """
    rate = load * capacity_per_s() - 1
    count = int(rate * seconds)
    greedy = requests_at(gamma_arrivals(rate, count, seed, 0.5), user="greedy")
    modest = requests_at(even_arrivals(1.0, int(seconds)), user="modest")
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


def two_users(many: int = 300, whose: str | None = "modest") -> dict[str, list[Served]]:
    """One user, greedy, sends `many` requests at once, a second one, modest, sends one every half
    second: {order: what the user `whose` saw; None: what both saw}.
    """
    greedy = requests_at([0.0] * many, user="greedy")
    modest = requests_at([0.25 + 0.5 * index for index in range(12)], user="modest")
    calls = sorted(greedy + modest, key=lambda call: call.arrival_s)
    found = {
        name: simulate(calls, order=order, max_num_seqs=PLACES)[0] for name, order in ORDERS.items()
    }
    if whose is None:
        return found
    return {name: of_user(history, whose) for name, history in found.items()}


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
        calls = requests_at(arrivals, patience_s=PATIENCE_S)
        timed = requests_at(arrivals, timeout_s=OBJECTIVES.e2el_s)
        ways = {
            "takes all": simulate(calls, max_num_seqs=PLACES),
            "drops the late": simulate(timed, max_num_seqs=PLACES),
            "turns some away": simulate(
                calls, max_num_seqs=PLACES, limits=Limits(max_wait_s=MAX_WAIT_S)
            ),
        }
        good = {name: answered_per_s(history, arrivals[-1]) for name, (history, _) in ways.items()}
        found.append(Overload(load, len(calls) / arrivals[-1], good))
    return found


def answered_per_s(history: list[Served], until_s: float) -> float:
    """Requests a second that had their answer in time, while others came: until this second."""
    return sum(OBJECTIVES.are_met(one) and one.end_s <= until_s for one in history) / until_s


# ---------------------------------------------------------------- the knee

FIRST_TOKEN = Objectives(ttft_s=0.5)


class KneePoint(NamedTuple):
    """A rate, the share of first tokens within half a second, and latencies in seconds."""

    rate_per_s: float
    attainment: float
    median_ttft_s: float
    p99_ttft_s: float


BURSTS = {"Poisson": 1.0, "bursts": 0.2}
KNEE_LOADS = {  # shares of the capacity; more of them where the curve bends
    "Poisson": (0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1),
    "bursts": (0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8, 1.0, 1.1),
}
KNEE_REQUESTS = (
    2400  # two minutes at the capacity: near it, the queue of a shorter run is still growing
)


def knee_curves(
    loads: Mapping[str, Sequence[float]] = KNEE_LOADS, count: int = KNEE_REQUESTS, seed: int = 11
) -> dict[str, list[KneePoint]]:
    """{kind of arrivals: a point for each of its loads}."""
    capacity, found = capacity_per_s(), {}
    for name, shares in loads.items():
        found[name] = []
        for load in shares:
            arrivals = gamma_arrivals(load * capacity, count, seed, BURSTS[name])
            history, _ = simulate(requests_at(arrivals), max_num_seqs=PLACES)
            ttfts = [one.ttft_s for one in history]
            share = attainment(history, FIRST_TOKEN)
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
    """When a request sent at this second is answered: it takes 10 ms, and between the 30th and the
    40th second nothing moves. There are places enough, so no request waits for another.
    """
    if STALL_AT_S <= sent_s < STALL_AT_S + STALL_S:
        sent_s = STALL_AT_S + STALL_S
    return sent_s + SERVICE_S


def omission() -> dict[str, list[float]]:
    """Latencies in seconds of a thousand requests, one every 100 ms, as two clients measure them:
    one sends the next when it has an answer, and counts from the sending; the other counts from
    when each was meant to be sent.
    """
    closed, sent_s = [], 0.0
    for _ in range(COUNT):
        end_s = stalling_server(sent_s)
        closed.append(end_s - sent_s)
        sent_s = max(end_s, sent_s + EVERY_S)
    intended = [stalling_server(at) - at for at in even_arrivals(1 / EVERY_S, COUNT)]
    return {"counted from the sending": closed, "counted from the intended time": intended}
