"""The balance of ranks while subjects change, with placements that follow or do not.

    python -m lessons.l23_experts.lab.stream          prints the table
    python -m lessons.l23_experts.lab.stream --write  writes results/counted/l23_stream.json, too

Steps of 1024 tokens: Python modules, then this course's lessons, then modules again, through
balance.py's random router over the hidden values of models/tiny. Counted, not timed.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from lessons.l23_experts.lab import balance
from lessons.l23_experts.lab.balance import EXPERTS, RANKS, imbalance_of
from lessons.l23_experts.ranks.balancer import Balancer, anew, by_few_moves
from lessons.l23_experts.ranks.placement import Placement, in_order
from lessons.toolbox.command import OneLineParser, run_command

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l23_stream.json"
SUBJECTS = ("modules", "lessons", "modules")
STEPS, STEP_TOKENS = 24, 1024  # of each subject
INTERVAL, MOVES = 8, 16
NEVER = 10**6


def first_placement() -> Placement:
    """In order, and of the first experts a copy, because nothing is known yet."""
    ranks = [(*in_order(EXPERTS, RANKS).of_rank(rank), rank) for rank in range(RANKS)]
    return Placement(tuple(expert for own in ranks for expert in own), RANKS)


def balancers() -> dict[str, Balancer]:
    """The rules, by name."""
    start = first_placement()
    return {
        "never": Balancer(start, 1, NEVER, anew),
        "anew, 8 steps": Balancer(start, 8, INTERVAL, anew),
        "anew, 32 steps": Balancer(start, 32, INTERVAL, anew),
        f"{MOVES} moves, 8 steps": Balancer(start, 8, INTERVAL, by_few_moves(MOVES)),
    }


def stream() -> list[Tensor]:
    """The choices of each step, [STEP_TOKENS, TOP_K]."""
    torch.manual_seed(balance.SEED)
    # enough for each to be read once; the second time modules are the same
    sources = {name: balance.of_texts(name, STEPS * STEP_TOKENS) for name in SUBJECTS}
    return [sources[name](STEP_TOKENS) for name in SUBJECTS for _ in range(STEPS)]


def record_of(steps: list[Tensor]) -> dict:
    """Of each rule the imbalance of every step, its mean, and how many experts travelled."""
    rules = {}
    for name, balancer in balancers().items():
        found = []
        for chosen in steps:
            found.append(imbalance_of(chosen, balancer.placement))
            balancer.see(chosen)
        mean = sum(found) / len(found)
        rules[name] = {"mean": mean, "moved": balancer.num_moved, "steps": found}
    return {
        "what": "counted, with a random router; nothing was timed",
        "command": "python -m lessons.l23_experts.lab.stream --write",
        "rules": rules,
    }


def show(record: dict) -> None:
    """The table as text."""
    print(f"{' '.join(SUBJECTS)}, {STEPS} steps each; renewed every {INTERVAL} steps")
    print("rule, steps that count     busiest rank / mean    experts that travelled")
    for name, row in record["rules"].items():
        print(f"{name:26} {row['mean']:19.2f} {row['moved']:25}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.stream", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="the record, too")
    given = parser.parse_args(arguments)
    return run_command("stream", lambda: run(given))


def run(given: argparse.Namespace) -> int:
    """Count, write if asked, and print."""
    record = record_of(stream())
    if given.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
