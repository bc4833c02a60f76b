"""Open tasks: no single answer, a rubric, and what can be checked is checked.

    python -m reference.bench.open_tasks detective --seed 7                   three logs, in build/
    python -m reference.bench.open_tasks detective --seed 7 --answer chunks,waves,whole
    python -m reference.bench.open_tasks sizing --seed 7                      a load, in words
    python -m reference.bench.open_tasks sizing --seed 7 --plan plan.json
    python -m reference.bench.open_tasks board mine.py                        what `make board` runs
    python -m reference.bench.open_tasks cache --seed 7                       a budget, in words
    python -m reference.bench.open_tasks cache --seed 7 --measure mine.json   choices, measured
    python -m reference.bench.open_tasks cache --seed 7 --plan mine.json      what you hand in
    python -m reference.bench.open_tasks tiles --seed 7                       as with cache
    python -m reference.bench.open_tasks drafter --seed 7                     as with cache

README.md beside this file has the tasks and the rubric. Exit code 1: what was handed in does not
hold.
"""

import argparse
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.model.arguments import refuse

BUILD = Path("build")
CHOOSING = ("cache", "tiles", "drafter")
TASKS = ("detective", "sizing", "board", *CHOOSING)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser("python -m reference.bench.open_tasks", description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("file", nargs="?", type=Path, help="board: your kernel")
    parser.add_argument("--seed", type=int, default=0, help="another number is another task")
    parser.add_argument("--answer", help="detective: who wrote A, B and C")
    parser.add_argument("--plan", type=Path, help="what you hand in, as JSON: sizing, cache, …")
    parser.add_argument("--measure", type=Path, help="cache, tiles, drafter: choices, as JSON")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder (default: build)")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    """Give the task, or check what was handed in; returns the exit code."""
    if options.measure is not None and options.task not in CHOOSING:
        refuse("--measure", str(options.measure), f"with {', '.join(CHOOSING)}")
    if options.measure is not None and options.plan is not None:
        raise ValueError("--measure, --plan: got both; accepted: one of them")
    if options.task == "detective":
        from reference.bench.open_tasks import detective

        return detective.run(options.seed, options.answer, options.out)
    if options.task == "sizing":
        from reference.bench.open_tasks import sizing

        return sizing.run(options.seed, options.plan)
    if options.task == "cache":
        from reference.bench.open_tasks import cache_format

        return cache_format.run(options.seed, options.plan, options.measure)
    if options.task == "tiles":
        from reference.bench.open_tasks import tiles

        return tiles.run(options.seed, options.plan, options.measure)
    if options.task == "drafter":
        from reference.bench.open_tasks import drafter

        return drafter.run(options.seed, options.plan, options.measure, options.out)
    from reference.bench.open_tasks import board

    return board.run(options.file or options.out / "board" / "mine.py", options.out / "board")


def main(argv: list[str] | None = None) -> int:
    """The command; every mistake is one line."""
    return run_command("open_tasks", lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
