"""The load client says what is true: against servers of known delays, on a clock that jumps."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from lessons.l22_serving.load import Objectives, gamma_arrivals
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from reference.bench import bench_data, bench_figures, bench_report, bench_serving
from reference.bench.bench_load import (
    BenchRequest,
    LoadRun,
    OpenAI,
    OpenAIChat,
    new_client,
    run_load,
)
from reference.bench.bench_report import Setting, parse_goodput, report, summarize
from tests.virtual_time import run_virtual


class Delays(httpx.AsyncByteStream):
    """Server-sent events, each at its time. answers: (seconds to wait, an event or a line)."""

    def __init__(self, events):
        self.events = events

    async def __aiter__(self):
        for seconds, event in self.events:
            await asyncio.sleep(seconds)
            yield (event if isinstance(event, bytes) else sse(event))


def sse(event) -> bytes:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


class FakeServer:
    """Answers {"prompt": "FIRST GAP COUNT"}: its first token after FIRST seconds, then one every
    GAP, COUNT in all. places: how many at once; the others wait.
    """

    def __init__(self, places: int = 10**6, stall: tuple[float, float] = (0, 0)):
        self.places, self.stall = asyncio.Semaphore(places), stall
        self.bodies = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append((request, body))
        return self.ok(body)

    def ok(self, body) -> httpx.Response:
        text = body.get("prompt") or body["messages"][0]["content"]
        return httpx.Response(
            200, stream=Answer(self, *map(float, text.split()), "messages" in body)
        )


class Answer(httpx.AsyncByteStream):
    def __init__(self, server, first, gap, count, is_chat):
        self.server, self.first, self.gap, self.count = server, first, gap, int(count)
        self.is_chat = is_chat

    def choice(self):
        return {"delta": {"content": "x"}} if self.is_chat else {"text": "x"}

    async def __aiter__(self):
        async with self.server.places:
            begin, end = self.server.stall
            now = asyncio.get_running_loop().time()
            if begin <= now < end:
                await asyncio.sleep(end - now)
            if self.is_chat:  # the role comes first, and is no token
                yield sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for index in range(self.count):
                await asyncio.sleep(self.gap if index else self.first)
                yield sse({"choices": [self.choice()]})
            usage = {"prompt_tokens": 7, "completion_tokens": self.count}
            yield sse({"choices": [], "usage": usage})
            yield sse("[DONE]")


def load(requests, arrivals=None, concurrency=None, kind=OpenAI, server=None, timeout_s=600.0):
    """Run requests, given as texts, against a fake server. All of them ask for 1000 tokens."""

    async def run():
        handler = server() if isinstance(server, type) else (server or FakeServer())
        async with new_client("http://fake", transport=httpx.MockTransport(handler)) as client:
            asked = [BenchRequest(text, 0, 1000) for text in requests]
            return await run_load(asked, arrivals, kind(client, "m"), concurrency, timeout_s)

    return run_virtual(run())


def lines_of(run: LoadRun, **setting) -> dict[str, str]:
    """{name of a line: its value} of what is printed."""
    setting = Setting(**setting)
    printed = report(summarize(run, setting), setting)
    pairs = (text.rpartition(":") for text in printed)
    return {name.strip(): value.strip() for name, _, value in pairs if name}


@pytest.mark.parametrize("kind", [OpenAI, OpenAIChat])
def test_the_printed_numbers_are_the_servers(kind):
    """Three requests at once: 4 tokens after 0.5 s and every 0.1 s, 2 after 1 s and 2 s, and
    one.
    """
    run = load(["0.5 0.1 4", "1 2 2", "0.2 9 1"], kind=kind)
    got = lines_of(run, percentiles=(50, 99), metrics=("ttft", "tpot", "itl", "e2el"))
    want = {
        "Successful requests": 3,
        "Failed requests": 0,
        "Benchmark duration (s)": 3.0,
        "Total input tokens": 21,
        "Total generated tokens": 7,
        "Request throughput (req/s)": 1.0,
        "Output token throughput (tok/s)": 7 / 3,
        "Total Token throughput (tok/s)": 28 / 3,
        "Peak concurrent requests": 3,
        "Mean TTFT (ms)": 1700 / 3,
        "Median TTFT (ms)": 500,
        "P99 TTFT (ms)": 990,
        "Mean TPOT (ms)": 1050,
        "Mean ITL (ms)": 2300 / 4,
        "Median ITL (ms)": 100,
        "P99 ITL (ms)": 100 + 0.97 * 1900,
        "Mean E2EL (ms)": (800 + 3000 + 200) / 3,
        "Median E2EL (ms)": 800,
    }
    assert {name: float(got[name]) for name in want} == pytest.approx(want, abs=0.0051)


def test_time_is_the_clocks_and_not_a_sum_of_latencies():
    run = load(["1 1 2"] * 50)
    assert summarize(run, Setting())["duration"] == pytest.approx(2)
    assert summarize(run, Setting())["output_throughput"] == pytest.approx(50)


def test_the_last_to_answer_counts_too():
    """A slow one still runs when all others have long ended: the tail is what is asked about."""
    run = load(["0.1 0.1 2"] * 9 + ["30 0.1 2"], arrivals=[0.01 * i for i in range(10)])
    record = summarize(run, Setting(percentiles=(100,)))
    assert record["completed"] == 10 and record["p100_ttft_ms"] == pytest.approx(30_000)


def test_tokens_that_came_are_counted_and_not_those_asked_for():
    """A part may hold several tokens: the server's own count says how many."""

    class TwoAPart(FakeServer):
        def ok(self, body):
            events = [(0.5, {"choices": [{"text": "two tokens"}]})] * 3
            usage = {"prompt_tokens": 5, "completion_tokens": 6}
            return httpx.Response(
                200, stream=Delays([*events, (0, {"usage": usage}), (0, "[DONE]")])
            )

    record = summarize(load(["a"], server=TwoAPart), Setting())
    assert record["total_output_tokens"] == 6 and record["total_input_tokens"] == 5
    assert record["mean_tpot_ms"] == pytest.approx(1000 / 5)
    assert record["mean_itl_ms"] == pytest.approx(500)
    assert record["max_output_tokens_per_s"] == pytest.approx(4)


