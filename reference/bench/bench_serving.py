"""Load a server that speaks OpenAI's API, and say what it does, in the lines of `vllm bench serve`.

    python -m reference.bench.bench_serving --base-url http://127.0.0.1:8000 --model models/tiny \\
        --dataset-name random --request-rate 4 --num-prompts 100 --goodput ttft:200 tpot:50
    python -m reference.bench.bench_serving --engine --model models/tiny \\
        --sweep-max-concurrency 1 8 64

Flags and lines have vLLM's names. Three things differ. TTFT and E2EL count from when a request was
meant to be sent. A failed request counts in goodput, as one that missed it. And --engine sends the
same requests to an engine in this process, without a server between.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command

OUT = Path("build/bench")
PATIENCE_S = 0.2  # between two looks whether the server is there


def parser() -> OneLineParser:
    """The command line."""
    p = OneLineParser(
        "python -m reference.bench.bench_serving",
        description=__doc__.split("\n\n")[0],
        epilog=(
            "Times are in milliseconds in what is printed, and counted from the intended arrival."
        ),
    )
    p.add_argument("--base-url", default=None, help="default: http://HOST:PORT")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--backend", default="openai", choices=("openai", "vllm", "openai-chat"))
    p.add_argument("--endpoint", default=None, help="default: the backend's own path")
    p.add_argument("--api-key", default=None, help="sent as a bearer token")
    p.add_argument("--model", default="models/tiny", help="as the server names it")
    p.add_argument("--tokenizer", default=None, help="default: --model")
    p.add_argument("--engine", action="store_true", help="an engine here, no server")
    p.add_argument("--engine-args", default="{}", help="JSON, for --engine: its EngineArgs")
    data = p.add_argument_group("what is sent")
    names = ("sharegpt", "random", "synthetic")
    data.add_argument("--dataset-name", default="random", choices=names)
    data.add_argument("--dataset-path", default=None, help="a ShareGPT file")
    data.add_argument("--sharegpt-output-len", type=int, default=None)
    data.add_argument("--random-input-len", type=int, default=128)
    data.add_argument("--random-output-len", type=int, default=32, help="also of synthetic, a mean")
    data.add_argument("--random-range-ratio", type=float, default=0.0)
    data.add_argument("--random-prefix-len", type=int, default=0)
    data.add_argument("--num-prompts", type=int, default=100)
    data.add_argument("--ignore-eos", action="store_true")
    data.add_argument("--temperature", type=float, default=0.0)
    data.add_argument("--extra-body", type=json.loads, default={}, help="JSON, added to requests")
    data.add_argument("--seed", type=int, default=0)
    load = p.add_argument_group("when")
    load.add_argument("--request-rate", type=float, default=math.inf, help="requests/s")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts")
    load.add_argument("--max-concurrency", type=int, default=None)
    load.add_argument("--sweep-request-rate", type=float, nargs="+", default=None)
    load.add_argument("--sweep-max-concurrency", type=int, nargs="+", default=None)
    load.add_argument("--num-warmups", type=int, default=0)
    load.add_argument("--request-timeout-sec", type=float, default=600.0)
    load.add_argument("--ready-check-timeout-sec", type=float, default=60.0, help="0: no check")
    said = p.add_argument_group("what is said")
    said.add_argument("--goodput", nargs="+", default=None, help="ttft:MS tpot:MS e2el:MS")
    said.add_argument("--percentile-metrics", default="ttft,tpot,itl")
    said.add_argument("--metric-percentiles", default="50,90,99")
    said.add_argument("--price-per-hour", type=float, default=None, help="dollars, of the machine")
    said.add_argument("--save-result", action="store_true", help="a record, and figures")
    said.add_argument("--save-detailed", action="store_true", help="each request's times too")
    said.add_argument("--result-dir", type=Path, default=OUT)
    said.add_argument("--result-filename", default="serving.json")
    return p


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that cannot work."""
    from lessons.toolbox.model.arguments import check_positive, check_whole, refuse

    counts = ["num_prompts", "random_input_len", "random_output_len"]
    check_whole(**{flag(name): getattr(args, name) for name in counts})
    for name in ("num_warmups", "random_prefix_len"):
        check_whole(low=0, **{flag(name): getattr(args, name)})
    for name in ("max_concurrency", "sharegpt_output_len"):
        if getattr(args, name) is not None:
            check_whole(**{flag(name): getattr(args, name)})
    for rate in [args.request_rate, *(args.sweep_request_rate or ())]:
        if rate != math.inf:
            check_positive(**{"--request-rate": rate})
    for count in args.sweep_max_concurrency or ():
        check_whole(**{"--sweep-max-concurrency": count})
    if args.dataset_name == "sharegpt" and args.dataset_path is None:
        refuse("--dataset-path", None, "a ShareGPT file, which --dataset-name sharegpt needs")
    check_positive(**{"--burstiness": args.burstiness})
    check_positive(**{"--request-timeout-sec": args.request_timeout_sec})
    if args.price_per_hour is not None:
        check_positive(**{"--price-per-hour": args.price_per_hour})
    if not 0 <= args.random_range_ratio < 1:
        refuse("--random-range-ratio", args.random_range_ratio, "0 or more, below 1")
    if args.sweep_request_rate and args.sweep_max_concurrency:
        refuse("--sweep-max-concurrency", args.sweep_max_concurrency, "one sweep at a time")
    if not isinstance(args.extra_body, dict):
        refuse("--extra-body", args.extra_body, "a JSON object")
    if args.save_result:
        check_writable(args.result_dir)


