"""Which parts of the ladder and the engine are the learner's own, as a table in the terminal."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lessons.toolbox.exercises.drop_ins import USED, Part, parts_of_the_engine
from lessons.toolbox.exercises.progress import FAIL, status_now


def failing(impl: str) -> list[str]:
    """The ids of the parts whose last check failed, and whose code has not changed since. Only for
    exercises/, because no other folder's checks are remembered.
    """
    if impl != "exercises":
        return []
    return [entry.id for entry in parts_of_the_engine() if status_now(entry) == FAIL]


def print_parts(parts: list[Part], console: Console) -> None:
    """A line for each part that is used, and for each that is not and why. Stubs share a line."""
    used = [part for part in parts if part.how == USED]
    stubs = [part for part in parts if part.how.startswith("not solved yet")]
    table = Table("exercise", "part", "whose", box=box.SIMPLE, pad_edge=False)
    for part in parts:
        if part not in stubs:
            whose = "yours" if part in used else f"the lesson's: {part.how}"
            table.add_row(part.exercise_id, short(part.replaces), escape(whose))
    if stubs:
        ids = ", ".join(part.exercise_id for part in stubs)
        table.add_row("", f"{len(stubs)} others", f"the lesson's, not solved yet: {ids}")
    console.print(table)
    console.print(f"{len(used)} of {len(parts)} parts are yours")


def short(place: str) -> str:
    """ "lessons.l16_speculative_sampling.stand_ins:verify_for" as "lesson 16, verify_for"."""
    module, _, name = place.partition(":")
    return f"lesson {module.split('.')[1][1:3]}, {name}"
