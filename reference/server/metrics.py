"""/metrics: vLLM's names, so that its dashboards and alerts fit.

Source of names and buckets: vLLM, docs/usage/metrics.md and vllm/v1/metrics/loggers.py. Times are
seconds, as a client waits for them: from the request's arrival at the server.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from reference.engine.async_engine import AsyncLLMEngine
from reference.engine.process.client import AsyncProcessEngine
from reference.engine.stats import EngineStats, IterationStats

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
          10.0,
          20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
         20.0,
         40.0, 80.0)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
             120.0,
             240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
LABELS = ["model_name", "engine"]


def tokens_up_to(most: int) -> list[int]:
    """Bounds 1, 2, 5, 10, 20, 50 … up to `most`."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most]


class Metrics:
    """The measurements of a server. A registry of its own, so that a process may have many."""

    def __init__(self, engine: AsyncLLMEngine | AsyncProcessEngine, model_name: str):
        self.registry = CollectorRegistry()
        self.labels = [model_name, "0"]
        self.requests = Counter(
            "http_requests", "Requests by path and status.", ["handler", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.successes = Counter(
            "vllm:request_success", "Count of successfully processed requests.",
            [*LABELS, "finished_reason"], registry=self.registry,
        )  # fmt: skip
        new = self.histogram
        self.first_token = new("time_to_first_token_seconds", "Time to first token.", TTFT_S)
        self.between_tokens = new("inter_token_latency_seconds", "Time between tokens.", ITL_S)
        self.per_token = new(
            "request_time_per_output_token_seconds", "A request's mean time per token.", ITL_S
        )
        self.whole = new("e2e_request_latency_seconds", "Time of a whole request.", REQUEST_S)
        self.queue = new("request_queue_time_seconds", "Time in the WAITING phase.", REQUEST_S)
        self.prefill = new("request_prefill_time_seconds", "Time in the PREFILL phase.", REQUEST_S)
        self.inference = new("request_inference_time_seconds", "Time in RUNNING phase.", REQUEST_S)
        self.decode = new("request_decode_time_seconds", "Time in the DECODE phase.", REQUEST_S)
        tokens = tokens_up_to(engine.info.max_model_len)
        self.prompt_tokens = new("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.new_tokens = new("request_generation_tokens", "Tokens of a request's answer.", tokens)
        self.n = new("request_params_n", "The n that was asked for.", (1, 2, 5, 10, 20))
        self.max_tokens = new("request_params_max_tokens", "The max_tokens asked for.", tokens)
        engine.observers.append(self.observe)
        self.registry.register(EngineCollector(engine, self.labels))

    def histogram(self, name: str, what: str, bounds) -> Histogram:
        """A histogram of the model's. bounds: of its buckets."""
        found = Histogram(f"vllm:{name}", what, LABELS, buckets=bounds, registry=self.registry)
        return found.labels(*self.labels)

    def observe(self, step: IterationStats) -> None:
        """What a step of the engine added. It is called in the engine's thread, or in
        the one that hears of it."""
        for seconds in step.time_to_first_tokens_s:
            self.first_token.observe(seconds)
        for seconds in step.inter_token_latencies_s:
            self.between_tokens.observe(seconds)
        for request in step.finished_requests:
            self.successes.labels(*self.labels, request.finish_reason).inc()
            self.whole.observe(request.e2e_latency_s)
            self.queue.observe(request.queued_s)
            self.prefill.observe(request.prefill_s)
            self.decode.observe(request.decode_s)
            self.inference.observe(request.inference_s)
            self.per_token.observe(request.time_per_output_token_s)
            self.prompt_tokens.observe(request.num_prompt_tokens)
            self.new_tokens.observe(request.num_generation_tokens)
            self.n.observe(request.n)
            if request.max_tokens is not None:
                self.max_tokens.observe(request.max_tokens)


GAUGES = {
    "num_running": ("num_requests_running", "Requests in execution batches."),
    "num_waiting": ("num_requests_waiting", "Requests that wait to be processed."),
    "kv_cache_usage": ("kv_cache_usage_perc", "KV cache usage. 1 means 100 percent."),
}
COUNTERS = {
    "num_preemptions": ("num_preemptions", "Preemptions so far."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked for in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the cache."),
    "external_prefix_cache_queries": (
        "external_prefix_cache_queries",
        "Prompt tokens looked for in host memory and files.",
    ),
    "external_prefix_cache_hits": (
        "external_prefix_cache_hits",
        "Prompt tokens that came from there.",
    ),
    "prompt_tokens": ("prompt_tokens", "Prefill tokens processed."),
    "generation_tokens": ("generation_tokens", "Generation tokens processed."),
}


class EngineCollector:
    """What the engine counts itself, asked for at a scrape."""

    def __init__(self, engine: AsyncLLMEngine | AsyncProcessEngine, labels: list[str]):
        self.engine = engine
        self.labels = labels

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        stats = self.engine.stats()
        for table, family in (
            (GAUGES, GaugeMetricFamily),
            (COUNTERS, CounterMetricFamily),
        ):
            for key, (name, what) in table.items():
                metric = family(f"vllm:{name}", what, labels=LABELS)
                metric.add_metric(self.labels, getattr(stats, key, 0))
                yield metric
        if stats.blocks_by_group:
            yield from self.by_group(stats)
        if stats.expert_imbalance is not None:
            what = "Load of the busiest rank of experts over the mean of the ranks."
            even = GaugeMetricFamily("engine_expert_imbalance", what, labels=LABELS)
            even.add_metric(self.labels, stats.expert_imbalance)
            yield even

    def by_group(self, stats: EngineStats) -> Iterator[Metric]:
        """Of an engine whose layers are in groups. vLLM has no such metric."""
        what = "Blocks that a sequence owns, by how far back their layers look."
        owned = GaugeMetricFamily("engine_kv_cache_blocks", what, labels=[*LABELS, "group"])
        for group, count in stats.blocks_by_group.items():
            owned.add_metric([*self.labels, group], count)
        yield owned
        what = "Blocks that were behind a window."
        back = CounterMetricFamily("engine_kv_cache_blocks_given_back", what, labels=LABELS)
        back.add_metric(self.labels, stats.blocks_given_back)
        yield back


class Counted:
    """ASGI middleware that counts answers by path and status. paths: that are served."""

    def __init__(self, app, metrics: Metrics, paths: set[str]):
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on, and note its status."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)