def test_without_usage_parts_are_counted():
    class NoUsage(FakeServer):
        def ok(self, body):
            return httpx.Response(
                200, stream=Delays([(0.1, {"choices": [{"text": "x"}]})] * 3 + [(0, "[DONE]")])
            )

    assert summarize(load(["a"], server=NoUsage), Setting())["total_output_tokens"] == 3


def test_time_counts_from_the_intended_arrival():
    """One place at the client, and a server that stalls: a request that had to wait has waited.
    Measured from the sending, one of ten would have been late.
    """
    arrivals = [0.1 * i for i in range(10)]
    run = load(["0.05 0 1"] * 10, arrivals, concurrency=1, server=FakeServer(stall=(0, 5)))
    ttfts = [served.ttft_s for served in run.history]
    assert ttfts == pytest.approx([5.05 - 0.05 * i for i in range(10)])
    assert not run.closed_loop and max(run.late_s) == pytest.approx(5.05 - 0.1)
    closed = load(["0.05 0 1"] * 10, None, concurrency=1, server=FakeServer(stall=(0, 5)))
    assert closed.closed_loop
    late = [served.ttft_s > 1 for served in closed.history]
    assert late.count(True) == 1, "a closed loop hides the wait of those that it did not send"
    assert "closed loop" in "\n".join(report(summarize(closed, Setting()), Setting()))


def test_requests_arrive_at_the_rate_and_not_one_after_the_other():
    arrivals = gamma_arrivals(50.0, 200, seed=3)
    run = load(["3 0 1"] * 200, arrivals)
    assert [served.arrival_s for served in run.history] == pytest.approx(arrivals)
    assert summarize(run, Setting())["max_concurrent_requests"] > 100
    assert max(run.late_s) < 1e-9


