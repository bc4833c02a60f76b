"""/metrics: vLLM's names, readable by Prometheus' own parser, and numbers that add up."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.live import ask

NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_n",
    "vllm:request_params_max_tokens",
}  # fmt: skip


def scrape(live) -> dict[tuple, float]:
    """{(name, what follows from its labels): value}."""
    text = httpx.get(f"{live.url}/metrics", timeout=60).text
    families = list(text_string_to_metric_families(text))
    assert {family.name for family in families} >= NAMES
    return {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("status")
         or sample.labels.get("le")): sample.value
        for family in families for sample in family.samples
        if sample.labels.get("handler", "/v1/completions") == "/v1/completions"
    }  # fmt: skip


def test_numbers_add_up(live):
    before = scrape(live)
    body = dict(prompt="def quicksort(", max_tokens=7, temperature=0, ignore_eos=True)
    live.post("/v1/completions", body | dict(prompt=["import numpy as n", "import numpy as np\n"]))
    live.post("/v1/completions", body | dict(max_tokens=-1))
    after = scrape(live)

    def gained(name: str, label: str | None = None) -> float:
        return after[name, label] - before.get((name, label), 0)

    assert gained("vllm:generation_tokens_total") == 14
    assert gained("vllm:request_success_total", "length") == 2
    assert gained("vllm:time_to_first_token_seconds_count") == 2
    assert gained("vllm:inter_token_latency_seconds_count") == 12
    assert gained("vllm:e2e_request_latency_seconds_count") == 2
    assert gained("vllm:prompt_tokens_total") == gained("vllm:prefix_cache_queries_total") > 8
    assert gained("http_requests_total", "200") == gained("http_requests_total", "400") == 1
    assert after["vllm:num_requests_running", None] == after["vllm:kv_cache_usage_perc", None] == 0


def test_labels_of_paths_are_few(running):
    for path in ("/a", "/b", "/v1/models/x"):
        ask(running.service, "GET", path)
    text = httpx.get(f"{running.url}/metrics", timeout=60).text
    assert 'handler="/a"' not in text and 'handler="/v1/models/x"' not in text


def test_a_dead_engine_is_not_healthy(running, monkeypatch):
    assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
    assert httpx.get(f"{running.url}/ready", timeout=60).status_code == 200
    monkeypatch.setattr(running.service.engine, "failure", RuntimeError("no memory"))
    assert httpx.get(f"{running.url}/health", timeout=60).status_code == 503
    assert httpx.get(f"{running.url}/ready", timeout=60).status_code == 503
