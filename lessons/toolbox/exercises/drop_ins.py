"""Solved exercises in the place of the lessons' parts, and which exercise it was if one raises.

    for part in use_implementation("exercises"):
        print(part.exercise_id, part.replaces, part.how)

Where an exercise asks for other arguments than the engine has, `through` names a function of
reference/ladder/yours/ that stands between the two: through(yours, original) -> what takes the
place of `original`. It calls `yours`, and adds nothing that the exercise asks for.
"""

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lessons.toolbox.exercises.exercise import (
    SOLUTIONS,
    Exercise,
    ExerciseError,
    all_exercises,
)
from lessons.toolbox.exercises.loading import describe, folder_of, load_exercise

USED = "used"


class Part(NamedTuple):
    """A part of the ladder or the engine. how: "used", or in one line why not."""

    exercise_id: str
    replaces: str  # "module:function"
    how: str


class PartFailed(RuntimeError):
    """A learner's part raised while it served a request: which exercise, and where."""


def parts_of_the_engine() -> list[Exercise]:
    """The exercises whose solutions run in the ladder or the engine, in order."""
    return [entry for entry in all_exercises() if entry.replaces]


def use_implementation(
    impl: str = "exercises", failing: Collection[str] = (), only: str | None = None
) -> list[Part]:
    """Put every solved drop-in exercise in the place of the lesson's function, wherever a lesson or
    the reference imported it.

    failing: ids of exercises that are not used, because their checks fail. only: the one exercise
    that is looked at. One entry per exercise with `replaces`. Solved means: no longer a stub.
    Whether it is right is for its checks, and for the caller that compares the tokens. Call it
    once, before the work starts. Raises ExerciseError for an unknown folder.
    """
    folder = folder_of(impl)
    entries = [entry for entry in parts_of_the_engine() if only in (None, entry.id)]
    return [Part(e.id, e.replaces, _install(folder, e, e.id in failing)) for e in entries]


def _install(folder: Path, entry: Exercise, is_failing: bool) -> str:
    try:
        yours = load_exercise(folder, entry)
    except NotImplementedError as todo:
        return f"not solved yet: {todo}"
    except ExerciseError as error:
        return f"cannot be loaded: {error}"
    if is_failing:
        return f"its last check failed: make check LESSON={entry.id}"
    original = named(entry.replaces)
    got = ", ".join(inspect.signature(yours).parameters)
    wanted = ", ".join(inspect.signature(original).parameters)
    if entry.through:
        wanted = arguments_of(entry)
    if got != wanted:
        return f"cannot stand in: it takes ({got}), the lesson calls it with ({wanted})"
    part = blaming(yours, entry.id, folder / entry.file)
    if inspect.isclass(original) and not entry.through:
        add_methods(part, original)
    put_in_place(original, named(entry.through)(part, original) if entry.through else part)
    return USED


def named(place: str):
    """What "module:name" names, imported."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def arguments_of(entry: Exercise) -> str:
    """What an exercise's function, or the class that it asks for, takes: the names."""
    for node in ast.parse((SOLUTIONS / entry.file).read_text(encoding="utf-8")).body:
        if getattr(node, "name", None) != entry.name:
            continue
        if isinstance(node, ast.FunctionDef):
            return ", ".join(each.arg for each in node.args.args)
        (made,) = (each for each in node.body if getattr(each, "name", None) == "__init__")
        return ", ".join(each.arg for each in made.args.args[1:])
    raise ExerciseError(f"{entry.file} has no {entry.name}")


def add_methods(yours: type, original: type) -> None:
    """Give a learner's class the methods of the lesson's that it lacks, because later lessons ask
    for more than the exercise does.
    """
    for name, value in vars(original).items():
        if inspect.isfunction(value) and not hasattr(yours, name):
            setattr(yours, name, value)


def put_in_place(original, part) -> None:
    """Let every lesson, and the reference, use `part` where it has imported `original`."""
    for loaded_name, module in list(sys.modules.items()):
        if loaded_name.startswith(("lessons.", "reference.")):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, part)


# ---------------------------------------------------------------- whose fault it was


def blaming(yours, exercise_id: str, path: Path):
    """A function, or a class with the methods of its own, that leaves the exercise's name on what
    it raises. The exception's type stays, because some are caught by their types.
    """

    def watched(function):
        @functools.wraps(function)
        def call(*arguments, **named_arguments):
            try:
                return function(*arguments, **named_arguments)
            except Exception as error:
                if blamed(error) is None:
                    with suppress(AttributeError):  # one that has no room for it
                        error.in_exercise = f"exercise {exercise_id}: {describe(error, path)}"
                raise

        call.is_watched = True
        return call

    if not inspect.isclass(yours):
        return watched(yours)
    for name, value in list(vars(yours).items()):
        if inspect.isfunction(value) and not hasattr(value, "is_watched"):
            setattr(yours, name, watched(value))
    return yours


def blamed(error: BaseException) -> str | None:
    """Which exercise an exception came out of, and where, in one line; None: out of none."""
    return getattr(error, "in_exercise", None)


@contextmanager
def naming_exercises() -> Iterator[None]:
    """What a learner's part raises inside leaves as a PartFailed; anything else as it is."""
    try:
        yield
    except Exception as error:
        if (said := blamed(error)) is None:
            raise
        raise PartFailed(said) from error