def test_percentiles_are_of_all_gaps_and_no_mean_of_percentiles():
    """Nine answers of 2 steady gaps, and one of 200 slow ones: most gaps are slow."""
    run = load(["0.1 0.01 3"] * 9 + ["0.1 1 201"])
    record = summarize(run, Setting(percentiles=(50,)))
    assert record["p50_itl_ms"] == record["median_itl_ms"] == pytest.approx(1000)
    assert record["median_tpot_ms"] == pytest.approx(10)


@pytest.mark.parametrize(
    "answer, why",
    [
        (lambda: httpx.Response(429, text='{"error": "busy\nnow"}'), "HTTP 429"),
        (lambda: httpx.Response(200, stream=Delays([(0, {"error": "no memory"})])), "no memory"),
        (
            lambda: httpx.Response(200, stream=Delays([(0, {"choices": [{"text": "x"}]})])),
            "before [DONE]",
        ),
        (lambda: httpx.Response(200, stream=Delays([(0, b"data: {nonsense\n\n")])), "JSONDecode"),
        (lambda: httpx.Response(200, stream=Delays([(0, "[DONE]")])), "without tokens"),
        (lambda: httpx.Response(200, stream=Delays([(99, "[DONE]")])), "within 9 s"),
    ],
)
def test_failures_are_counted_and_named(answer, why):
    """They are no answers, their tokens no throughput, and goodput counts them as missed."""

    class HalfBroken(FakeServer):
        def ok(self, body):
            return answer() if body["prompt"] == "broken" else super().ok(body)

    run = load(["0.1 0.1 2", "broken"], server=HalfBroken, timeout_s=9)
    setting = Setting(objectives=Objectives(ttft_s=1))
    record = summarize(run, setting)
    assert (record["completed"], record["failed"]) == (1, 1) and record["total_output_tokens"] == 2
    (said,) = record["failures"]
    assert why in said and "\n" not in said
    assert record["slo_attainment"] == 0.5
    assert any(said in text for text in report(record, setting))


def test_a_run_in_which_all_fail_is_reported():
    run = load(["x"] * 2, server=lambda request: httpx.Response(500, text="no"))
    got = lines_of(run, objectives=Objectives(ttft_s=1), price_per_hour=1.0)
    assert got["Request goodput (req/s)"] == "0.00" and got["Mean TTFT (ms)"] == "none"
    assert got["Successful requests"] == "0"


def test_goodput_and_cost():
    run = load(["0.1 0.1 11", "2 0.1 11", "0.1 0.5 11", "0.1 0.1 11"])
    record = summarize(run, Setting(objectives=parse_goodput(["ttft:200", "tpot:110"])))
    assert record["slo_attainment"] == 0.5
    assert record["request_goodput"] == pytest.approx(2 / record["duration"])
    priced = summarize(run, Setting(price_per_hour=3.6))
    assert priced["cost_per_million_output_tokens"] == pytest.approx(
        1e6 * 0.001 * priced["duration"] / 44
    )


def test_what_is_sent():
    server = FakeServer()

    async def run(kind, **body):
        transport = httpx.MockTransport(server)
        async with new_client("http://fake", api_key="k", transport=transport) as client:
            await run_load([BenchRequest("0 0 1", 0, 5)], None, kind(client, "m", **body))

    run_virtual(run(OpenAI, ignore_eos=True))
    run_virtual(run(OpenAIChat))
    (text, body), (chat, chat_body) = server.bodies
    assert text.url.path == "/v1/completions" and text.headers["authorization"] == "Bearer k"
    assert body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 5
    assert body["ignore_eos"] and body["model"] == "m" and body["stream"]
    assert chat.url.path == "/v1/chat/completions" and "prompt" not in chat_body
    assert (
        chat_body["messages"][0]["content"] == "0 0 1" and chat_body["max_completion_tokens"] == 5
    )


