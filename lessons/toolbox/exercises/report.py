"""What a learner reads in the terminal: the result of the checks, the map of the course, the kill
matrix.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lessons.toolbox.exercises.exercise import (
    ROOT,
    Exercise,
    ExerciseError,
    all_exercises,
    find_exercise,
    fingerprint,
    solution_files,
    untouched_line,
)
from lessons.toolbox.exercises.loading import folder_of, source_of

PASS, FAIL, TODO, NOT_RUN, CHANGED = "PASS", "FAIL", "TODO", "NOT RUN", "CHANGED"
COLORS = {PASS: "green", FAIL: "red", TODO: "yellow", NOT_RUN: "magenta", CHANGED: "cyan"}
# exercise id -> [status, fingerprint of the code that had it]
PROGRESS_FILE = ROOT / "build" / "progress.json"


# ---------------------------------------------------------------- make check


def _python() -> str:
    """How to call this Python from the repository: .venv/bin/python, or python where it is the one
    on the path.
    """
    inside = Path(sys.prefix).is_relative_to(ROOT)
    return os.path.relpath(sys.executable, ROOT) if inside else "python"


def run_checks(which: str | int | None, impl: str = "exercises") -> bool:
    """Check a lesson, one exercise or everything in a process of its own; print a summary; True if
    nothing failed or is to do.
    """
    entries = [find_exercise(which)] if "." in str(which) else all_exercises(which)
    folder, console = folder_of(impl), Console()
    outcomes = defaultdict(list)
    with console.status("checking …"):
        for record in _records(entries, impl):
            outcomes[record["exercise"]].append(record)
    statuses = {}
    for entry in entries:
        records = outcomes[entry.id]
        statuses[entry.id] = _status(records)
        _print_exercise(console, entry, statuses[entry.id], records)
    counts = [
        f"[{COLORS[s]}]{n} {s}[/]"
        for s in (PASS, FAIL, TODO, NOT_RUN)
        if (n := list(statuses.values()).count(s))
    ]
    console.print(
        "  ".join(counts) + ("   (NOT RUN is no pass)" if NOT_RUN in statuses.values() else "")
    )
    if impl == "exercises":
        _remember(folder, entries, statuses)
    return not {FAIL, TODO} & set(statuses.values())


def _records(entries: list[Exercise], impl: str) -> Iterator[dict[str, str]]:
    """The outcome of every check. Each exercise by itself if a run broke off, because a hanging one
    must not hide the others.
    """
    lessons = sorted({entry.lesson for entry in entries})
    marks = " or ".join(entry.marker for entry in entries)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--impl",
            impl,
            "--outcomes",
            str(file),
            "-m",
            marks,
            "-p",
            "no:cacheprovider",
            *(f"tests/exercises/test_l{lesson}.py" for lesson in lessons),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        records = (
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if file.exists()
            else []
        )
    if done.returncode not in (0, 1) and len(entries) > 1:
        for entry in entries:
            yield from _records([entry], impl)
        return
    yield from records
    if done.returncode not in (0, 1):
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next(
            (line.removeprefix("E").strip() for line in lines if line.startswith("E  ")), lines[-1]
        )
        for entry in entries:
            yield {
                "exercise": entry.id,
                "check": "",
                "status": FAIL,
                "message": f"the run broke off: {reason}",
            }


def _status(records: list[dict[str, str]]) -> str:
    """The worst of an exercise's checks; no check at all is no pass either."""
    found = {record["status"] for record in records} or {NOT_RUN}
    return next(status for status in (TODO, FAIL, NOT_RUN, PASS) if status in found)


def _print_exercise(
    console: Console, entry: Exercise, status: str, records: list[dict[str, str]]
) -> None:
    passed, ran = (
        sum(record["check"] != "" and record["status"] in wanted for record in records)
        for wanted in ({PASS}, COLORS)
    )
    count = "" if status == TODO else f"  {passed} of {ran} checks passed"
    console.print(
        f"[{COLORS[status]}]{status:7}[/] [bold]{entry.id}[/]  "
        f"{escape(entry.title)}[dim]{count}[/]",
        highlight=False,
        soft_wrap=True,
    )
    first = next((record for record in records if record["status"] == status), None)
    if status == FAIL:
        console.print(
            "        " + escape(first["message"]).replace("\n", "\n        "),
            highlight=False,
            soft_wrap=True,
        )
        console.print(
            f"        [dim]all of it, your prints too: {_python()} -m pytest tests/exercises -m "
            f"{entry.marker} "
            "--impl exercises[/]",
            highlight=False,
            soft_wrap=True,
        )
    elif status == NOT_RUN:
        console.print(
            "        " + (escape(first["message"]) if first else "no check ran"), highlight=False
        )


