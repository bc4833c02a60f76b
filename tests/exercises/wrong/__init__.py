"""Wrong answers, one file a lesson: real slips, each with the hint for the learner who made it.

answers = Answers()

answers.slips("18.1", '''                 # the solution with a few lines changed: see slips.py
    sixteen_steps: 16 codes have 15 steps between them.
    - (high - low) / 15
    + (high - low) / 16
''')

@answers.wrong("2.1", "Your mask is aligned top left.")        # another algorithm, written out
def top_left_mask(q, k, v): ...

answers.alternative("2.1")(another_right_function)  # written another way: checks must not mind
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from tests.exercises.wrong.slips import read_slips, slipped


@dataclass(frozen=True)
class WrongAnswer:
    exercise_id: str
    name: str
    function: Callable  # stands in for the exercise's function, complete
    hint: str


class Answers:
    """The wrong answers and the alternative solutions of one lesson."""

    def __init__(self):
        self._wrong: list[WrongAnswer] = []
        self._alternatives: list[tuple[str, Callable]] = []

    def wrong(self, exercise_id: str, hint: str, name: str | None = None) -> Callable:
        """Register a function (or, with `name`, anything callable) as a wrong answer."""

        def register(function: Callable) -> Callable:
            answer = WrongAnswer(exercise_id, name or function.__name__, function, hint)
            if any((a.exercise_id, a.name) == (exercise_id, answer.name) for a in self._wrong):
                raise ValueError(
                    f"exercise {exercise_id} has two wrong answers named {answer.name!r}"
                )
            self._wrong.append(answer)
            return function

        return register

    def slips(self, exercise_id: str, text: str) -> None:
        """Register the solution with each of the changes in a text: see slips.py. Raises ValueError
        if a change does not fit the solution any more.
        """
        for slip in read_slips(text):
            self.wrong(exercise_id, slip.hint, slip.name)(slipped(exercise_id, slip))

    def alternative(self, exercise_id: str) -> Callable:
        """Register another right solution."""

        def register(function: Callable) -> Callable:
            self._alternatives.append((exercise_id, function))
            return function

        return register

    def wrong_for(self, exercise_id: str) -> list[WrongAnswer]:
        return [answer for answer in self._wrong if answer.exercise_id == exercise_id]

    def alternatives_for(self, exercise_id: str) -> list[Callable]:
        return [function for known, function in self._alternatives if known == exercise_id]

    def exercise_ids(self) -> set[str]:
        return {answer.exercise_id for answer in self._wrong} | {
            known for known, _ in self._alternatives
        }


def answers_of(lesson: str) -> Answers:
    """The registry of a lesson ("02"); an empty one if the lesson has no file."""
    name = f"tests.exercises.wrong.l{lesson}"
    return importlib.import_module(name).answers if importlib.util.find_spec(name) else Answers()
