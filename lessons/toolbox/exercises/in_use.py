"""Which parts of the ladder and the engine are the learner's own, as a table in the terminal."""

from collections.abc import Collection

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lessons.toolbox.exercises.drop_ins import USED, Part, parts_of_the_engine
from lessons.toolbox.exercises.progress import status_now
from lessons.toolbox.language import said


def parts_that(status: str, impl: str) -> list[str]:
    """The ids of the parts with this status (FAIL: the last check failed, and the code is still the
    same; CHANGED: no check has seen it). Only for exercises/, because no other folder's checks are
    remembered.
    """
    if impl != "exercises":
        return []
    return [entry.id for entry in parts_of_the_engine() if status_now(entry) == status]


def print_parts(parts: list[Part], console: Console, unchecked: Collection[str] = ()) -> None:
    """A line for each part that is used, and for each that is not and why. Stubs share a line.
    unchecked: ids of those that no check has seen as they are.
    """
    used = [part for part in parts if part.how == USED]
    stubs = [part for part in parts if part.how.startswith("not solved yet")]
    table = Table(*map(said, ("exercise", "part", "whose")), box=box.SIMPLE, pad_edge=False)
    for part in parts:
        if part not in stubs:
            whose = "yours" if part in used else f"the lesson's: {part.how}"
            if part in used and part.exercise_id in unchecked:
                whose = f"yours, not checked: make check LESSON={part.exercise_id}"
            table.add_row(part.exercise_id, said(short(part.replaces)), escape(said(whose)))
    if stubs:
        ids = ", ".join(part.exercise_id for part in stubs)
        whose = said(f"the lesson's, not solved yet: {ids}")
        table.add_row("", said(f"{len(stubs)} others"), whose)
    console.print(table)
    console.print(said(f"{len(used)} of {len(parts)} parts are yours"))


def short(place: str) -> str:
    """ "lessons.l16_speculative_sampling.stand_ins:verify_for" as "lesson 16, verify_for"."""
    module, _, name = place.partition(":")
    return f"lesson {module.split('.')[1][1:3]}, {name}"
