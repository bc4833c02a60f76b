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
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def load_requests(path: Path, tokenizer) -> tuple[list[list[int]], list[int]]:
    """Prompts as token ids, each opened by the tokenizer's start token if it has one, and how many
    new tokens each asks for.

    Raises ValueError for a file that holds no such requests.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    try:
        requests = json.loads(path.read_text(encoding="utf-8"))
        texts = [request["prompt"] for request in requests]
        limits = [request["max_new_tokens"] for request in requests]
        prompts = [start + tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ValueError(
            f"{path}: {reason}; accepted: a JSON list of "
            '{"prompt": text, "max_new_tokens": count}'
        ) from None
    if prompts and not any(limits):
        raise ValueError(
            f"{path}: max_new_tokens is 0 everywhere; accepted: at least one request that asks for "
            f"a token"
        )
    return prompts, limits


def parse_args(argv) -> argparse.Namespace:
    from lessons.toolbox.measure import device as devices

    parser = argparse.ArgumentParser(
        prog="python -m reference.ladder", description=" ".join(__doc__.split("\n\n")[0].split())
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


def writable(folder: Path) -> None:
    """Raise OSError, before anything is measured, if no file can be written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass  # it leaves nothing behind, even if it is interrupted


def run(args: argparse.Namespace) -> int:
    """Measure, judge, write, print; returns the exit code."""
    import torch
    from rich.console import Console

    from lessons.l02_naive_attention.request import read_requests
    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.exercises.loading import use_implementation
    from lessons.toolbox.measure.hardware import read_bandwidth
    from lessons.toolbox.measure.records import write_json
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.climb import climb
    from reference.judging import weight_bytes
    from reference.ladder_report import draw, print_sample, print_table, record

    # a log has no width of its own
    console = Console(width=None if sys.stdout.isatty() else 132)
    for exercise_id, replaced, how in use_implementation(args.impl) if args.impl else ():
        console.print(f"exercise {exercise_id} for {replaced}: {how}", markup=False)
    model = load_decoder(args.model, device=args.device, dtype=torch.float32)
    tokenizer = load_tokenizer(args.model)
    prompts, limits = load_requests(args.prompts, tokenizer)
    prompts, limits = prompts[: args.requests], limits[: args.requests]
    # every rung refuses the same mistakes: better now than in the middle
    read_requests(model.config, prompts, limits)
    writable(args.out)
    # With the weights' own size as working set: a small model's weights may stay in a large cache,
    # and then read faster.
    bandwidth = read_bandwidth(model.device, weight_bytes(model), budget_s=1.0)
    rungs, peers = climb(model, args.model, prompts, limits, bandwidth, console)
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
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of ASCII has no ×
    try:
        args = parse_args(argv)
        from lessons.toolbox.exercises.exercise import ExerciseError
        from lessons.toolbox.model.checkpoint import CheckpointError
        from reference.rungs import RungFailed

        try:
            return run(args)
        except (CheckpointError, ExerciseError, RungFailed, ValueError, OSError) as error:
            print(f"ladder: {error}", file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        print("ladder: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