def flag(name: str) -> str:
    """An argument's name as it is typed."""
    return "--" + name.replace("_", "-")


def setting_of(args: argparse.Namespace):
    """The Setting of bench_report. Raises ValueError."""
    from lessons.toolbox.model.arguments import refuse
    from reference.bench.bench_report import METRICS, Setting, parse_goodput

    metrics = tuple(args.percentile_metrics.split(","))
    if not set(metrics) <= set(METRICS):
        refuse("--percentile-metrics", args.percentile_metrics, ", ".join(METRICS))
    try:
        percentiles = tuple(float(percent) for percent in args.metric_percentiles.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= percent <= 100 for percent in percentiles):
        refuse("--metric-percentiles", args.metric_percentiles, "numbers from 0 to 100, as 50,99")
    rate = None if args.request_rate == math.inf else args.request_rate
    return Setting(
        rate,
        args.burstiness,
        args.max_concurrency,
        parse_goodput(args.goodput),
        percentiles,
        metrics,
        args.price_per_hour,
    )


def requests_of(args: argparse.Namespace, seed: int) -> list:
    """What is sent. Another seed gives other prompts, because a prefix cache knows the last
    ones.
    """
    from reference.bench import bench_data
    from reference.engine.model import load_tokenizer

    if args.dataset_name == "synthetic":
        return bench_data.synthetic_requests(args.num_prompts, seed, args.random_output_len)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    if args.dataset_name == "sharegpt":
        file, length = args.dataset_path, args.sharegpt_output_len
        return bench_data.sharegpt_requests(file, args.num_prompts, seed, tokenizer, length)
    requests = bench_data.random_requests(
        args.num_prompts,
        seed,
        tokenizer,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        args.random_prefix_len,
    )
    return bench_data.as_text(requests, tokenizer) if args.backend == "openai-chat" else requests


@asynccontextmanager
async def backend_of(args: argparse.Namespace):
    """Who is asked: a server, or an engine here."""
    from reference.bench import bench_load

    if args.engine:
        from reference.engine.async_engine import AsyncEngineArgs, AsyncLLMEngine

        try:
            wishes = json.loads(args.engine_args)
            engine_args = AsyncEngineArgs.read(**{"model": args.model} | wishes)
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"--engine-args: {error}; accepted: a JSON object") from None
        engine = AsyncLLMEngine.from_engine_args(engine_args)
        try:
            yield bench_load.InProcess(engine, args.ignore_eos, args.temperature)
        finally:
            engine.shutdown()
        return
    kind = bench_load.OpenAIChat if args.backend == "openai-chat" else bench_load.OpenAI
    body = {"temperature": args.temperature} | args.extra_body
    if args.ignore_eos:
        body["ignore_eos"] = True
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    async with bench_load.new_client(base_url, args.api_key) as client:
        backend = kind(client, args.model, **body)
        backend.path = args.endpoint or kind.path
        yield backend


async def measure(args: argparse.Namespace, settings: list, say=print) -> list[dict]:
    """A record of each setting, measured one after the other."""
    from reference.bench import bench_load, bench_report

    records = []
    async with backend_of(args) as backend:
        if args.ready_check_timeout_sec and not args.engine:
            await wait_until_ready(args, backend)
        if args.num_warmups:
            warmups = requests_of(args, args.seed - 1)[: args.num_warmups]
            await bench_load.run_load(warmups, None, backend, args.max_concurrency)
        for index, setting in enumerate(settings):
            seed = args.seed + index
            requests = requests_of(args, seed)
            arrivals = bench_load.arrivals_of(
                setting.request_rate, setting.burstiness, len(requests), seed
            )
            concurrency, timeout_s = setting.max_concurrency, args.request_timeout_sec
            run = await bench_load.run_load(requests, arrivals, backend, concurrency, timeout_s)
            record = bench_report.summarize(run, setting)
            if args.save_detailed:
                record |= bench_report.details(run)
            records.append(record)
            for line in bench_report.report(record, setting):
                say(line)
    return records


async def wait_until_ready(args: argparse.Namespace, backend) -> None:
    """Send one request until it is answered. Raises ValueError with the last failure."""
    from reference.bench.bench_load import Failed, Stream

    give_up = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            return await backend.send(requests_of(args, args.seed - 2)[0], Stream())
        except Failed as failure:
            is_refused = str(failure).startswith("HTTP 4")
            if is_refused or time.monotonic() > give_up:
                raise ValueError(f"--base-url: no answer to a first request ({failure})") from None
            await asyncio.sleep(PATIENCE_S)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = parser().parse_args(argv)
    return run_command("bench_serving", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure, print, save. Exit code 1 if no request at all was answered."""
    from dataclasses import replace

    check(args)
    setting = setting_of(args)
    settings = [setting]
    if args.sweep_request_rate:
        settings = [replace(setting, request_rate=rate) for rate in sorted(args.sweep_request_rate)]
    elif args.sweep_max_concurrency:
        counts = sorted(args.sweep_max_concurrency)
        settings = [replace(setting, max_concurrency=count) for count in counts]
    points = asyncio.run(measure(args, settings))
    if len(points) > 1:
        from reference.bench.bench_report import summary_of_sweep

        print("\n".join(summary_of_sweep(points)))
    if args.save_result:
        from reference.bench.bench_report import save_record

        for path in save_record(args, points):
            print(path)
    return 0 if any(point["completed"] for point in points) else 1


if __name__ == "__main__":
    sys.exit(main())
