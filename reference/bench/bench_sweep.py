"""The load test of a real server, from its start to its end: where its knee is, how long people
wait before and beyond it, what a token costs within the objectives, and what a client hides that
counts from the sending.

    python -m reference.bench.bench_sweep --out results/cpu

The server runs in a process of its own. First a closed loop finds its capacity. Then requests
arrive at growing shares of it (an open loop, Poisson), each time for --seconds. At last the
server's process is stopped for a moment while requests go on arriving. Takes four minutes, and
nothing else should run. Writes serving_load.json and its figures.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import asyncio
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench import bench_serving
from reference.bench.own_server import OwnServer, own_server
from reference.ladder.command import place_of

AT_ONCE = 64  # requests of the closed loop that finds the capacity
ROUNDS = 5  # that each of its places makes
STALL_SHARE, STALL_S = 0.5, 1.5  # of the capacity that arrives, and how long the server is stopped
FILE = "serving_load.json"


def parse_args(argv) -> argparse.Namespace:
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = OneLineParser(prog="python -m reference.bench.bench_sweep", description=description)
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt, on average")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    shares = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.3)
    parser.add_argument("--shares", type=float, nargs="+", default=shares, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--goodput", nargs="+", default=["ttft:200", "tpot:20"], metavar="NAME:MS")
    parser.add_argument("--price-per-hour", type=float, default=0.1, help="dollars, assumed")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    args.model = str(place_of(args.model))
    return args


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that cannot work; bench_serving checks its own."""
    from lessons.toolbox.model.arguments import check_positive

    check_positive(**{"--seconds": args.seconds})
    for share in args.shares:
        check_positive(**{"--shares": share})
    check_writable(args.out)


# ---------------------------------------------------------------- the loads


def client_args(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of bench_serving for all of it. Lengths vary by half, both ways."""
    given = ["--model", args.model, "--ignore-eos", "--goodput", *args.goodput]
    given += ["--random-input-len", str(args.input_len), "--random-range-ratio", "0.5"]
    given += ["--random-output-len", str(args.output_len)]
    given += ["--price-per-hour", str(args.price_per_hour), "--num-warmups", "8"]
    given += ["--result-dir", str(args.out), "--result-filename", FILE]
    client = bench_serving.parser().parse_args(given)
    bench_serving.check(client)
    bench_serving.setting_of(client)  # checks the rest
    return client


async def one_load(client: argparse.Namespace, count: int, seed: int, **load) -> dict:
    """The record of `count` requests. load: fields of bench_report.Setting."""
    client.num_prompts, client.seed = count, seed
    setting = replace(bench_serving.setting_of(client), **load)
    (record,) = await bench_serving.measure(client, [setting], say=lambda line: None)
    client.num_warmups = 0
    return record


async def sweep(client: argparse.Namespace, args: argparse.Namespace) -> tuple[float, list[dict]]:
    """The capacity in requests/s, and a record for each share of it."""
    # the closed loop is asked again and again, so it is busy all the time
    closed = await one_load(client, AT_ONCE * ROUNDS, 1000, max_concurrency=AT_ONCE)
    capacity_per_s = closed["request_throughput"]
    print(f"capacity: {capacity_per_s:.1f} requests/s with {AT_ONCE} at once", flush=True)
    points = []
    for seed, share in enumerate(sorted(args.shares)):
        rate = share * capacity_per_s
        point = await one_load(client, math.ceil(rate * args.seconds), seed, request_rate=rate)
        points.append(point)
        print(
            f"{rate:6.1f} requests/s: {100 * point['slo_attainment']:3.0f} % in time, "
            f"median TTFT {point['median_ttft_ms'] or math.nan:.0f} ms",
            flush=True,
        )
    return capacity_per_s, points


async def measure_stall(client, server: OwnServer, rate: float, at_once: int, seconds: float):
    """The run of a load during which the server is stopped once, after half of the time. The client
    has places for `at_once` requests, so when the server stands, it sends nothing more.
    """
    from reference.bench import bench_load

    client.num_prompts, client.seed = math.ceil(rate * seconds), 2000
    requests = bench_serving.requests_of(client, client.seed)
    arrivals = bench_load.arrivals_of(rate, 1.0, len(requests), client.seed)

    async def pause() -> None:
        await asyncio.sleep(seconds / 2)
        server.stop()
        try:
            await asyncio.sleep(STALL_S)
        finally:
            server.go_on()

    async with bench_serving.backend_of(client) as backend:
        run = bench_load.run_load(requests, arrivals, backend, at_once)
        return (await asyncio.gather(run, pause()))[0]


async def measure(args: argparse.Namespace, server: OwnServer, client) -> tuple[list[dict], dict]:
    """The points of the sweep, and what else belongs into the record."""
    from reference.bench.bench_omission import counted_twice

    capacity_per_s, points = await sweep(client, args)
    # Little's law: so many requests are there at this rate. Twice as many places are never full,
    # unless the server stands.
    near = min(points, key=lambda point: abs(point["request_rate"] - STALL_SHARE * capacity_per_s))
    rate = near["request_rate"]
    at_once = math.ceil(2 * rate * (near["mean_e2el_ms"] or 0.0) / 1e3) or 1
    run = await measure_stall(client, server, rate, at_once, args.seconds)
    limit_s = bench_serving.setting_of(client).objectives.ttft_s or STALL_S / 4
    stall = {"stall_s": STALL_S, "request_rate": rate, "max_concurrency": at_once}
    stall |= counted_twice(run, limit_s)
    more = {"capacity_per_s": capacity_per_s, "seconds": args.seconds, "stall": stall}
    return points, more


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported, here and there
    from reference.bench.bench_report import save_record, summary_of_sweep

    check(args)
    client = client_args(args)
    with own_server(args.model, "--max-num-seqs", str(AT_ONCE)) as server:
        client.base_url = server.url
        points, more = asyncio.run(measure(args, server, client))
    print("\n".join(summary_of_sweep(points)))
    for name, found in more["stall"]["counted"].items():
        print(f"stopped for {STALL_S:g} s, {name}: {100 * found['share_late']:.1f} % come late")
    for path in save_record(client, points, more):
        print(path)
    return 0 if any(point["completed"] for point in points) else 1


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = parse_args(argv)
    return run_command("bench_sweep", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
