"""The kill matrix: which check rejects which wrong answer.

python -m tests.exercises.killing [02 …]      a table for each exercise, ✗ where a check rejects
"""

import sys
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import lessons  # noqa: F401  (decides how Triton runs, before anything imports it)
from lessons.toolbox.exercises.exercise import all_exercises
from tests.exercises.checking import Check
from tests.exercises.running import FAIL, checks_of, run_check
from tests.exercises.wrong import WrongAnswer, answers_of


@cache
def rejects(check: Check, answer: WrongAnswer, seed: int = 0) -> bool:
    """Whether a check fails on a wrong answer."""
    return run_check(check, lambda: answer.function, seed).status == FAIL


def main(numbers: list[str]) -> int:
    console, complete = Console(highlight=False), True
    for entry in [entry for number in numbers for entry in all_exercises(number)]:
        checks = checks_of(entry)
        console.print(f"\n[bold]{entry.id}[/]  {escape(entry.title)}")
        names = [f"[bold]{number}[/] {escape(c.name)}" for number, c in enumerate(checks, 1)]
        console.print("   ".join(names))
        table = Table("wrong answer", *map(str, range(1, len(checks) + 1)), "kills", box=None)
        for answer in answers_of(entry.lesson).wrong_for(entry.id):
            kills = [rejects(check, answer) for check in checks]
            cells = ["[green]✗[/]" if killed else "[dim]·[/]" for killed in kills]
            table.add_row(answer.name, *cells, str(sum(kills)) if any(kills) else "[red]NONE[/]")
            complete = complete and any(kills)
        console.print(table)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