# ---------------------------------------------------------------- what is sent, and the command


class Letters:
    """A tokenizer of letters."""

    all_special_ids = (0,)

    def __call__(self, text):
        return {"input_ids": [ord(letter) % 90 for letter in text]}

    def __len__(self):
        return 90

    def decode(self, tokens):
        return "".join(chr(33 + token) for token in tokens)


def test_conversations_of_a_sharegpt_file(tmp_path):
    def turns(*texts):
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    entries = [
        turns("hello there", "an answer"),
        turns("only one"),
        turns("abc", "too short"),
        # Fmt: skip.
        turns("p" * 1025, "too long"),
        {"id": 3},
        turns("a question", "x" * 1000),
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(entries))
    found = bench_data.sharegpt_requests(str(file), 5, 0, Letters())
    assert len(found) == 5  # two that are usable, again and again
    assert {(one.prompt, one.prompt_tokens, one.max_tokens) for one in found} == {
        ("hello there", 11, 9),
        ("a question", 10, 1000),
    }
    assert {
        one.max_tokens for one in bench_data.sharegpt_requests(str(file), 4, 1, Letters(), 6)
    } == {6}
    for wrong in ("{", "[]", "7", json.dumps([turns("one")]), "[" * 10**5):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="--dataset-path") as error:
            bench_data.sharegpt_requests(str(file), 5, 0, Letters())
        assert "\n" not in str(error.value)


