"""What serving costs: the same answers from the engine alone, from the async engine, and from a server
over HTTP, all in one run. And how long a prompt stops those who decode, with chunks and without.

    python -m reference.speed_serving --out build
    python -m reference.speed_serving --base-url http://127.0.0.1:8000 --peer-url http://127.0.0.1:9000

Everybody answers the same requests once a round, and a ratio compares two of one round. Seconds are
of the clock, so nothing else should run meanwhile. Without --base-url a server is started here, in a
process of its own. --peer-url: of another server with the same model, by its chat interface, such as
`transformers serve`. Prints a table and writes speed_serving.json.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.ladder import place_of

SCHEMA = 1
READY_S = 120.0  # that a server may take until it answers
BURST_PROMPT, BURST_EVERY_S, BURSTS, DECODES = 1024, 0.5, 8, 8


def parse_args(argv) -> argparse.Namespace:
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = OneLineParser(prog="python -m reference.speed_serving", description=description)
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--base-url", default=None, help="of a running server of ours")
    parser.add_argument("--peer-url", default=None, help="of another server")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-server", action="store_true", help="only what runs in this process")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    for name in ("streams", "input_len", "output_len", "rounds"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    args.model = place_of(args.model)
    return args


# ---------------------------------------------------------------- who answers


def engine_args(args: argparse.Namespace, **more):
    """The same engine for everybody in this process."""
    from reference.async_engine import AsyncEngineArgs

    return AsyncEngineArgs.read(
        model=args.model, max_num_seqs=args.streams, enable_prefix_caching=False, **more
    )


def offline_tokens_per_s(engine, requests) -> float:
    """The engine in a loop, and nobody who reads."""
    from reference.sampling_params import SamplingParams

    begin = time.perf_counter()
    for index, one in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True)
        engine.add_request(str(index), one.prompt, params)
    while engine.has_unfinished_requests:
        engine.step()
    return sum(one.max_tokens for one in requests) / (time.perf_counter() - begin)


async def served_tokens_per_s(backend, requests) -> float:
    """All requests at once, each read to its end. Raises ValueError if one fails."""
    from lessons.l22_serving.load import tokens_per_s
    from reference.bench_load import run_load

    run = await run_load(requests, [0.0] * len(requests), backend)
    for served in run.history:
        if served.why_not:
            raise ValueError(f"a request failed: {served.why_not}")
    return tokens_per_s(run.history)


@contextmanager
def server_url(args: argparse.Namespace) -> Iterator[str]:
    """Of the server that was named, or of one that is started here and ended with the block."""
    if args.base_url:
        yield args.base_url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "reference.server", "--model", str(args.model), "--port", port]
    command += ["--max-num-seqs", str(args.streams), "--no-enable-prefix-caching"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def wait_until_ready(backend, request) -> None:
    """Ask until somebody answers. Raises ValueError after two minutes."""
    from reference.bench_load import Failed, Stream

    give_up = time.monotonic() + READY_S
    while True:
        try:
            return await backend.send(request, Stream())
        except Failed as failure:
            if time.monotonic() > give_up:
                raise ValueError(f"the server does not answer: {failure}") from None
            await asyncio.sleep(0.2)


# ---------------------------------------------------------------- rounds


async def measure_rounds(args: argparse.Namespace, url: str | None) -> list[dict[str, float]]:
    """Tokens/s of everybody, round by round."""
    from reference import bench_data
    from reference.async_engine import AsyncLLMEngine
    from reference.bench_load import InProcess, OpenAI, OpenAIChat, new_client
    from reference.llm import new_engine
    from reference.model import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    sizes = args.streams, 0, tokenizer, args.input_len, args.output_len
    requests = bench_data.random_requests(*sizes)
    alone = new_engine(engine_args(args))
    engine = AsyncLLMEngine(new_engine(engine_args(args)))
    clients = {
        name: new_client(address)
        for name, address in (("server", url), ("peer", args.peer_url))
        if address
    }
    backends = {"async engine": InProcess(engine, ignore_eos=True)}
    if "server" in clients:
        backends["server"] = OpenAI(clients["server"], args.model, temperature=0, ignore_eos=True)
    if "peer" in clients:
        backends["peer"] = OpenAIChat(clients["peer"], args.model, temperature=0)
    texts = bench_data.as_text(requests, tokenizer)
    asked = {name: texts if name == "peer" else requests for name in backends}
    rounds = []
    try:
        for name, backend in backends.items():
            await wait_until_ready(backend, asked[name][0])
        for _ in range(args.rounds):
            rounds.append({"engine alone": offline_tokens_per_s(alone, requests)})
            for name, backend in backends.items():
                rounds[-1][name] = await served_tokens_per_s(backend, asked[name])
    finally:
        engine.shutdown()
        for client in clients.values():
            await client.aclose()
    return rounds


async def measure_bursts(args: argparse.Namespace, chunked: bool) -> list[float]:
    """Inter-token latencies, in seconds, of requests that decode while long prompts come."""
    from reference import bench_data
    from reference.async_engine import AsyncLLMEngine
    from reference.bench_load import BenchRequest, InProcess, run_load
    from reference.model import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    budget = dict(max_num_batched_tokens=64 + DECODES) if chunked else {}
    engine = AsyncLLMEngine.from_engine_args(engine_args(args, **budget))
    decodes = bench_data.random_requests(DECODES, 1, tokenizer, 16, 400)
    prompts = bench_data.random_requests(BURSTS, 2, tokenizer, BURST_PROMPT, 1)
    arrivals = [0.0] * DECODES + [0.5 + BURST_EVERY_S * index for index in range(BURSTS)]
    backend = InProcess(engine, ignore_eos=True)
    try:
        await wait_until_ready(backend, BenchRequest([1] * 8, 8, 4))
        run = await run_load([*decodes, *prompts], arrivals, backend)
    finally:
        engine.shutdown()
    return [gap for served in run.history[:DECODES] for gap in served.itl_s]


# ---------------------------------------------------------------- the record


def summarize(rounds: list[dict[str, float]], bursts: dict[str, list[float]]) -> dict:
    """Medians over the rounds, the share that serving costs, and the gaps under bursts."""
    from lessons.l22_serving.load import percentile

    names = list(rounds[0])
    return {
        "rounds": rounds,
        "tokens_per_s": {name: median(one[name] for one in rounds) for name in names},
        "overhead": {
            name: median(1 - one[name] / one["engine alone"] for one in rounds)
            for name in names[1:]
        },
        "bursts": {
            name: {
                "median_itl_s": median(gaps),
                "p99_itl_s": percentile(gaps, 99),
                "p99_over_median": percentile(gaps, 99) / median(gaps),
            }
            for name, gaps in bursts.items()
        },
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported, here and there
    import torch

    from lessons.toolbox.measure.device import fingerprint
    from lessons.toolbox.measure.records import write_json

    torch.set_num_threads(1)
    check_writable(args.out)
    if args.no_server:
        rounds = asyncio.run(measure_rounds(args, None))
    else:
        with server_url(args) as url:
            rounds = asyncio.run(measure_rounds(args, url))
    bursts = {
        name: asyncio.run(measure_bursts(args, chunked))
        for name, chunked in (("chunks of 64", True), ("whole prompts", False))
    }
    names = ("streams", "input_len", "output_len")
    setting = {name: getattr(args, name) for name in names} | {"model": str(args.model)}
    record = {"schema": SCHEMA, "fingerprint": fingerprint(), "setting": setting}
    record |= summarize(rounds, bursts)
    write_json(args.out / "speed_serving.json", record)
    for name, tokens_per_s in record["tokens_per_s"].items():
        cost = record["overhead"].get(name)
        said = "" if cost is None else f"   {100 * cost:5.1f} % below the engine alone"
        print(f"{name:<14} {tokens_per_s:8.1f} tokens/s{said}")
    for name, gaps in record["bursts"].items():
        print(
            f"{name:<14} {1e3 * gaps['median_itl_s']:8.2f} ms between tokens, "
            f"99th percentile {gaps['p99_over_median']:.1f} times that"
        )
    print(args.out / "speed_serving.json")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = parse_args(argv)
    return run_command("speed_serving", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
