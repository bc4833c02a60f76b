"""What an engine counts, under vLLM's names, for monitoring (/metrics): totals since it
began, and what the last step added to the histograms.

Source: vLLM, vllm/v1/metrics/stats.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lessons.l13_prefix_caching.cache import CachingBlockManager
from reference.engine.engine import Engine
from reference.engine.request import EngineRequest

if TYPE_CHECKING:
    from reference.features.states.snapshots import SnapshotCounts


@dataclass(frozen=True)
class EngineStats:
    """The engine between two steps. num_waiting: those that were preempted, too. kv_cache_usage:
    the share of blocks that a sequence owns, 0 to 1. blocks_by_group: of an engine whose layers are
    in groups, {"full" or "window 1024": blocks of such groups that a sequence owns}. All that
    follow are totals since the engine began; blocks_given_back: that were behind a window;
    prefix_cache_*: tokens of prompts; external_*: those that the pool did not know, and that came
    from host memory or files; num_refused: turned away by admission; num_timeouts: dropped because
    their time was over; num_aborted: their reader had gone; snapshots: of states, None where none
    are kept; expert_imbalance: where replicas share experts, pairs of a token and an expert of the
    busiest rank over the mean of the ranks.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    blocks_by_group: dict[str, int] = field(default_factory=dict)
    blocks_given_back: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_refused: int = 0
    num_timeouts: int = 0
    num_aborted: int = 0
    snapshots: "SnapshotCounts | None" = None
    expert_imbalance: float | None = None


@dataclass(frozen=True)
class FinishedRequestStats:
    """A request that has ended, in seconds and tokens. finish_reason: of its first answer."""

    finish_reason: str
    e2e_latency_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int | None
    n: int

    @property
    def inference_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def time_per_output_token_s(self) -> float:
        """Between its tokens on average; 0 if there was one only."""
        return self.decode_s / max(1, self.num_generation_tokens - 1)


@dataclass
class IterationStats:
    """What one step added. time_to_first_tokens_s: of the requests whose first token came;
    inter_token_latencies_s: of the others, one for each step in which they got tokens.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens_s: list[float] = field(default_factory=list)
    inter_token_latencies_s: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)


@dataclass
class Seen:
    """How far a request had come when it was looked at last."""

    tokens: int = 0
    preemptions: int = 0
    last_token: float | None = None


class StatsCounter:
    """Counts from the requests that got a token, in the thread that runs the engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.seen: dict[str, Seen] = {}
        self.totals = dict.fromkeys(
            (
                "num_preemptions",
                "prefix_cache_queries",
                "prefix_cache_hits",
                "prompt_tokens",
                "generation_tokens",
                "num_refused",
                "num_timeouts",
                "num_aborted",
            ),
            0,
        )
        # Each is called with an IterationStats after each step, in the engine's thread.
        self.observers: list[Callable[[IterationStats], None]] = []

    def stats(self) -> EngineStats:
        """From any thread: it reads numbers only, and may see the middle of a step."""
        schedulers = [engine.scheduler for engine in self.engine.engines]
        free = sum(scheduler.blocks.num_free for scheduler in schedulers)
        used = 1 - free / sum(scheduler.blocks.num_blocks for scheduler in schedulers)
        running = sum(len(scheduler.running) for scheduler in schedulers)
        waiting = sum(len(scheduler.waiting) for scheduler in schedulers)
        far = dict(
            external_prefix_cache_queries=sum(scheduler.host.asked for scheduler in schedulers),
            external_prefix_cache_hits=sum(scheduler.host.found for scheduler in schedulers),
        )
        by_group: dict[str, int] = {}
        given_back = 0
        for scheduler in schedulers:
            if (owned := getattr(scheduler.blocks, "owned_by_kind", None)) is not None:
                by_group = {kind: by_group.get(kind, 0) + n for kind, n in owned.items()}
                given_back += scheduler.blocks.given_back
        far |= dict(blocks_by_group=by_group, blocks_given_back=given_back)
        far |= dict(expert_imbalance=getattr(self.engine, "expert_imbalance", None))
        snapshots = getattr(schedulers[0].blocks, "snapshots", None)
        counts = None if snapshots is None else replace(snapshots.counts)
        return EngineStats(running, waiting, used, **far, **self.totals, snapshots=counts)

    def count(self, touched: list[EngineRequest]) -> IterationStats:
        """Count a step, and tell the observers. touched: who got a token in it."""
        step = IterationStats()
        for request in touched:
            self._count_one(request, step)
        self.totals["prompt_tokens"] += step.num_prompt_tokens
        self.totals["generation_tokens"] += step.num_generation_tokens
        self._tell(step)
        return step

    def left(self, request: EngineRequest, why: str) -> None:
        """A request was ended before its answer was whole. why: "num_timeouts" or "num_aborted"."""
        seen = self.seen.pop(request.request_id, Seen())
        self.totals["num_preemptions"] += preempted(request) - seen.preemptions
        self.totals[why] += 1
        self._tell(IterationStats(finished_requests=[finished_stats(request, time.monotonic())]))

    def _tell(self, step: IterationStats) -> None:
        for observe in self.observers:
            observe(step)

    def _count_one(self, request: EngineRequest, step: IterationStats) -> None:
        seen = self.seen.setdefault(request.request_id, Seen())
        metrics, tokens = request.metrics, generated(request)
        prompt_tokens = len(request.prompt_token_ids)
        preemptions = preempted(request)
        if seen.last_token is None:
            step.num_prompt_tokens += prompt_tokens
            step.time_to_first_tokens_s.append(metrics.first_token - metrics.arrival)
            if isinstance(self.engine.engines[0].scheduler.blocks, CachingBlockManager):
                self.totals["prefix_cache_queries"] += prompt_tokens
                self.totals["prefix_cache_hits"] += request.num_cached_tokens
        else:
            step.inter_token_latencies_s.append(metrics.last_token - seen.last_token)
        step.num_generation_tokens += tokens - seen.tokens
        self.totals["num_preemptions"] += preemptions - seen.preemptions
        if request.finished:
            step.finished_requests.append(finished_stats(request, metrics.last_token))
            del self.seen[request.request_id]
        else:
            self.seen[request.request_id] = Seen(tokens, preemptions, metrics.last_token)


def generated(request: EngineRequest) -> int:
    """Tokens of all its answers so far."""
    return sum(len(sequence.output) for sequence in request.sequences)


def preempted(request: EngineRequest) -> int:
    """How often its answers had to give back their blocks."""
    return sum(sequence.preemptions for sequence in request.sequences)


def finished_stats(request: EngineRequest, end_s: float) -> FinishedRequestStats:
    """Where the time of a request went that ended at end_s. What it did not reach took no time."""
    metrics = request.metrics
    scheduled = end_s if metrics.first_scheduled is None else metrics.first_scheduled
    first = end_s if metrics.first_token is None else metrics.first_token
    return FinishedRequestStats(
        request.sequences[0].finish_reason,
        e2e_latency_s=end_s - metrics.arrival,
        queued_s=scheduled - metrics.arrival,
        prefill_s=first - scheduled,
        decode_s=end_s - first,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generation_tokens=generated(request),
        max_tokens=request.params.max_tokens,
        n=request.params.n,
    )