# ---------------------------------------------------------------- make progress


def _remembered() -> dict[str, list[str]]:
    try:
        return json.loads(PROGRESS_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _remember(folder: Path, entries: list[Exercise], statuses: dict[str, str]) -> None:
    known = _remembered()
    for entry in entries:
        try:
            known[entry.id] = [statuses[entry.id], fingerprint(source_of(folder, entry), entry)]
        except ExerciseError:
            known.pop(entry.id, None)
    PROGRESS_FILE.parent.mkdir(exist_ok=True)
    part = PROGRESS_FILE.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    os.replace(part, PROGRESS_FILE)


def status_now(entry: Exercise, remembered: dict[str, list[str]]) -> str:
    """An exercise's status without running anything: CHANGED means edited since its last check (or
    never checked).
    """
    try:
        source = source_of(folder_of("exercises"), entry)
    except ExerciseError:
        return TODO
    if untouched_line(source, entry.id):
        return TODO
    status, code = remembered.get(entry.id, [CHANGED, ""])
    return status if code == fingerprint(source, entry) else CHANGED


def print_progress() -> None:
    """Every lesson, its exercises and the minutes that are left."""
    remembered = _remembered()
    table = Table(
        title="The ladder, and where you stand on it", caption="as `make check` last found it"
    )
    for heading, justify in (
        ("lesson", "left"),
        ("exercises", "left"),
        ("done", "right"),
        ("minutes left", "right"),
    ):
        table.add_column(heading, justify=justify)
    signs = {PASS: "✓", FAIL: "✗", TODO: "·", NOT_RUN: "?", CHANGED: "*"}
    total = done = minutes = 0
    with_exercises = {path.name[1:3]: path for path in solution_files()}
    for room in sorted(path for path in (ROOT / "lessons").glob("l[0-9][0-9]_*") if path.is_dir()):
        entries = all_exercises(room.name[1:3]) if room.name[1:3] in with_exercises else []
        statuses = {entry: status_now(entry, remembered) for entry in entries}
        passed = [entry for entry, status in statuses.items() if status == PASS]
        left = sum(entry.minutes for entry in entries if entry not in passed)
        marks = "  ".join(
            f"[{COLORS[status]}]{signs[status]} {entry.id}[/]" for entry, status in statuses.items()
        )
        table.add_row(
            f"{room.name[1:3]}  {room.name[4:].replace('_', ' ')}",
            marks or "[dim]none yet[/]",
            f"{len(passed)} of {len(entries)}" if entries else "",
            str(left) if entries else "",
        )
        total, done, minutes = total + len(entries), done + len(passed), minutes + left
    table.add_section()
    table.add_row("all", "", f"{done} of {total}", str(minutes))
    Console().print(table)
    Console().print(
        "✓ passed   ✗ failed   · to do   ? not run   * edited since its last check", style="dim"
    )


# ---------------------------------------------------------------- kills


def print_kills(lesson: str | None = None) -> bool:
    """For each exercise a table of wrong answers × checks (✗ rejects); True if every wrong answer
    is rejected at least once.
    """
    # by name, because the toolbox stands below the tests
    killing = importlib.import_module("tests.exercises.killing")
    console, complete = Console(), True
    for entry in all_exercises(lesson):
        runs = [run.name for run in killing.runs_of(entry)]
        console.print(f"\n[bold]{entry.id}  {escape(entry.title)}[/]", highlight=False)
        console.print(
            "   ".join(f"[bold]{n}[/] {escape(name)}" for n, name in enumerate(runs, 1)),
            highlight=False,
        )
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("wrong answer", no_wrap=True)
        for number in range(1, len(runs) + 1):
            table.add_column(str(number), justify="center", no_wrap=True)
        table.add_column("kills", justify="right", no_wrap=True)
        for answer, killed_by in killing.kill_matrix(entry).items():
            complete = complete and bool(killed_by)
            table.add_row(
                answer.name,
                *("[green]✗[/]" if name in killed_by else "[dim]·[/]" for name in runs),
                str(len(killed_by)) if killed_by else "[red]NONE[/]",
            )
        console.print(table)
    return complete
