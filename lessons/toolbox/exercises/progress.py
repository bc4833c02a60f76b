"""`make progress`: what the learner solved, what is left, and how many minutes it takes."""

import ast
import csv
import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lessons.toolbox.exercises.exercise import (
    EXERCISES,
    ROOT,
    SOLUTIONS,
    Exercise,
    all_exercises,
    read_exercises,
    untouched_line,
)
from lessons.toolbox.exercises.parts import names_of
from lessons.toolbox.language import said

PASS, FAIL, TODO, NOT_RUN, CHANGED = "PASS", "FAIL", "TODO", "NOT RUN", "CHANGED"
# the worst first
LOOKS = {
    TODO: "[yellow]·",
    FAIL: "[red]✗",
    NOT_RUN: "[magenta]?",
    PASS: "[green]✓",
    CHANGED: "[cyan]*",
}
PROGRESS_FILE = ROOT / "build" / "progress.json"
COLUMNS = "lesson", "exercises", "done", "minutes"  # of the map
IN_A_LINE = 4  # exercises of the map
PART = "◆"  # its solution runs in the ladder or the engine


@dataclass
class Known:
    """What is remembered of an exercise. status: of its last check; code: the fingerprint of what
    was checked; checks: how often code of the learner's was; passed: the day of the first pass.
    """

    status: str
    code: str
    checks: int = 0
    passed: str = ""


def remembered() -> dict[str, Known]:
    """By the exercises' ids; {} if there is no file, or one that cannot be read."""
    try:
        found = json.loads(PROGRESS_FILE.read_text(encoding="utf-8"))
        return {
            id: Known(*one) if isinstance(one, list) else Known(**one) for id, one in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def remember(statuses: dict[Exercise, str]) -> None:
    """Write down what a check has found."""
    known = remembered()
    for entry, status in statuses.items():
        before = known.get(entry.id, Known(TODO, ""))
        passed = before.passed or (date.today().isoformat() if status == PASS else "")
        checks = before.checks + (status != TODO)
        known[entry.id] = Known(status, fingerprint(entry), checks, passed)
    text = json.dumps({id: asdict(one) for id, one in known.items()}, indent=1)
    PROGRESS_FILE.parent.mkdir(exist_ok=True)
    PROGRESS_FILE.write_text(text, encoding="utf-8")


def _source(entry: Exercise) -> str:
    path = EXERCISES / entry.file
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def fingerprint(entry: Exercise) -> str:
    """Changes when the learner's code of an exercise (or of helpers that no exercise asks for)
    changes; comments and other exercises do not count. Empty for code that does not parse.
    """
    try:
        tree = ast.parse(_source(entry))
    except (SyntaxError, ValueError):
        return ""
    neighbours = [other for other in read_exercises(SOLUTIONS / entry.file) if other.id != entry.id]
    others = {name for other in neighbours for name in names_of(other)} - set(names_of(entry))
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in others]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def status_now(entry: Exercise) -> str:
    """An exercise's status without running anything: CHANGED means edited since its last check (or
    never checked).
    """
    source = _source(entry)
    if not source or untouched_line(source, entry.id):
        return TODO
    known = remembered().get(entry.id, Known(CHANGED, ""))
    return known.status if known.code == fingerprint(entry) else CHANGED


def print_progress() -> None:
    """Every lesson, its exercises and the minutes left, as `make check` last found them."""
    table, console = Table(*map(said, COLUMNS)), Console()
    table.columns[1].no_wrap = True  # or a sign and its number part at the end of a line
    statuses = {entry: status_now(entry) for entry in all_exercises()}
    for file in [*dict.fromkeys(entry.file for entry in statuses), ""]:
        entries = [entry for entry in statuses if file in (entry.file, "")]
        left = [entry.minutes for entry in entries if statuses[entry] != PASS]
        marks = [mark_of(entry, statuses[entry]) for entry in entries if file]
        name = f"{file[1:3]}  {file[4:-3].replace('_', ' ')}" if file else said("all")
        done = said(f"{len(entries) - len(left)} of {len(entries)}")
        lines = [" ".join(marks[at : at + IN_A_LINE]) for at in range(0, len(marks), IN_A_LINE)]
        table.add_row(name, "\n".join(lines), done, str(sum(left)))
    console.print(table)
    looks = "  ".join(f"{look} {said(status)}[/]" for status, look in LOOKS.items())
    console.print(said(f"{looks} since its last check"))
    parts = [status for entry, status in statuses.items() if entry.replaces]
    own = sum(status not in (TODO, FAIL) for status in parts)
    what = said("a part of the ladder, the engine or what measures them")
    console.print(f"{PART} {what}: " + said(f"{own} of {len(parts)} are yours"))


def mark_of(entry: Exercise, status: str) -> str:
    """An exercise on the map."""
    return f"{LOOKS[status]} {entry.id}{PART if entry.replaces else ' '}[/]"


def export_progress(path: Path) -> None:
    """The same as a table for a spreadsheet or a teacher: a line for each exercise, with the day of
    its first pass, which stays, and how often it was checked. Raises OSError.
    """
    known = remembered()
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["exercise", "title", "minutes", "status", "first passed", "checks"])
        for entry in all_exercises():
            one = known.get(entry.id, Known(TODO, ""))
            facts = [entry.id, entry.title, entry.minutes, status_now(entry)]
            rows.writerow([*facts, one.passed, one.checks])
