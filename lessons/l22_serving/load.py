"""How to load a server, and what to make of what it does: arrivals, Little's law, percentiles,
goodput and the knee.

Read `little`. All times are seconds since the load began; a request's `arrival_s` is when it was
meant to be sent, so a client that comes late with sending cannot hide it (coordinated omission).

Sources: Little 1961, A Proof for the Queuing Formula L = λW; Zhong et al. 2024, DistServe, section
2 (goodput under several objectives); Schroeder et al. 2006, Open Versus Closed: A Cautionary Tale;
Tene 2013, How NOT to Measure Latency (coordinated omission).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from lessons.toolbox.model.arguments import check_positive, check_whole, refuse

# ---------------------------------------------------------------- arrivals


def gamma_arrivals(
    rate_per_s: float, count: int, seed: int, burstiness: float = 1.0
) -> list[float]:
    """When `count` requests arrive, in seconds, rate_per_s on average. The gaps are gamma
    distributed with the shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even.
    """
    check_positive(rate_per_s=rate_per_s, burstiness=burstiness)
    check_whole(count=count)
    rng, scale_s = random.Random(seed), 1 / (rate_per_s * burstiness)
    return list(accumulate(rng.gammavariate(burstiness, scale_s) for _ in range(count)))


def even_arrivals(rate_per_s: float, count: int) -> list[float]:
    """One request every 1 / rate_per_s seconds, the first at 0."""
    check_positive(rate_per_s=rate_per_s)
    check_whole(count=count)
    return [index / rate_per_s for index in range(count)]


# ---------------------------------------------------------------- what became of a request


@dataclass(frozen=True)
class Served:
    """What a client saw of one request, in seconds since the load began.

    arrival_s: when it was meant to be sent. token_s: when its tokens came, or parts of a stream
    that hold several. end_s: when it had its answer, or no hope of one. why_not: empty for a whole
    answer. generated_tokens: as the server counted them; None: one for each of token_s.
    """

    arrival_s: float
    end_s: float
    token_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    user: str = ""
    why_not: str = ""
    generated_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that came, however many were asked for."""
        return len(self.token_s) if self.generated_tokens is None else self.generated_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency."""
        return self.end_s - self.arrival_s

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: from each token to its next."""
        return [after - before for before, after in pairwise(self.token_s)]

    @property
    def tpot_s(self) -> float:
        """Time per output token, the first one left out; 0 for a single token."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, self.num_tokens - 1)


class Little(NamedTuple):
    """in_system: mean number of requests that are there. rate_per_s: how many come a second.
    stay_s: mean seconds that one stays.
    """

    in_system: float
    rate_per_s: float
    stay_s: float


def little(stays: Sequence[tuple[float, float]]) -> Little:
    """The three parts of Little's law, each measured for itself. stays: (from, to) of each request.

    The window goes from the first arrival to the last departure, so no request crosses its edges
    and L = λW holds exactly: both sides are the area under the number of requests over time.
    """
    if not stays:
        refuse("stays", stays, "one request or more")
    begin, end = min(start for start, _ in stays), max(stop for _, stop in stays)
    changes = sorted([(start, 1) for start, _ in stays] + [(stop, -1) for _, stop in stays])
    area = number = 0
    for (at, change), (until, _) in pairwise(changes):
        number += change
        area += number * (until - at)
    window_s = end - begin
    if window_s <= 0:
        refuse("stays", stays, "requests of which one stays for some time")
    stay_s = sum(stop - start for start, stop in stays) / len(stays)
    return Little(area / window_s, len(stays) / window_s, stay_s)


# ---------------------------------------------------------------- summaries


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` percent of the values are, between two of them on the
    straight line; NaN for none. Of all values together: a mean of percentiles is no percentile.
    """
    return float(np.percentile(values, percent)) if len(values) else float("nan")


@dataclass(frozen=True)
class Objectives:
    """A service-level objective, in seconds; None: no limit on it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_positive(**given)

    def are_met(self, served: Served) -> bool:
        """A request that was refused, dropped or lost meets none."""
        if served.why_not or not served.token_s:
            return False
        limits = vars(self).items()
        return all(limit is None or getattr(served, name) <= limit for name, limit in limits)


def attainment(history: Sequence[Served], objectives: Objectives) -> float:
    """The share of all requests, refused ones too, that met the objectives."""
    return sum(map(objectives.are_met, history)) / len(history)


def goodput_per_s(history: Sequence[Served], objectives: Objectives) -> float:
    """Requests a second that met the objectives, from the first arrival to the last end."""
    return sum(map(objectives.are_met, history)) / duration_s(history)


def duration_s(history: Sequence[Served]) -> float:
    """Seconds of the clock from the first arrival to the last end. Not a sum of latencies: requests
    run side by side.
    """
    begin = min(served.arrival_s for served in history)
    return max(served.end_s for served in history) - begin


def tokens_per_s(history: Sequence[Served]) -> float:
    """Generated tokens a second: those that came, not those that were asked for."""
    return sum(served.num_tokens for served in history) / duration_s(history)


def knee(points: Sequence[tuple[float, float]], target: float = 0.9) -> float | None:
    """The largest load up to which the objectives are met. points: (load, attainment), by load.
    None: not even at the first. Between the last load that meets the target and the first that does
    not, attainment is taken as a straight line.
    """
    if not points or sorted(points) != list(points):
        refuse("points", points, "(load, attainment), in the order of load")
    last = None
    for load, share in points:
        if share < target:
            if last is None:
                return None
            before, share_before = last
            return before + (load - before) * (share_before - target) / (share_before - share)
        last = load, share
    return last[0]
