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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from reference.router.blocks import Blocks
from reference.router.policies import Prompt


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


class ByBlocks:
    """What a registry shows of the blocks that the policy kv knows of."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """As prometheus_client asks for it."""
        entries = GaugeMetricFamily(
            "router_kv_index_blocks", "Blocks that a replica is known to hold.", labels=["replica"]
        )
        fresh = GaugeMetricFamily(
            "router_kv_events_fresh", "1 while its block events come.", labels=["replica"]
        )
        resyncs = CounterMetricFamily(
            "router_kv_resyncs", "Whole states asked for because of a gap.", labels=["replica"]
        )
        for url, stream in self.blocks.streams.items():
            entries.add_metric([url], len(self.blocks.index.keys.get(url, ())))
            fresh.add_metric([url], stream.is_fresh)
            resyncs.add_metric([url], self.blocks.resyncs.get(url, 0))
        forgotten = CounterMetricFamily(
            "router_kv_forgotten_blocks", "Entries that --index-blocks had no room for."
        )
        forgotten.add_metric([], self.blocks.index.forgotten)
        yield from (entries, fresh, resyncs, forgotten)


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

        self.kv_requests = Counter(
            "router_kv_requests",
            "Requests with a prompt under the policy kv. known: its tokens were known, and a "
            "replica was known to hold some; cold: none was; unknown: tokens or events were not.",
            ["prompt"], registry=self.registry,
        )  # fmt: skip
        self.kv_prompt_blocks = Counter(
            "router_kv_prompt_blocks", "Whole blocks of prompts.", registry=self.registry
        )
        self.kv_cached_blocks = Counter(
            "router_kv_cached_blocks",
            "Of these, held by the replica that was chosen, by its fastest tier.",
            ["medium"], registry=self.registry,
        )  # fmt: skip

    def watch(self, replicas: Those, blocks: Blocks | None = None) -> None:
        """Show the replicas as they are at a scrape, and what is known of their blocks."""
        self.registry.register(ByReplica(replicas))
        if blocks is not None:
            self.registry.register(ByBlocks(blocks))

    def count_blocks(self, blocks: Blocks | None, prompt: Prompt, url: str) -> None:
        """Count a request under the policy kv. url: of the replica that was chosen."""
        if blocks is None or prompt.prefix is None:
            return
        if prompt.tokens is None or not blocks.block_size:
            self.kv_requests.labels("unknown").inc()
            return
        found = blocks.mediums(url, prompt)
        is_known = found or any(blocks.mediums(other, prompt) for other in blocks.streams)
        self.kv_requests.labels("known" if is_known else "cold").inc()
        self.kv_prompt_blocks.inc(len(prompt.keys(blocks.block_size)))
        for medium in found:
            self.kv_cached_blocks.labels(medium).inc()

    def count_prefix(self, is_home: bool | None) -> None:
        """Count a request. is_home: whether its replica is its prefix's; None: it has no prefix."""
        if is_home is not None:
            self.with_prefix.inc()
            self.hits.inc(is_home)
