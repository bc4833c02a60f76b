"""Chats of several turns, with more of them than the cache holds: what the first token of each turn
waits for, without a cache, with a prefix cache, with host memory behind it, and with files.

    python -m reference.bench.turns --out build
    python -m reference.bench.turns --chats 10 --turns 3

A turn is the whole chat so far and some new tokens. All chats take their first turn, then all their
second, in an order drawn anew, so each comes back after all others: its blocks have left the pool
by then. The history of a chat is long beside a turn, as those of real ones are: what a hit saves
grows with it, and what a step costs at least does not. All ways have to give the same tokens.
Prints a table, writes turns.json and turns.svg. Besides the seconds to a first token it has those
of the processor, in all threads, which another program on the machine changes less.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench.speed_args import record_of
from reference.ladder.command import place_of

SCHEMA = 1
BLOCK = 16  # tokens
FIRST, NEXT, ANSWER = 512, 24, 16  # tokens of the first message, of the next ones, of an answer
FITS = 10  # one of so many chats fits into the pool
TEXT = 400_000  # characters that the messages are cut from
HOST_SHARE = 0.3  # of the chats, where files hold the rest
WAYS = ("no cache", "prefix cache", "host memory", "host memory and files")


def parse_args(argv) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m reference.bench.turns",
        description=" ".join(__doc__.split("\n\n")[0].split()),
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=8, help="of each chat")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    for name, least in (("chats", FITS), ("turns", 2), ("threads", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    args.model, args.out = place_of(args.model), args.out.expanduser()
    return args


def blocks_of(turns: int) -> int:
    """Blocks that a chat of so many turns fills."""
    tokens = FIRST + (turns - 1) * NEXT + turns * ANSWER
    return -(-tokens // BLOCK)


def new_chats(args, tokenizer) -> list[list[list[int]]]:
    """The messages of each chat: token ids of the held-out text, from a place of its own."""
    from lessons.toolbox.model.corpus import corpus

    text = tokenizer("\n".join(corpus()[1])[:TEXT], verbose=False)["input_ids"]
    draw = random.Random(args.seed)
    length = FIRST + (args.turns - 1) * NEXT
    chats = []
    for nth in range(args.chats):
        at = draw.randrange(len(text) - length)
        words = [nth % 1000 + 300, *text[at + 1 : at + length]]  # none begins as another
        cuts = [0, *range(FIRST, length + 1, NEXT)]
        chats.append([words[a:b] for a, b in pairwise(cuts)])
    return chats


def arguments_of(way: str, args, block_bytes: int, folder: str) -> dict:
    """The engine's arguments for a way."""
    blocks = blocks_of(args.turns)
    gib = args.chats * blocks * block_bytes * 1.05 / 2**30  # of all chats
    found = dict(
        enable_prefix_caching=way != "no cache",
        num_gpu_blocks_override=max(blocks + 1, args.chats // FITS * blocks),
    )
    if way == "host memory":
        found |= dict(kv_offloading_size=gib)
    if way == "host memory and files":
        found |= dict(kv_offloading_size=HOST_SHARE * gib, kv_offloading_folder=folder)
    return found


def serve(llm, chats, args, tick) -> tuple[list, list[list[float]], list[list[float]]]:
    """All turns of all chats, one at a time. Returns the answers of each chat, and for each turn
    the seconds to the first token, and those of the processor.
    """
    from reference.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    engine, draw = llm.engine, random.Random(args.seed)
    texts, answers = [[] for _ in chats], [[] for _ in chats]
    waits, worked = [], []
    for turn in range(args.turns):
        order = draw.sample(range(len(chats)), len(chats))
        waits.append([])
        worked.append([])
        for chat in order:
            texts[chat] += chats[chat][turn]
            start, busy = time.perf_counter(), time.process_time()
            engine.add_request("turn", list(texts[chat]), params)
            request, first = engine.requests["turn"], None
            while engine.has_unfinished_requests:
                if engine.advance() and first is None:
                    first = time.perf_counter() - start
                    worked[-1].append(time.process_time() - busy)
            answer = list(request.sequences[0].output)
            texts[chat] += answer
            answers[chat].append(answer)
            waits[-1].append(first)
            tick()
    return answers, waits, worked


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))  # read when PyTorch is imported
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from lessons.toolbox.draw.figure import save
    from lessons.toolbox.measure.records import write_json
    from reference.bench.speed_rows import band
    from reference.bench.turns_figure import ALT, draw_turns, print_table
    from reference.engine.llm import LLM

    torch.set_num_threads(args.threads)
    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    common = dict(device="cpu", block_size=BLOCK, max_model_len=BLOCK * (blocks_of(args.turns) + 1))
    llm = LLM(args.model, **common)
    block_bytes = llm.engine.runner.pool.bytes_per_token * BLOCK
    chats = new_chats(args, llm.get_tokenizer())
    llm.shutdown()
    entries, wanted = [], None
    folder = tempfile.mkdtemp(prefix="kv-turns")
    try:
        with Progress(console=console) as progress:
            bar = progress.add_task("turns", total=len(WAYS) * args.chats * args.turns)
            for way in WAYS:
                llm = LLM(args.model, **common, **arguments_of(way, args, block_bytes, folder))
                answers, waits, worked = serve(llm, chats, args, lambda: progress.advance(bar))
                host, blocks = llm.engine.scheduler.host, llm.engine.scheduler.blocks
                entry = {"name": way, "ttft_s": [band(turn) for turn in waits]}
                entry |= {"cpu_s": [band(turn) for turn in worked]}
                entry |= {"asked_tokens": host.asked, "found_tokens": host.found}
                if (connector := getattr(blocks, "connector", None)) is not None:
                    below = connector.tier.below
                    entry |= {"host_hits": connector.tier.hits, "faults": connector.faults}
                    names = ("loaded_blocks", "saved_blocks", "given_up")
                    entry |= {name: getattr(connector, name) for name in names}
                    entry |= {"file_hits": 0 if below is None else below.hits}
                entries.append(entry)
                llm.shutdown()
                wanted = wanted or answers
                if answers != wanted:
                    raise ValueError(f"{way}: other tokens than without a cache")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sizes = dict(chats=args.chats, turns=args.turns, threads=args.threads, fits=FITS)
    record = record_of(args.model, SCHEMA, **sizes, entries=entries)
    print_table(record, console)
    write_json(args.out / "turns.json", record)
    save(draw_turns(record), args.out / "turns", alt=ALT)
    console.print(f"data: {args.out / 'turns.json'}", markup=False)
    return 0


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("turns", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
