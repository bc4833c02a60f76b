"""How fast is the engine beside transformers, vLLM and llama.cpp (where `make peers` has installed
them), on one thread of this CPU: the same weights, requests and tokens, all in one run.

    # four workloads and the engine's overhead
    python -m reference.bench.speed --out build
    python -m reference.bench.speed --row demo

Each contender runs once a round, and a ratio compares two runs of one round. Seconds are of
processor time, so what else the machine does matters little. Prints a table, writes speed.json and
speed.png/.svg. Exit code 1 if a contender's greedy tokens differ where the model was not in doubt.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench.speed_args import record_of
from reference.ladder.command import REPOSITORY, place_of

SCHEMA = 1
NAMES = ("demo", "mixed", "shared", "alone")
BATCH, STEPS = 32, 40  # of the measurement of the overhead


def parse_args(argv) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m reference.bench.speed",
        description=" ".join(__doc__.split("\n\n")[0].split()),
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--prompts", type=Path, default=REPOSITORY / "models/prompts.json")
    parser.add_argument("--row", choices=NAMES, default=None, help="only this workload")
    parser.add_argument("--requests", type=int, default=None, help="the first N of each workload")
    parser.add_argument("--rounds", type=int, default=5, help="at most so many of each workload")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="folder for speed.json, .png and .svg"
    )
    args = parser.parse_args(argv)
    for name in ("requests", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    args.model = place_of(args.model)
    args.prompts, args.out = args.prompts.expanduser(), args.out.expanduser()
    return args


def run(args: argparse.Namespace) -> int:
    """Measure, judge, write, print; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
    import torch
    from rich.console import Console

    from lessons.toolbox.measure.records import write_json

    torch.set_num_threads(1)
    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    record = measure(args, console)
    write_json(args.out / "speed.json", record)
    draw(record, args.out / "speed")
    print_table(record, console)
    written = f"figure: {args.out / 'speed.png'}   data: {args.out / 'speed.json'}"
    console.print(written, markup=False)
    wrong = [
        f"{row['name']}: {entry['name']} {entry['verdict']}"
        for row in record["rows"]
        for entry in row["contenders"]
        if not entry["identical"]
    ]
    if wrong:
        print(f"speed: FAILED, {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def measure(args: argparse.Namespace, console) -> dict:
    """The record: the rows that were asked for, and the overhead greedy and sampled."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.bench import speed_rows
    from reference.engine.sampling_params import SamplingParams
    from reference.ladder.peers import load_peer_model

    tokenizer = load_tokenizer(args.model)
    names = [args.row] if args.row else NAMES
    rows = [speed_rows.new_row(name, args.prompts, tokenizer, args.requests) for name in names]
    model = load_decoder(args.model, device="cpu", dtype=torch.float32)
    peer_model = load_peer_model(args.model, speed_rows.CPU, torch.float32)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    entries = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for row in rows:
            total = args.rounds * len(speed_rows.contender_names(row))
            bar = progress.add_task(row.name, total=total)

            tick = partial(progress.update, bar, advance=1)
            contenders = speed_rows.measure_row(
                row, args.model, model, peer_model, args.rounds, tick
            )
            entries.append(speed_rows.row_entry(row, contenders))
            # What was not run had no time left.
            done = progress.tasks[bar].completed
            progress.update(bar, total=done, description=row.name)
        shares = {}
        wishes = {"greedy": dict(temperature=0), "sampled": dict(temperature=0.8, top_p=0.95)}
        for name, values in wishes.items():
            params = SamplingParams(**values, max_tokens=STEPS + 20, ignore_eos=True)
            bar = progress.add_task(f"overhead, {name}", total=1)
            shares[name] = speed_rows.overhead(args.model, rows[0].prompts, params, BATCH, STEPS)
            progress.advance(bar)
    return record_of(args.model, SCHEMA, rows=entries, overhead=shares)


# ---------------------------------------------------------------- the report


def shown(band: dict, digits: int = 1) -> str:
    """A median with its band."""
    return f"{band['median']:.{digits}f} ({band['p20']:.{digits}f} to {band['p80']:.{digits}f})"


def print_table(record: dict, console) -> None:
    """Speeds, ratios and verdicts, then the overheads."""
    from rich.table import Table

    table = Table(title="The engine beside libraries, tokens per second of one thread")
    columns = ("workload", "contender", "requests", "tokens/s", "engine is faster by", "tokens")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in (2, 3, 4) else "left")
    for row in record["rows"]:
        for entry in row["contenders"]:
            is_engine = entry is row["contenders"][0]
            table.add_row(
                f"{row['name']}, {row['rounds']} rounds" if is_engine else "",
                entry["name"],
                str(entry["requests"]),
                f"{entry['tokens_per_cpu_s']['median']:.0f}",
                "" if is_engine else shown(entry["engine_is_faster"]) + "x",
                entry["verdict"] or "identical",
            )
        table.add_section()
    console.print(table)
    for name, found in record["overhead"].items():
        share = {key: 100 * value for key, value in found["share"].items()}
        step_ms = 1000 * found["step_cpu_s"]["median"]
        console.print(
            f"overhead, {name}: {shown(share)} % of a step of {step_ms:.1f} ms with "
            f"{found['batch']} requests is not the model's forward pass",
            markup=False,
            highlight=False,
        )


def draw(record: dict, path: Path) -> None:
    """The ratios as bars, their bands as lines: PNG and SVG."""
    from lessons.toolbox.draw import figure, plotting

    groups = [row["name"] for row in record["rows"]]
    found = [
        {entry["name"]: entry["engine_is_faster"] for entry in row["contenders"][1:]}
        for row in record["rows"]
    ]
    names = list(dict.fromkeys(name for row in found for name in row))
    nothing = dict.fromkeys(("median", "p20", "p80"), math.nan)  # not every way has every row
    ratios = {f"beside {name}": [row.get(name, nothing) for row in found] for name in names}
    rounds = sorted({row["rounds"] for row in record["rows"]})
    fig = plotting.bars(
        groups,
        {label: ("library", [band["median"] for band in bands]) for label, bands in ratios.items()},
        title="The same tokens by the engine and by libraries, per second of processor time",
        ylabel="tokens/s of the engine / tokens/s of the library",
        better="higher",
        caption=figure.caption(
            record["fingerprint"],
            dtype="float32",
            rounds=" to ".join(str(n) for n in sorted({rounds[0], rounds[-1]})),
            threads=record["threads"],
        )
        + " · line: 20-80 %",
    )
    ax = fig.axes[0]
    pitch = len(ratios) + 0.6  # as plotting.bars places them
    for s, bands in enumerate(ratios.values()):
        for g, band in enumerate(bands):
            y = g * pitch + s + 0.3  # below the number
            ax.plot([band["p20"], band["p80"]], [y, y], color="black", lw=1.5, clip_on=False)
    alt = f"How many times faster the engine is than {', '.join(names)}, for {', '.join(groups)}."
    figure.save(fig, path, alt=alt)


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("speed", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
