"""Prefill and decode apart against mixed: the same number of server processes behind a router, one
of which computes prompts for the other, or both of which do everything in chunks.

    python -m reference.bench.apart --out build
    python -m reference.bench.apart --rates 2 4 --requests 20 --connector TcpConnector

Half of the requests have long prompts, half short ones; they arrive at random at each of the rates.
Prints a table, writes apart.json and apart.svg: percentiles of the time to the first token (TTFT)
and between tokens (ITL) over the rate.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench.own_server import END_S, free_port, own_server
from reference.bench.speed_args import record_of
from reference.ladder.command import place_of

SCHEMA = 1
WAYS = ("mixed", "apart")
PERCENTILES = (50, 90, 99)
CONNECTORS = ("SharedMemoryConnector", "TcpConnector")
START_S = 120.0  # that servers may take to start
WARM = 4  # requests before the first that counts


def parse_args(argv) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m reference.bench.apart",
        description=" ".join(__doc__.split("\n\n")[0].split()),
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8], help="requests/s")
    parser.add_argument("--requests", type=int, default=60, help="at each rate")
    parser.add_argument("--long", type=int, default=768, help="tokens of half of the prompts")
    parser.add_argument("--short", type=int, default=32, help="tokens of the other half")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step")
    parser.add_argument("--connector", choices=CONNECTORS, default=CONNECTORS[0])
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in each server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    for name, least in (("requests", 2), ("output_len", 2), ("threads", 1), ("short", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be at least {least}, got {getattr(args, name)}")
    if min(args.rates) <= 0:
        parser.error(f"--rates must be above 0, got {min(args.rates)}")
    if args.long <= args.short:
        parser.error(f"--long must be above --short ({args.short}), got {args.long}")
    if args.chunk < 64:
        parser.error(f"--chunk must be at least 64, a token for each request, got {args.chunk}")
    args.model, args.out = place_of(args.model), args.out.expanduser()
    return args


def new_requests(args, tokenizer) -> list:
    """Long and short prompts of random tokens, in random order."""
    from reference.bench.bench_data import random_requests

    half = args.requests // 2
    found = random_requests(half, args.seed, tokenizer, args.long, args.output_len)
    rest = args.requests - half
    found += random_requests(rest, args.seed + 1, tokenizer, args.short, args.output_len)
    random.Random(args.seed).shuffle(found)
    return found


@contextmanager
def cluster(way: str, args) -> Iterator[str]:
    """Two servers and a router before them, ready; its address."""
    common = ["--device", "cpu", "--max-num-batched-tokens", str(args.chunk)]
    common += ["--max-model-len", str(args.long + args.output_len + 16)]
    with ExitStack() as stack:
        servers = []
        for role in ("kv_producer", "kv_consumer"):
            transfer = {"kv_connector": args.connector, "kv_role": role, "kv_port": 0}
            flags = ["--kv-transfer-config", json.dumps(transfer)] if way == "apart" else []
            servers.append(stack.enter_context(own_server(args.model, *common, *flags)))
        for server in servers:
            wait_for(f"{server.url}/ready")
        urls = [server.url for server in servers]
        flags = ["--replicas", *urls, "--policy", "least"]
        if way == "apart":
            middle = str((args.short + args.long) / 2)
            flags = ["--replicas", urls[1], "--prefill", urls[0], "--send-from", middle]
        url = stack.enter_context(own_router(*flags))
        wait_for(f"{url}/ready")
        yield url


@contextmanager
def own_router(*flags: str) -> Iterator[str]:
    """A router in a process of its own, ended with the block; its address."""
    port = free_port()
    command = [sys.executable, "-m", "reference.router", "--port", port, *flags]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str) -> None:
    """Until it answers with 200. Raises RuntimeError."""
    import httpx

    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url}: no answer for {START_S:g} s")


async def measure(url: str, args, requests: list, tick) -> list[dict]:
    """An entry for each rate."""
    from reference.bench.bench_load import OpenAI, arrivals_of, new_client, run_load

    found = []
    async with new_client(url) as client:
        models = (await client.get("/v1/models")).json()
        backend = OpenAI(client, models["data"][0]["id"], ignore_eos=True, temperature=0)
        warm = await run_load(requests[-WARM:], None, backend)
        if why_not := [served.why_not for served in warm.history if served.why_not]:
            raise RuntimeError(f"{len(why_not)} of {WARM} requests failed: {why_not[0]}")
        for rate in args.rates:
            before = sent_in((await client.get("/metrics")).text)
            arrivals = arrivals_of(rate, 1.0, len(requests), args.seed)
            run = await run_load(fresh(requests, rate), arrivals, backend)
            sent = sent_in((await client.get("/metrics")).text) - before
            found.append({"rate": rate, "sent": sent, **percentiles_of(run.history)})
            tick()
    return found


def fresh(requests: list, rate: float) -> list:
    """The same requests, of which no cache has any block: each begins with another token."""
    from dataclasses import replace

    first = 300 + int(100 * rate)
    return [
        replace(one, prompt=[first + at % 97, *one.prompt[1:]]) for at, one in enumerate(requests)
    ]


def sent_in(metrics: str) -> float:
    """Prompts that were handed over, by the router's count."""
    lines = [line for line in metrics.splitlines() if line.startswith("router_prefills_total")]
    return sum(float(line.split()[-1]) for line in lines if 'outcome="sent"' in line)


def percentiles_of(history: list) -> dict:
    """TTFT and ITL in seconds, and how many requests failed."""
    from lessons.l22_serving.load import percentile
    from reference.bench.bench_report import samples

    done = [served for served in history if not served.why_not]
    found = {"failed": len(history) - len(done)}
    values = samples(done)
    for name in ("ttft", "itl"):
        of = values[name]
        found[f"{name}_s"] = {f"p{p}": percentile(of, p) if of else None for p in PERCENTILES}
    return found


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the servers
    from rich.console import Console
    from rich.progress import Progress

    from lessons.toolbox.draw.figure import save
    from lessons.toolbox.measure.records import write_json
    from reference.bench.apart_figure import ALT, draw_apart, print_table
    from reference.engine.model import load_tokenizer

    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    requests, entries = new_requests(args, load_tokenizer(args.model)), []
    with Progress(console=console) as progress:
        bar = progress.add_task("apart", total=len(WAYS) * len(args.rates))
        for way in WAYS:
            with cluster(way, args) as url:
                work = measure(url, args, requests, lambda: progress.advance(bar))
                entries.append({"name": way, "rates": asyncio.run(work)})
    names = ("requests", "long", "short", "output_len", "chunk", "connector", "threads")
    sizes = {name: getattr(args, name) for name in names}
    record = record_of(args.model, SCHEMA, **sizes, entries=entries)
    print_table(record, console)
    write_json(args.out / "apart.json", record)
    save(draw_apart(record), args.out / "apart", alt=ALT)
    console.print(f"data: {args.out / 'apart.json'}", markup=False)
    return 0


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("apart", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
