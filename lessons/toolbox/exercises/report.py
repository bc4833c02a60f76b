"""`make check`: what a learner reads of the checks."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from rich.cells import set_cell_size
from rich.console import Console
from rich.markup import escape

from lessons.toolbox.command import typed
from lessons.toolbox.exercises.exercise import ROOT, Exercise, all_exercises, has_kernel
from lessons.toolbox.exercises.loading import folder_of
from lessons.toolbox.exercises.progress import FAIL, LOOKS, NOT_RUN, PASS, TODO, remember
from lessons.toolbox.exercises.spoken import message_of, statement_of
from lessons.toolbox.language import said
from lessons.toolbox.measure.device import CHIP, has_gpu, has_triton

PRINTS = 12  # lines of the learner's output that are shown
NOT_THEIRS = ("-----", "program order")  # lines that pytest and the course print
LAVISH = 1.5  # times the sectors that its bytes need: worth a sentence


def run_checks(which: str | int | None, impl: str = "exercises", again: str = "") -> bool:
    """Check a lesson, one exercise or everything in a process of its own; print a summary; True if
    nothing failed or is to do. again: how to check one exercise again, if not by a command.
    """
    entries, console = all_exercises(which), Console(highlight=False, soft_wrap=True)
    folder_of(impl)  # an unknown one is said at once
    with console.status(said("checking …")):
        records = records_of(entries, impl)
    kernels = [e for e in entries if status_of(e, records) == PASS and has_kernel(e)]
    compiled = []
    if kernels and has_triton() and not has_gpu():
        with console.status(said("running the compiled kernels …")):
            compiled = records_of(kernels, impl, {CHIP: "90", "TRITON_INTERPRET": "0"})
    statuses = {}
    for entry in entries:
        statuses[entry] = _print_exercise(
            console, entry, records, again or command_for(entry, impl)
        )
        if entry in kernels and compiled:
            console.print("          " + escape(said(traffic_of(entry, compiled))))
    found = list(statuses.values())
    counts = [f"{LOOKS[s]} {found.count(s)} {said(s)}[/]" for s in LOOKS if s in found]
    no_pass = f"   ({said('NOT RUN is no pass')})" if NOT_RUN in found else ""
    console.print("  ".join(counts) + no_pass)
    if impl == "exercises":
        remember(statuses)
    return not {FAIL, TODO} & set(found)


def command_for(entry: Exercise, impl: str) -> str:
    """What checks one exercise again: what was called, make, `inference-ladder` or Python."""
    if impl == "exercises" and "MAKELEVEL" in os.environ:
        return f"make check LESSON={entry.id}"
    folder = "" if impl == "exercises" else f" --impl {impl}"
    if command := typed(""):
        return f"{command} {entry.id}{folder}"
    inside = Path(sys.prefix).is_relative_to(ROOT)
    python = os.path.relpath(sys.executable, ROOT) if inside else "python"
    return f"{python} -m lessons.toolbox.exercises check {entry.id}{folder}"


def status_of(entry: Exercise, records: list[dict[str, str]]) -> str:
    """That of its worst check; no check is no pass either."""
    found = [record["status"] for record in records if record.get("exercise") == entry.id]
    return next((status for status in LOOKS if status in found), NOT_RUN)


def traffic_of(entry: Exercise, records: list[dict[str, str]]) -> str:
    """One sentence on the memory traffic of a kernel's compiled code, from its most telling
    check.
    """
    mine = [record for record in records if record.get("exercise") == entry.id]
    if failed := next((r["message"] for r in mine if r["status"] == FAIL), ""):
        return f"its code compiled for an H100 is not right: {failed}"
    found = [json.loads(record["sectors"]) for record in mine if "sectors" in record]
    if not found:
        return "its code compiled for an H100 was not run by these checks"
    asked, least, line = max(found, key=lambda row: row[0] - row[1])
    if asked <= LAVISH * least:
        return "compiled for an H100 it is right too, and no line wastes sectors of memory"
    return (
        f"compiled for an H100 it is right too; line {line} asks for {asked:,} sectors of 32 bytes "
        f"where {least:,} would do"
    )


def records_of(
    entries: list[Exercise], impl: str, variables: dict[str, str] | None = None
) -> list[dict[str, str]]:
    """The properties that tests/exercises/conftest.py gives every check. Each exercise by itself if
    the run broke off, because one that hangs or crashes must not hide the others.
    """
    files = sorted({f"tests/exercises/test_l{entry.lesson}.py" for entry in entries})
    marks = " or ".join(entry.marker for entry in entries)
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *files]
    command += ["-o", "junit_logging=system-out"]  # what the learner prints
    # installed plugins take longer to import than most checks to run
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | (variables or {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command += ["-m", marks, "--impl", impl, "--junitxml", str(report)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace"
        )
        if done.returncode in (0, 1) and report.exists():
            cases = ElementTree.parse(report).iter("testcase")
            return [_record(case) for case in cases]
    if len(entries) > 1:
        return [record for entry in entries for record in records_of([entry], impl, variables)]
    return [{"exercise": entries[0].id, "status": FAIL, "message": _why_it_broke_off(done)}]


def _record(case: ElementTree.Element) -> dict[str, str]:
    record = {p.get("name"): p.get("value") for p in case.iter("property")}
    return record | {"prints": case.findtext("system-out", "")}


def _why_it_broke_off(done: subprocess.CompletedProcess) -> str:
    if done.returncode in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
        what = "your code read or wrote out of bounds, and Python crashed"
    elif "Timeout (" in done.stderr:  # faulthandler's word
        what = "nothing could interrupt it, so the run was ended. An endless loop?"
    else:
        what = f"the run broke off with exit code {done.returncode}"
    started = re.findall(r"::test_(\S+)", done.stdout)
    # faulthandler names the learner's line, if the learner's code was running
    line = re.search(r'File ".*?(\w+/l\d\d_\w+\.py)", line (\d+)', done.stderr)
    where = f" ({line[1]}, line {line[2]})" if line else ""
    return ": ".join([*started[-1:], said(what)]) + where


def _print_exercise(
    console: Console, entry: Exercise, records: list[dict[str, str]], again: str
) -> str:
    """Print one exercise; returns its status."""
    mine = [record for record in records if record.get("exercise") == entry.id]
    found, status = [record["status"] for record in mine], status_of(entry, records)
    statement = statement_of(entry)
    count = said(f"{found.count(PASS)} of {len(found)} checks passed")
    title = f"[bold]{entry.id}[/]  {escape(said(entry.title, statement))}"
    # set_cell_size, because a letter of Hangul is as wide as two others
    console.print(f"{LOOKS[status]} {set_cell_size(said(status), 7)}[/] {title}  [dim]{count}[/]")
    if status in (FAIL, NOT_RUN):
        first = next((r for r in mine if r["status"] == status), {"message": "no check ran"})
        lines = [*message_of(first, statement)]
        if status == FAIL:
            lines += [f"  {line}" for line in _prints(first)]
            lines.append(said(f"again: {again}"))
        for line in lines:
            console.print("          " + escape(line))
    return status


def _prints(failed: dict[str, str]) -> list[str]:
    """What the learner's code printed in that check, its last lines."""
    text = failed.get("prints", "").strip("\n")
    lines = [line for line in text.splitlines() if not line.startswith(NOT_THEIRS)]
    left = [said(f"… {len(lines) - PRINTS} lines before")] if len(lines) > PRINTS else []
    return [said("it printed:"), *left, *lines[-PRINTS:]] if lines else []
