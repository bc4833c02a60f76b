"""What serving costs: the same answers from the engine alone, from the async engine, and from a
server over HTTP, all in one run. And how long a prompt stops those who decode, with chunks and
without.

    python -m reference.bench.speed_serving --peer --out build
    python -m reference.bench.speed_serving --base-url http://127.0.0.1:8000 \\
        --peer-url http://127.0.0.1:9000

Each contender answers the same requests once a round, and a ratio compares two of one round.
Seconds are of the clock, so nothing else should run meanwhile. Without --base-url two servers are
started here: one as it is by default, whose engine has a process of its own, and one whose engine
is a thread. --peer starts `transformers serve`, --peer-url names one that runs; its answers are
compared with ours, and it takes part in the first rounds only, because it is slow. Prints a table
and writes speed_serving.json.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import asyncio
import gc
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench.own_server import free_port, own_server
from reference.ladder.command import place_of

SCHEMA = 2
READY_S = 120.0  # that a server may take until it answers
PEER_ROUNDS = 2
SERVER, THREAD, PEER = "server", "server, engine in a thread", "transformers serve"


def parse_args(argv) -> argparse.Namespace:
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = OneLineParser(prog="python -m reference.bench.speed_serving", description=description)
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--base-url", default=None, help="of a running server of ours")
    parser.add_argument("--peer-url", default=None, help="of a running `transformers serve`")
    parser.add_argument("--peer", action="store_true", help="start `transformers serve`")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt, about")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-server", action="store_true", help="only what runs in this process")
    parser.add_argument("--no-bursts", action="store_true", help="only the cost of serving")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    for name in ("streams", "input_len", "output_len", "rounds"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    if args.peer and args.peer_url:
        parser.error("--peer and --peer-url: accepted: one of them")
    args.model = place_of(args.model)
    return args


# ---------------------------------------------------------------- who answers


def engine_args(args: argparse.Namespace, **more):
    """The same engine for all contenders in this process."""
    from reference.engine.async_engine import AsyncEngineArgs

    return AsyncEngineArgs.read(
        model=args.model, max_num_seqs=args.streams, enable_prefix_caching=False, **more
    )


def offline_tokens_per_s(engine, requests) -> float:
    """The engine in a loop, without a reader."""
    from reference.engine.sampling_params import SamplingParams

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
    from reference.bench.bench_load import run_load

    run = await run_load(requests, [0.0] * len(requests), backend)
    for served in run.history:
        if served.why_not:
            raise ValueError(f"a request failed: {served.why_not}")
    return tokens_per_s(run.history)


def enter_servers(args: argparse.Namespace, stack: ExitStack) -> dict[str, str]:
    """{who: address} of the servers, which end with the stack. Raises ValueError."""
    from reference.bench import speed_peer

    if args.no_server:
        return {}
    urls = {}
    if args.base_url:
        urls[SERVER] = args.base_url
    else:
        thread = ("--disable-frontend-multiprocessing",)
        flags = ("--max-num-seqs", str(args.streams), "--no-enable-prefix-caching")
        for name, more in ((SERVER, ()), (THREAD, thread)):
            server = own_server(str(args.model), *flags, *more)
            urls[name] = stack.enter_context(server).url
    if args.peer_url:
        urls[PEER] = args.peer_url
    if args.peer:
        if not speed_peer.can_start():
            raise ValueError("--peer: transformers[serving] is not installed; accepted: none")
        port = free_port()
        stack.enter_context(speed_peer.started(args, port))
        urls[PEER] = f"http://127.0.0.1:{port}"
    return urls


async def wait_until_ready(backend, request) -> None:
    """Ask until the server answers. Raises ValueError after two minutes."""
    from reference.bench.bench_load import Failed, Stream

    give_up = time.monotonic() + READY_S
    while True:
        try:
            return await backend.send(request, Stream())
        except Failed as failure:
            if time.monotonic() > give_up:
                raise ValueError(f"the server does not answer: {failure}") from None
            await asyncio.sleep(0.2)


# ---------------------------------------------------------------- rounds


def new_requests(args: argparse.Namespace) -> tuple[list, list]:
    """The same prompts as token ids and as texts. Reading the texts again gives the ids."""
    from reference.bench import bench_data
    from reference.bench.bench_load import BenchRequest
    from reference.engine.model import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    sizes = args.streams, 0, tokenizer, args.input_len, args.output_len
    texts = bench_data.as_text(bench_data.random_requests(*sizes), tokenizer)
    ids = [tokenizer(one.prompt)["input_ids"] for one in texts]
    told = [BenchRequest(found, len(found), one.max_tokens) for found, one in zip(ids, texts)]
    return told, texts


async def measure_rounds(args: argparse.Namespace, urls: dict[str, str]) -> dict:
    """rounds: tokens/s of each contender, round by round. same_answers: how many of the peer's are
    ours.
    """
    from reference.bench.bench_load import InProcess, new_client
    from reference.bench.speed_peer import Heard, Transformers
    from reference.engine.assembly import new_engine
    from reference.engine.async_engine import AsyncLLMEngine

    requests, texts = new_requests(args)
    alone = new_engine(engine_args(args))
    engine = AsyncLLMEngine(new_engine(engine_args(args)))
    clients = {name: new_client(url) for name, url in urls.items()}
    backends = {"async engine": InProcess(engine, ignore_eos=True)}
    for name, client in clients.items():
        model = str(args.model)
        ours = dict(temperature=0, ignore_eos=True)
        backends[name] = (
            Transformers(client, model) if name == PEER else Heard(client, model, **ours)
        )
    asked = {name: texts if name == PEER else requests for name in backends}
    gc.collect()
    gc.freeze()  # as the server does, so that the client does not stop for what was imported
    rounds = []
    try:
        for name, backend in backends.items():
            await wait_until_ready(backend, asked[name][0])
        for number in range(args.rounds):
            rounds.append({"engine alone": offline_tokens_per_s(alone, requests)})
            for name, backend in backends.items():
                if name != PEER or number < PEER_ROUNDS:
                    rounds[-1][name] = await served_tokens_per_s(backend, asked[name])
    finally:
        engine.shutdown()
        for client in clients.values():
            await client.aclose()
    found = {"rounds": rounds}
    if PEER in backends:
        ours, theirs = backends[SERVER].texts, backends[PEER].texts
        pairs = zip((str(one.prompt) for one in requests), (one.prompt for one in texts))
        found["same_answers"] = sum(ours[mine] == theirs[text] for mine, text in pairs)
    return found


# ---------------------------------------------------------------- the record


def summarize(rounds: list[dict[str, float]]) -> dict:
    """Medians over the rounds, and the share that serving costs. Not every contender is in each
    round.
    """
    names = list(rounds[0])
    return {
        "rounds": rounds,
        "tokens_per_s": {
            name: median(one[name] for one in rounds if name in one) for name in names
        },
        "overhead": {
            name: median(1 - one[name] / one["engine alone"] for one in rounds if name in one)
            for name in names[1:]
        },
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported, here and there
    import torch

    from lessons.toolbox.measure.device import fingerprint
    from lessons.toolbox.measure.records import write_json
    from reference.bench import speed_bursts

    torch.set_num_threads(1)
    check_writable(args.out)
    with ExitStack() as stack:
        measured = asyncio.run(measure_rounds(args, enter_servers(args, stack)))
    names = ("streams", "input_len", "output_len")
    setting = {name: getattr(args, name) for name in names} | {"model": str(args.model)}
    record = {"schema": SCHEMA, "fingerprint": fingerprint(), "setting": setting}
    record |= measured | summarize(measured["rounds"])
    if not args.no_bursts:
        record["bursts"] = speed_bursts.measure_curve(args)
        record["largest_chunk"] = speed_bursts.largest_chunk(record["bursts"])
    write_json(args.out / "speed_serving.json", record)
    for line in lines_of(record):
        print(line)
    print(args.out / "speed_serving.json")
    return 0


def lines_of(record: dict) -> list[str]:
    """The record as a table."""
    from reference.bench import speed_bursts

    lines = []
    for name, tokens_per_s in record["tokens_per_s"].items():
        cost = record["overhead"].get(name)
        said = "" if cost is None else f"   {100 * cost:5.1f} % below the engine alone"
        lines.append(f"{name:<26} {tokens_per_s:8.1f} tokens/s{said}")
    if "same_answers" in record:
        count, of = record["same_answers"], record["setting"]["streams"]
        lines.append(f"{PEER}: {count} of {of} answers are ours to the last character")
    if "bursts" in record:
        lines += speed_bursts.lines_of(record["bursts"])
        most, chunk = speed_bursts.MOST, record["largest_chunk"]
        lines.append(f"largest chunk within {most:g} quiet gaps: {chunk or 'none'}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = parse_args(argv)
    return run_command("speed_serving", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
