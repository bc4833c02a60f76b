"""A learner's solution really is the part of the ladder or the engine that its exercise names: it
is called, what comes out is the same, and a wrong solution is seen.
"""

import functools
import inspect

import pytest

from lessons.toolbox.exercises import drop_ins
from lessons.toolbox.exercises.drop_ins import (
    USED,
    parts_of_the_engine,
    put_in_place,
    use_implementation,
)
from lessons.toolbox.exercises.loading import folder_of, load_exercise
from tests.exercises.wrong import answers_of
from tests.part_runs import RUNS

PARTS = {entry.id: entry for entry in parts_of_the_engine()}
# for each part one of the exercise's registered wrong answers
PLANTED = {
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


def test_every_part_of_the_later_lessons_has_a_run():
    later = {entry.id for entry in PARTS.values() if entry.through or int(entry.lesson) > 14}
    assert later == set(RUNS) == set(PLANTED)


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
    assert RUNS[exercise_id]() != want and calls
