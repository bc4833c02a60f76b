"""What is handed in for a task of choosing: a file of JSON with the choices that were tried, the
numbers that were found for each, and which one is meant.

    {"tried": [{"name": "int8", "choice": {...}, "numbers": {...}}, ...], "chosen": "int8"}

The choices are measured again, and every number is held against what is found. What is no such file
is a ValueError in one line. A number that does not hold is a line of `wrong_numbers`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lessons.toolbox.model.arguments import is_number, one_line, refuse, shown

FEWEST, MOST = 4, 24  # choices in a file
LONGEST_NAME = 60  # characters


class Tried(NamedTuple):
    """A row of the file. choice: as the task has checked it. numbers: those that the task asks for,
    none in a file that is to be measured.
    """

    name: str
    choice: object
    numbers: dict[str, float]


class Allowed(NamedTuple):
    """How far a number may be from the one that is found: the larger of both. Other machines round
    differently.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def holds(self, said: float, found: float) -> bool:
        """Whether the number that was handed in may stay."""
        return abs(said - found) <= max(self.absolute, self.relative * abs(found))


EXACT = Allowed()


def read_json(path: Path) -> dict:
    """The file's object. Raises ValueError, in one line, and OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path}: no JSON (too deeply nested)") from None
    if not isinstance(found, dict):
        refuse(str(path), found, "an object of JSON, {...}")
    return found


def check_fields(where: str, given, needed: tuple[str, ...], optional: tuple[str, ...] = ()):
    """Raise ValueError, in one line, unless `given` is an object of these fields."""
    if not isinstance(given, dict):
        refuse(where, given, f"an object with {', '.join(needed)}")
    for name in needed:
        if name not in given:
            raise ValueError(f"{where}: {name} is missing; needed: {', '.join(needed)}")
    for name in given:
        if name not in (*needed, *optional):
            raise ValueError(
                f"{where}: got a field {shown(name)}; accepted: {', '.join((*needed, *optional))}"
            )


def read_tried(
    found: dict, read_choice: Callable[[str, dict], object], numbers: tuple[str, ...]
) -> list[Tried]:
    """The rows of "tried". read_choice: checks one, from its place in words and its object.
    numbers: the names of those that each row has to have; (): a file that is to be measured, whose
    numbers are not read. Raises ValueError, in one line.
    """
    rows = found["tried"]
    fewest = FEWEST if numbers else 1
    if not isinstance(rows, list) or not fewest <= len(rows) <= MOST:
        given = len(rows) if isinstance(rows, list) else rows
        refuse("tried", given, f"a list of {fewest} to {MOST} choices")
    read, choices = [], []
    for place, row in enumerate(rows, 1):
        where = f"choice {place} of tried"
        fields = ("name", "choice", "numbers") if numbers else ("name", "choice")
        check_fields(where, row, fields, () if numbers else ("numbers",))
        name = row["name"]
        if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
            refuse(f"{where}: name", name, f"a text of 1 to {LONGEST_NAME} characters")
        if name in [one.name for one in read]:
            raise ValueError(f"{where}: {shown(name)} is the name of an earlier one, too")
        choice = read_choice(shown(name), row["choice"])
        if choice in choices:
            other = read[choices.index(choice)].name
            raise ValueError(f"{shown(name)}: the same choice as {shown(other)}")
        choices.append(choice)
        read.append(Tried(name, choice, read_numbers(shown(name), row, numbers)))
    return read


def read_numbers(where: str, row: dict, names: tuple[str, ...]) -> dict[str, float]:
    """Those of a row. Raises ValueError, in one line, for a missing one and for no number."""
    if not names:
        return {}
    given = row["numbers"]
    check_fields(f"{where}: numbers", given, names)
    for name in names:
        if not is_number(given[name]):
            refuse(f"{where}: {name}", given[name], "a number")
    return given


def one_named(rows: list[Tried], name, field: str = "chosen") -> Tried:
    """The row of this name. Raises ValueError, in one line."""
    for row in rows:
        if row.name == name:
            return row
    refuse(field, name, "the name of a choice in tried")


def wrong_numbers(row: Tried, found: dict[str, float], allowed: dict[str, Allowed]) -> list[str]:
    """A line for each number of the row that does not hold. allowed: by name; the others have to be
    equal.
    """
    return [
        one_line(
            f"{row.name}: {name} does not hold: {number_text(said)} in the file, "
            f"{number_text(found[name])} when measured again"
        )
        for name, said in row.numbers.items()
        if not allowed.get(name, EXACT).holds(said, found[name])
    ]


def number_text(value) -> str:
    """Whole numbers in full, others in five digits; words as they are."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def print_numbers(name: str, found: dict[str, float]) -> None:
    """A choice and what was found, in a line."""
    said = ", ".join(f"{key} {number_text(value)}" for key, value in found.items())
    print(f"{name}: {said}", flush=True)


def verdict(wrong: list[str]) -> int:
    """Print what does not hold; the exit code."""
    for line in wrong:
        print(line)
    print("It holds." if not wrong else "It does not hold.")
    return 1 if wrong else 0
