"""The ladder: the same requests, greedy, through every rung of the course; proof that the tokens
never change.

    python -m reference.ladder --model models/tiny --out build

Prints a table, writes ladder.json (its schema is in the README) and ladder.png/.svg. Exit code 1 if
a rung's tokens differ from the first rung's where the model was not in doubt (judging.py says what
that means).
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import json
import re
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.model.arguments import is_whole, shown

REPOSITORY = Path(__file__).parents[2]
# They take a large part of a climb's time, and run none of the learner's code.
WITHOUT_LIBRARIES = "not run: the libraries, which use none of your parts; without --impl they run"


def load_requests(
    path: Path, tokenizer, count: int | None = None
) -> tuple[list[list[int]], list[int]]:
    """The first `count` prompts as token ids, as the engine reads them, and how many new tokens
    each asks for.

    Raises ValueError for a file that holds no such requests.
    """
    from reference.engine.text import encode

    accepted = '; accepted: a JSON list of {"prompt": text, "max_new_tokens": count}'
    try:
        requests = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ValueError(f"--prompts {path}: {reason}{accepted}") from None
    if not isinstance(requests, list) or not requests:
        raise ValueError(f"--prompts {path}: got {shown(requests)}{accepted}")
    requests = requests[:count]
    for request in requests:
        if not is_request(request):
            raise ValueError(f"--prompts {path}: got {shown(request)}{accepted}")
    limits = [request["max_new_tokens"] for request in requests]
    if not any(limits):
        raise ValueError(
            f"--prompts {path}: max_new_tokens is 0 everywhere; accepted: at least one request "
            f"that asks for a token"
        )
    return [encode(tokenizer, request["prompt"]) for request in requests], limits


def is_request(request) -> bool:
    """Whether it is {"prompt": text, "max_new_tokens": count}. Text has no half surrogates."""
    if not isinstance(request, dict) or not isinstance(request.get("prompt"), str):
        return False
    is_text = not re.search("[\ud800-\udfff]", request["prompt"])
    return is_text and is_whole(request.get("max_new_tokens"), 0)


def parse_args(argv) -> argparse.Namespace:
    from lessons.toolbox.measure import device as devices

    parser = OneLineParser(
        prog="python -m reference.ladder",
        description=" ".join(__doc__.split("\n\n")[0].split()),
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--prompts", type=Path, default=REPOSITORY / "models/prompts.json")
    parser.add_argument(
        "--requests", type=int, default=None, help="serve only the first N requests"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="folder for ladder.json, .png and .svg"
    )
    parser.add_argument(
        "--impl",
        default=None,
        help="exercises: climb on your solved exercises wherever they stand in",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=devices.default_device().type)
    args = parser.parse_args(argv)
    if args.requests is not None and args.requests < 1:
        parser.error(f"--requests must be at least 1, got {args.requests}")
    if args.device == "cuda" and not devices.has_gpu():
        parser.error(
            "--device cuda: this machine has no usable CUDA device "
            "(python -m lessons.toolbox.measure.device says why)"
        )
    args.model = place_of(args.model)
    args.prompts, args.out = args.prompts.expanduser(), args.out.expanduser()
    return args


def place_of(model: str) -> str:
    """A folder with `~` and, for one of the course's own models, from any working directory."""
    path = Path(model).expanduser()
    here = REPOSITORY / path
    return str(here if not path.exists() and here.exists() else path)


def run(args: argparse.Namespace) -> int:
    """Measure, judge, write, print; returns the exit code."""
    import torch
    from rich.console import Console

    from lessons.l02_naive_attention.request import read_requests
    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.exercises.drop_ins import use_implementation
    from lessons.toolbox.exercises.in_use import parts_that, print_parts
    from lessons.toolbox.exercises.progress import CHANGED
    from lessons.toolbox.measure.hardware import read_bandwidth
    from lessons.toolbox.measure.records import write_json
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.ladder.climb import climb, new_guests
    from reference.ladder.judging import weight_bytes
    from reference.ladder.ladder_report import draw, print_sample, print_table, record

    # a log has no width of its own
    console = Console(width=None if sys.stdout.isatty() else 132)
    if args.impl:
        parts = use_implementation(args.impl)
        print_parts(parts, console, unchecked=parts_that(CHANGED, args.impl))
    model = load_decoder(args.model, device=args.device, dtype=torch.float32)
    tokenizer = load_tokenizer(args.model)
    prompts, limits = load_requests(args.prompts, tokenizer, args.requests)
    # every rung refuses the same mistakes: better now than in the middle
    read_requests(model.config, prompts, limits)
    check_writable(args.out)
    # With the weights' own size as working set: a small model's weights may stay in a large cache,
    # and then read faster.
    bandwidth = read_bandwidth(model.device, weight_bytes(model), budget_s=1.0)
    if args.impl:
        console.print(WITHOUT_LIBRARIES, markup=False)
    peers = [] if args.impl else new_guests(args.model, model, prompts, limits)
    rungs = climb(model, peers, prompts, limits, bandwidth, console)
    data = record(rungs, peers, model, args.model, len(prompts), bandwidth)
    write_json(args.out / "ladder.json", data)
    draw(data, args.out / "ladder")
    print_table(data, console)
    print_sample(tokenizer, prompts, rungs, console)
    written = f"figure: {args.out / 'ladder.png'}   data: {args.out / 'ladder.json'}"
    console.print(written, markup=False)
    wrong = [rung.name for rung in rungs if rung.identical is False]
    if wrong:
        print(f"ladder: FAILED, tokens differ: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("ladder", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
