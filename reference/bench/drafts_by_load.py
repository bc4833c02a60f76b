"""What choosing the number of drafts is worth: the engine on a virtual device, in batches of 1 to
64, with drafts that are good, that fade, and that are useless. Nothing is timed, so every run gives
the same numbers.

    python -m reference.bench.drafts_by_load --out results/counted

For each batch: tokens per virtual second without speculation, with each fixed K from 1 to 4, and
with `enable_adaptive_verification`. Prints a table and writes drafts_by_load.json. Exit code 1 if
the choice loses more than 3 % against the best of the others.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command

SCHEMA = 1
MOST = 4
ALLOWED_LOSS = 0.03
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# how often the drafted token at each position stays, if all before it stayed
DRAFTS = {"good": [0.8] * MOST, "fading": [0.9, 0.6, 0.3, 0.1], "useless": [0.02] * MOST}
STEPS = 1000  # that the choice is given
SAMPLES = 4000  # steps of a sequence, by which the others are judged


def parse_args(argv) -> argparse.Namespace:
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = OneLineParser(prog="python -m reference.bench.drafts_by_load", description=description)
    parser.add_argument("--batch", type=int, choices=BATCHES, default=None, help="only this one")
    parser.add_argument("--drafts", choices=DRAFTS, default=None, help="only these")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    return parser.parse_args(argv)


def entry_of(drafts: str, batch: int) -> dict:
    """A row of the record."""
    from reference.bench.virtual_drafts import tokens_per_s

    rates, steps = DRAFTS[drafts], max(STEPS, SAMPLES // batch)
    few = -(-SAMPLES // batch)
    fixed = {str(count): tokens_per_s(batch, rates, count, few)[0] for count in range(MOST + 1)}
    chosen, counts = tokens_per_s(batch, rates, None, steps)
    best = max(fixed, key=fixed.get)
    return {
        "name": f"{drafts} at {batch}",
        "drafts": drafts,
        "batch": batch,
        "fixed": fixed,
        "chosen": chosen,
        "mean_count": sum(counts) / len(counts),
        "best_count": int(best),
        "loss": 1 - chosen / fixed[best],
        "loss_against_off": 1 - chosen / fixed["0"],
        "loss_of_most_against_off": 1 - fixed[str(MOST)] / fixed["0"],
    }


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; returns the exit code."""
    from lessons.toolbox.measure.records import write_json
    from reference.bench.virtual_drafts import DEVICE

    check_writable(args.out)
    entries = []
    for drafts in [args.drafts] if args.drafts else DRAFTS:
        for batch in [args.batch] if args.batch else BATCHES:
            entries.append(entry_of(drafts, batch))
            print_row(entries[-1])
    record = {
        "schema": SCHEMA,
        "command": "python -m reference.bench.drafts_by_load --out results/counted",
        "device": DEVICE._asdict(),
        "acceptance": DRAFTS,
        "worst_loss": max(entry["loss"] for entry in entries),
        "entries": entries,
    }
    write_json(args.out / "drafts_by_load.json", record)
    print(f"data: {args.out / 'drafts_by_load.json'}")
    lost = [entry["name"] for entry in entries if entry["loss"] > ALLOWED_LOSS]
    if lost:
        print(f"drafts_by_load: FAILED, more than 3 % lost: {', '.join(lost)}", file=sys.stderr)
    return 1 if lost else 0


def print_row(entry: dict) -> None:
    """A line of the table: tokens per virtual second."""
    fixed = "  ".join(f"K={count} {rate:7.0f}" for count, rate in entry["fixed"].items())
    chosen = f"chosen {entry['chosen']:7.0f} (K {entry['mean_count']:.1f} on average)"
    print(f"{entry['name']:>14}  {fixed}  {chosen}  loses {100 * entry['loss']:.1f} %")


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("drafts_by_load", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
