"""A learner's solution really is the part of the ladder or the engine that its exercise names: it
is called, what comes out is the same, and a wrong solution is seen.
"""

import functools
import inspect

import pytest

from lessons.toolbox.exercises import drop_ins
from lessons.toolbox.exercises.drop_ins import (
    USED,
    add_methods,
    parts_of_the_engine,
    put_in_place,
    use_implementation,
)
from lessons.toolbox.exercises.loading import folder_of, load_exercise
from reference.ladder.rungs import RungFailed, Step, call_rung
from tests.exercises.wrong import answers_of
from tests.ladder_part_runs import RUNS

PARTS = {entry.id: entry for entry in parts_of_the_engine()}
# for each part one of the exercise's registered wrong answers
PLANTED = {
    "2.1": "strict_mask",
    "3.2": "unrotated_q",
    "4.1": "d_in_the_exponent",
    "5.1": "heads_by_modulo",
    "7.2": "own_norm_again",
    "5.2": "heads_by_modulo",
    "8.1": "stale_acc",
    "9.1": "strict_diagonal",
    "9.4": "top_left",
    "10.1": "averaged",
    "11.4": "rebinds_inputs",
    "12.2": "AllocatesAgain",
    "13.2": "unchained",
    "14.3": "LeavesLate",
    "6.2": "overwrites_last_row",
    "15.3": "KeepsComputed",
    "16.2": "ratio_upside_down",
    "17.4": "slots_without_the_table",
    "18.2": "GroupsInterleaved",
    "19.4": "nibbles_swapped",
    "20.2": "local_token_numbers",
    "21.3": "scaled_twice",
    "22.2": "own_past_forgotten",
    "23.1": "choices_in_columns",
    "24.1": "must_go_on",
    "25.2": "tokens_to_the_new_rows",
    "26.2": "block_of_the_row",
    "26.5": "counts_the_hits",
}


@functools.cache
def as_it_is(exercise_id):
    """What comes out with the lesson's own part."""
    return RUNS[exercise_id]()


@pytest.fixture
def install(monkeypatch):
    """install(id, solution) puts a solution in its part's place until the test ends; returns the
    list of its calls.
    """
    replaced, calls = [], []

    def noted(original, part):
        replaced.append((original, part))
        put_in_place(original, part)

    def counted(function):
        @functools.wraps(function)
        def call(*arguments, **named):
            calls.append(function.__name__)
            return function(*arguments, **named)

        return call

    def install(exercise_id, solution):
        found = counted(solution)
        if inspect.isclass(solution):
            found = solution
            for name, value in list(vars(solution).items()):
                if inspect.isfunction(value):
                    monkeypatch.setattr(solution, name, counted(value))
        monkeypatch.setattr(drop_ins, "load_exercise", lambda folder, entry: found)
        (part,) = use_implementation("solutions", only=exercise_id)
        assert part.how == USED, part
        return calls

    monkeypatch.setattr(drop_ins, "put_in_place", noted)
    yield install
    for original, part in reversed(replaced):
        put_in_place(part, original)


def test_every_lesson_has_a_part_and_every_part_a_run():
    """But for lesson 1, whose parts compute and measure, and 7.1, which needs a GPU."""
    assert {entry.lesson for entry in PARTS.values()} >= {f"{n:02}" for n in range(2, 27)}
    assert {*RUNS, "1.1", "1.3", "7.1"} == set(PARTS) and set(PLANTED) == set(RUNS)


def test_a_class_gets_what_later_lessons_ask_for():
    class Lessons:
        def grow(self):
            return "the lesson's"

        def cut(self):
            return self.grow()

    class Yours:
        def grow(self):
            return "yours"

    add_methods(Yours, Lessons)
    assert Yours().cut() == "yours"


def test_a_rung_that_fails_names_the_exercise(install):
    def verify_one(p, q, drafted, u):
        raise IndexError("off by one")

    install("16.2", verify_one)
    rung = Step("16", "n-grams", lambda *given, on_token: RUNS["16.2"]())
    with pytest.raises(
        RungFailed, match=r"n-grams failed: exercise 16\.2: .*IndexError: off by one"
    ):
        call_rung(rung, None, [], [], None)


@pytest.mark.parametrize("exercise_id", RUNS)
def test_a_solution_is_called_and_changes_nothing(exercise_id, install):
    want = as_it_is(exercise_id)
    calls = install(exercise_id, load_exercise(folder_of("solutions"), PARTS[exercise_id]))
    assert RUNS[exercise_id]() == want
    assert set(calls) - {"__init__"}, "the run has not asked the solution"


@pytest.mark.parametrize("exercise_id", RUNS)
def test_a_wrong_solution_is_seen(exercise_id, install):
    want = as_it_is(exercise_id)
    answers = answers_of(PARTS[exercise_id].lesson).wrong_for(exercise_id)
    (wrong,) = (each.function for each in answers if each.name == PLANTED[exercise_id])
    calls = install(exercise_id, wrong)
    try:
        got = RUNS[exercise_id]()
    except Exception as error:
        got = error
    assert got != want and calls
