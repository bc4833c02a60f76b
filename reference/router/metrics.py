"""/metrics of the router alone. Each replica has its own, which Prometheus asks for there.

| outcome | what became of a request at a replica |
|---|---|
| answered | its answer was passed on, whatever it was |
| refused | 429 or 503: another replica was tried |
| lost | no connection, or none any more before the answer began: another replica was tried |
| broken | the replica was lost in the middle of an answer |
| late | not a byte came for --answer-timeout seconds |
| cancelled | the client went, or the router ended |

A prompt that is sent to a prefill replica first is counted there, in router_prefills, as sent,
computed (it runs where it is decoded, because nothing came there), refused, late, lost or failed.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily


class Counted(Protocol):
    """What is known of a replica."""

    url: str
    in_flight: int
    is_ready: bool


class Those(Protocol):
    """Replicas come and go, so they are counted at each scrape."""

    all: Sequence[Counted]


class ByReplica:
    """What a registry shows of the replicas that there are now."""

    def __init__(self, replicas: Those):
        self.replicas = replicas

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """As prometheus_client asks for it."""
        in_flight = GaugeMetricFamily(
            "router_requests_in_flight", "Requests sent to a replica that have not ended.",
            labels=["replica"],
        )  # fmt: skip
        ready = GaugeMetricFamily(
            "router_replica_ready", "1 while it takes requests.", labels=["replica"]
        )
        for replica in self.replicas.all:
            in_flight.add_metric([replica.url], replica.in_flight)
            ready.add_metric([replica.url], replica.is_ready)
        yield in_flight
        yield ready


class Metrics:
    """A registry of its own, so that a process may have several."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "router_requests", "Requests sent to a replica, by what became of them.",
            ["replica", "outcome"], registry=self.registry,
        )  # fmt: skip
        self.with_prefix = Counter(
            "router_prefix_requests", "Requests that have a prompt.", registry=self.registry
        )
        self.hits = Counter(
            "router_prefix_hits",
            "Of these, sent first to the replica where the prefix is at home.",
            registry=self.registry,
        )
        self.prefills = Counter(
            "router_prefills", "Prompts sent to a prefill replica, by what became of them.",
            ["replica", "outcome"], registry=self.registry,
        )  # fmt: skip
        self.unserved = Counter(
            "router_unserved", "Requests that no replica took.", registry=self.registry
        )

    def watch(self, replicas: Those) -> None:
        """Show the replicas as they are at a scrape."""
        self.registry.register(ByReplica(replicas))

    def count_prefix(self, is_home: bool | None) -> None:
        """Count a request. is_home: whether its replica is its prefix's; None: it has no prefix."""
        if is_home is not None:
            self.with_prefix.inc()
            self.hits.inc(is_home)
