"""A slip: a wrong answer that is the solution with a few lines changed, written as a difference.

    answers.slips("5.2", '''
        wrong_count: The mean is over the rows, not over all elements.
        - total / x.numel()
        + total / len(x)
    ''')

A slip is its name, its hint (which may go on in the next lines), then one or more changes. The text
after `-` occurs exactly once in the exercise, whatever its spaces and line breaks; the text after
`+`, none or more lines, takes its place. An empty `+` parts two changes that only take text away.
`= one, another` stands for the changes of the slips with these names, wherever in the text.
"""

import ast
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from textwrap import dedent, indent

from lessons.toolbox.exercises.exercise import SOLUTIONS, Exercise, all_exercises


@dataclass
class Change:
    old: list[str]
    new: list[str]


@dataclass
class Slip:
    name: str
    hint: str
    changes: list[Change] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # the slips whose changes it has too


def read_slips(text: str) -> Iterator[Slip]:
    """The slips in a text like the one above. Raises ValueError for one without a change, and for
    a part that is no slip of the text with changes of its own.
    """
    slips: list[Slip] = []
    for line in filter(str.strip, dedent(text).splitlines()):
        sign, rest = line[:1], line[2:]
        changes = slips[-1].changes if slips else []
        if sign == "-":
            if not changes or changes[-1].new:
                changes.append(Change([], []))
            changes[-1].old.append(rest)
        elif sign == "+":
            changes[-1].new.append(rest)
        elif sign == "=":
            slips[-1].parts = rest.split(", ")
        elif slips and not changes and not slips[-1].parts:
            slips[-1].hint += " " + line.strip()
        else:
            slips.append(Slip(*line.split(": ", 1)))
    own = {slip.name: slip.changes for slip in slips if slip.changes}
    for slip in slips:
        if unknown := set(slip.parts) - set(own):
            raise ValueError(f"slip {slip.name!r} has the parts {unknown}; accepted: {set(own)}")
        slip.changes = [change for part in slip.parts for change in own[part]] + slip.changes
    if empty := [slip.name for slip in slips if not slip.changes]:
        raise ValueError(f"these slips change nothing: {empty}")
    yield from slips


def slipped(exercise_id: str, slip: Slip) -> Callable:
    """The exercise's function or class, from the solution's file with the slip in it. Raises
    ValueError if an old text does not occur exactly once in the exercise.
    """
    entry, source, parts = _exercise(exercise_id)
    where = f"slip {slip.name!r} of exercise {exercise_id}"
    edits = []
    for change in slip.changes:
        pattern = r"\s+".join(map(re.escape, " ".join(change.old).split()))
        found = [
            match.span()
            for match in re.finditer(pattern, source)
            if any(match.start() in part for part in parts)
        ]
        if len(found) != 1:
            raise ValueError(f"{where}: found {len(found)} times, not once: {change.old}")
        edits.append((found[0], change.new))
    for (start, end), new in sorted(edits, reverse=True):  # from below, so that places stay
        line = source[source.rfind("\n", 0, start) + 1 : start]
        margin = line[: len(line) - len(line.lstrip())]
        source = source[:start] + indent(dedent("\n".join(new)), margin).lstrip() + source[end:]
    # Triton reads the source of a kernel, which no file holds.
    file = f"<{where}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": f"solutions.{entry.file.removesuffix('.py')}"}
    exec(compile(source, file, "exec"), namespace)
    return namespace[entry.name]


@cache
def _exercise(exercise_id: str) -> tuple[Exercise, str, list[range]]:
    """An exercise, the text of its solution's file, and which characters of it belong to the
    exercise: its function, and what else holds a gap of it.
    """
    lesson = exercise_id.split(".")[0].zfill(2)
    entry = next(entry for entry in all_exercises(lesson) if entry.id == exercise_id)
    source = (SOLUTIONS / entry.file).read_text(encoding="utf-8")
    source = re.sub(r"# STUB\n.*?# END", "# END", source, flags=re.DOTALL)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    parts = []
    for node in ast.parse(source).body:
        part = range(starts[node.lineno - 1], starts[node.end_lineno])
        gap = f"# SOLUTION {exercise_id}\n" in source[part.start : part.stop]
        if gap or getattr(node, "name", None) == entry.name:
            parts.append(part)
    return entry, source, parts