def test_random_prompts_have_their_lengths():
    found = bench_data.random_requests(200, 5, Letters(), 40, 20, 0.5, prefix_len=8)
    again = bench_data.random_requests(200, 5, Letters(), 40, 20, 0.5, prefix_len=8)
    assert found == again and found != bench_data.random_requests(200, 6, Letters(), 40, 20, 0.5, 8)
    assert len({tuple(one.prompt[:8]) for one in found}) == 1
    lengths, outputs = [len(one.prompt) - 8 for one in found], [one.max_tokens for one in found]
    assert min(lengths) >= 20 and max(lengths) <= 60 and max(lengths) - min(lengths) > 30
    assert min(outputs) >= 10 and max(outputs) <= 30
    assert not any(0 in one.prompt for one in found), "a special token"
    texts = bench_data.as_text(found, Letters())
    assert all(isinstance(one.prompt, str) and one.prompt_tokens == 0 for one in texts)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--num-prompts", "0"], "--num-prompts: got 0"),
        (["--request-rate", "-1"], "--request-rate: got -1.0"),
        (["--burstiness", "0"], "--burstiness: got 0.0"),
        (["--goodput", "ttft:x"], "--goodput: got 'ttft:x'; accepted: ttft:MS"),
        (["--goodput", "itl:5"], "--goodput: got 'itl:5'"),
        (["--metric-percentiles", "50,101"], "--metric-percentiles"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics"),
        (["--max-concurrency", "0"], "--max-concurrency: got 0"),
        (["--dataset-name", "sharegpt"], "--dataset-path: got None"),
        (["--base-url", "ftp://x"], "--base-url: got 'ftp://x'; accepted: http://HOST:PORT"),
        (["--base-url", "http://127.0.0.1:9"], "--base-url: no answer to a first request"),
        (["--sweep-request-rate", "0"], "--request-rate: got 0"),
        (["--engine", "--engine-args", "[]"], "--engine-args"),
        (["--engine", "--engine-args", '{"max_num_seqs": 0}'], "max_num_seqs: got 0"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    base = ["--dataset-name", "synthetic", "--ready-check-timeout-sec", "0.01"]
    assert bench_serving.main([*base, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


class RealServer(BaseHTTPRequestHandler):
    """Two tokens at once, over a socket."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        part, usage = {"choices": [{"text": "x"}]}, {"prompt_tokens": 3, "completion_tokens": 2}
        for event in (part, part, {"choices": [], "usage": usage}, "[DONE]"):
            self.wfile.write(sse(event))

    def log_message(self, *args):
        pass


def test_the_command_sweeps_and_saves(tmp_path, capsys, monkeypatch):
    figures = {}

    def save(figure, path, *, alt):
        assert alt and not texts_outside(figure) and not overlapping_texts(figure)
        figures[path.name] = figure
        return [path]

    monkeypatch.setattr(bench_figures, "save", save)
    server = ThreadingHTTPServer(("127.0.0.1", 0), RealServer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    command = ["--base-url", url, "--dataset-name", "synthetic", "--num-prompts", "4"]
    command += ["--sweep-request-rate", "200", "100", "--goodput", "e2el:60000"]
    command += ["--price-per-hour", "2", "--save-result", "--result-dir", str(tmp_path)]
    try:
        assert bench_serving.main([*command, "--api-key", "secret", "--save-detailed"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    printed = capsys.readouterr().out
    assert "Knee (90% in time): 200 requests/s that arrive" in printed
    text = (tmp_path / "serving.json").read_text()
    record = json.loads(text)
    assert "secret" not in text and url not in text
    assert [point["request_rate"] for point in record["points"]] == [100, 200]
    assert all(point["total_output_tokens"] == 8 for point in record["points"])
    assert record["knee"] == 200 and record["cost_at_knee"] > 0
    assert set(figures) == {f"serving_{name}" for name in ("knee", "latencies", "cost")}


@pytest.mark.parametrize("shares", [(1, 0.95, 0.5), (1, 1, 1), (0.5, 0.4, 0.3)])
@pytest.mark.sample(1)
def test_figures_of_a_sweep_are_whole(shares):
    """Where the objectives end within it, beyond it, or before it."""
    run = load(["0.1 0.1 3"] * 4)
    points = []
    for rate, share in zip((1.0, 2.0, 4.0), shares):
        setting = Setting(rate, objectives=Objectives(ttft_s=1), price_per_hour=2.0)
        points.append(summarize(run, setting) | {"slo_attainment": share})
        points[-1]["request_goodput"] = share * points[-1]["request_throughput"]
    setting = dict(model="models/tiny", goodput=["ttft:1000"])
    record = dict(points=points, setting=setting, fingerprint=dict(device="a device"))
    for draw in (bench_figures.draw_knee, bench_figures.draw_latencies, bench_figures.draw_cost):
        figure = draw(record)
        assert not texts_outside(figure) and not overlapping_texts(figure), draw


def test_lines_are_vllms():
    """In the names and the order of vllm/benchmarks/serve.py."""
    run = load(["0.1 0.1 3"] * 3, arrivals=[0.0, 0.1, 0.2], concurrency=2)
    setting = Setting(1.0, 1.0, 2, Objectives(ttft_s=1), (99,), tuple(bench_report.METRICS))
    printed = report(summarize(run, setting), setting)
    names = [text.partition(":")[0].strip("=- ") for text in printed]
    want = """Serving Benchmark Result, Successful requests, Failed requests,
    Maximum request concurrency, Request rate configured (RPS), Benchmark duration (s),
    Total input tokens, Total generated tokens, Request throughput (req/s),
    Request goodput (req/s), Output token throughput (tok/s),
    Peak output token throughput (tok/s), Peak concurrent requests, Total Token throughput (tok/s),
    Time to First Token, Mean TTFT (ms), Median TTFT (ms), P99 TTFT (ms),
    Time per Output Token (excl. 1st token), Mean TPOT (ms), Median TPOT (ms), P99 TPOT (ms),
    Inter-token Latency, Mean ITL (ms), Median ITL (ms), P99 ITL (ms),
    End-to-end Latency, Mean E2EL (ms), Median E2EL (ms), P99 E2EL (ms)"""
    want = [name.strip() for name in want.replace("\n", " ").split(",")]
    want = [" ".join(name.split()) for name in want]
    assert names[: len(want)] == want
    assert printed[1] == "Successful requests:                     3"
    assert all(len(text) <= 52 for text in printed)
