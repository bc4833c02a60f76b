"""What came out of a run: when each token came, and what share of the requests was served well."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

SLOW_SHARE = 0.01  # of a request's gaps, how many may be longer than the limit


@dataclass(frozen=True)
class Slo:
    """A service level objective. A request keeps it if its first token comes within ttft_s, and
    each next one within itl_s of the one before, but for one gap in a hundred.
    """

    ttft_s: float
    itl_s: float

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From "ttft=0.5,itl=0.05", seconds. Raises ValueError."""
        accepted = "accepted: ttft=0.5,itl=0.05, seconds above 0"
        try:
            values = {name: float(value) for name, value in (p.split("=") for p in text.split(","))}
        except ValueError:
            values = {}
        if sorted(values) != ["itl", "ttft"] or not all(0 < v < np.inf for v in values.values()):
            raise ValueError(f"--slo: got {text!r}; {accepted}")
        return cls(values["ttft"], values["itl"])


@dataclass(frozen=True)
class Served:
    """A run. All times are seconds on the clock.

    arrival_s: [R]. counts: [R], tokens of each answer. token_s: [sum of counts], when each token
    came, request after request. preemptions: [R]. replicas: how many there were. found: {where K
    and V of prompts were: tokens}, if there was a prefix cache.
    """

    arrival_s: np.ndarray
    counts: np.ndarray
    token_s: np.ndarray
    preemptions: np.ndarray
    replicas: int
    found: dict[str, int] = field(default_factory=dict)

    @cached_property
    def first(self) -> np.ndarray:
        """[R], where each request's tokens begin in token_s."""
        return np.cumsum(self.counts) - self.counts

    @property
    def ttft_s(self) -> np.ndarray:
        """[R], from arrival to the first token."""
        return self.token_s[self.first] - self.arrival_s

    @cached_property
    def gaps_s(self) -> np.ndarray:
        """[sum of counts], from each token to the next of its answer; 0 for the last, which has
        none.
        """
        gaps_s = np.diff(self.token_s, append=0)
        gaps_s[self.first + self.counts - 1] = 0
        return gaps_s

    @property
    def itl_s(self) -> np.ndarray:
        """All inter-token latencies, [tokens - requests]."""
        is_gap = np.ones(len(self.token_s), bool)
        is_gap[self.first + self.counts - 1] = False
        return self.gaps_s[is_gap]

    @property
    def makespan_s(self) -> float:
        return float(self.token_s.max())

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time."""
        return len(self.token_s) / self.makespan_s

    def keeps(self, slo: Slo) -> np.ndarray:
        """[R] bool, which requests keep the objective."""
        slow = np.add.reduceat((self.gaps_s > slo.itl_s).astype(int), self.first)
        return (self.ttft_s <= slo.ttft_s) & (slow <= SLOW_SHARE * (self.counts - 1))

    def attained(self, slo: Slo) -> float:
        """The share of the requests that keep it."""
        return float(self.keeps(slo).mean())

    def goodput(self, slo: Slo) -> float:
        """Requests/s that keep it, of those that arrive. If all arrive at once: until the last
        token.
        """
        span_s = float(self.arrival_s[-1] - self.arrival_s[0]) or self.makespan_s
        return float(self.keeps(slo).sum()) / span_s


def percentile(values: np.ndarray, percent: float) -> float:
    """NaN where there is none, as for gaps of answers of one token."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def summed_up(jobs: Iterable, replicas: int, found: dict[str, int]) -> Served:
    """The jobs of a cluster, all served, in the order of arrival."""
    jobs = sorted(jobs, key=lambda job: job.row)
    counts = np.array([job.generated for job in jobs])
    wanted = np.array([job.request.output_tokens for job in jobs])
    assert (counts == wanted).all(), "an answer is too long or too short"
    return Served(
        np.array([job.request.arrival_s for job in jobs]),
        counts,
        np.concatenate([piece for job in jobs for piece in job.token_s]),
        np.array([job.preemptions for job in jobs]),
        replicas,
        found,
    )
