"""The kill matrix: which check rejects which wrong answer."""

import importlib
from dataclasses import dataclass
from functools import cache

from lessons.toolbox.exercises.exercise import Exercise
from tests.exercises.checking import Check, checks_in
from tests.exercises.running import FAIL, Outcome, run_check
from tests.exercises.wrong import WrongAnswer, answers_of


@dataclass(frozen=True)
class Run:
    """One check on one of its cases."""

    check: Check
    case: str | None

    @property
    def name(self) -> str:
        return self.check.name + (f"[{self.case}]" if self.case else "")

    def outcome(self, function, seed: int = 0) -> Outcome:
        return run_check(self.check, lambda: function, self.case, seed)


def runs_of(entry: Exercise) -> list[Run]:
    """Every check of an exercise, case by case."""
    module = importlib.import_module(f"tests.exercises.test_l{entry.lesson}")
    return [
        Run(check, case)
        for check in checks_in(module)
        if check.exercise_id == entry.id
        for case in check.runs()
    ]


@cache
def kill_matrix(entry: Exercise, seed: int = 0) -> dict[WrongAnswer, list[str]]:
    """For each wrong answer of an exercise, the names of the runs that reject it."""
    return {
        answer: [
            run.name for run in runs_of(entry) if run.outcome(answer.function, seed).status == FAIL
        ]
        for answer in answers_of(entry.lesson).wrong_for(entry.id)
    }
