"""How often a failure comes with a hint: for each registered wrong answer, what its first failed
check would say if nobody had registered it.

python -m tests.exercises.hinting [02 …]      a table by lesson; --list: each failure and its hint

`slip`: another registered answer has the same results. `seen`: what stands out in the failure (an
exception, one factor, one row). `case`: the check passes in its other cases. The rest is shown the
first hint of its exercise.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import lessons  # noqa: F401  (decides how Triton runs, before anything imports it)
from lessons.toolbox.exercises.exercise import Exercise, all_exercises
from tests.exercises import running
from tests.exercises.running import FAIL, checks_of, general_hint, hint_for
from tests.exercises.wrong import WrongAnswer, answers_of

SLIP, SEEN, CASE, FIRST = "slip", "seen", "case", "first hint"
KINDS = SLIP, SEEN, CASE, FIRST


@dataclass(frozen=True)
class Hinted:
    answer: WrongAnswer
    message: str
    kind: str  # of KINDS
    hint: str


def hints_in(entry: Exercise, answer: WrongAnswer, others: list[WrongAnswer]) -> Hinted | None:
    """What the first check that fails says; None if all pass. others: the known answers."""
    checks = checks_of(entry)
    for check in checks:
        outcome = running.run_check(check, lambda: answer.function, 0)
        if outcome.status == FAIL:
            slip = hint_for(check, answer.function, others, checks)
            seen = general_hint(outcome)
            case = running.case_hint(check, answer.function, checks)
            kind = SLIP if slip else SEEN if seen else CASE if case else FIRST
            return Hinted(answer, outcome.message, kind, slip or seen or case or "")
    return None


def all_hints(lesson: str) -> list[Hinted]:
    """For each wrong answer of a lesson, as if it were not registered."""
    found = []
    for entry in all_exercises(lesson):
        known = answers_of(entry.lesson).wrong_for(entry.id)
        for answer in known:
            others = [other for other in known if other is not answer]
            if hinted := hints_in(entry, answer, others):
                found.append(hinted)
        running.forget_outcomes()
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.exercises.hinting", description=__doc__)
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    console, table = Console(highlight=False), Table("lesson", "failures", *KINDS)
    total: Counter[str] = Counter()
    numbers = options.lessons or dict.fromkeys(entry.lesson for entry in all_exercises())
    for lesson in numbers:
        found = all_hints(lesson)
        kinds = Counter(hinted.kind for hinted in found)
        total += kinds
        table.add_row(lesson, str(len(found)), *(str(kinds[kind]) for kind in KINDS))
        for hinted in found if options.list else ():
            name = f"{hinted.answer.exercise_id} {hinted.answer.name}"
            print(f"{name}\n  {hinted.message}\n  {hinted.kind}: {hinted.hint}", flush=True)
    share = 1 - total[FIRST] / max(total.total(), 1)
    console.print(table)
    console.print(f"a hint of its own in {share:.0%} of {total.total()} failures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
