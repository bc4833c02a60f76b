"""pytest for exercises: --impl, a marker per exercise, and PASS, FAIL, TODO or NOT RUN with one
message each. `--junitxml` writes them down.
"""

import json
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from lessons.toolbox.exercises.exercise import ExerciseError, all_exercises
from lessons.toolbox.exercises.loading import folder_of, load_exercise
from lessons.toolbox.gpu.arguments import WATCHERS
from lessons.toolbox.gpu.counters import counting
from lessons.toolbox.measure.device import compiled_chip
from tests.exercises import running
from tests.exercises.running import FAIL, NOT_RUN, PASS, TODO, Outcome
from tests.exercises.wrong import answers_of

collect_ignore = []


def pytest_addoption(parser):
    group = parser.getgroup("exercises")
    group.addoption(
        "--impl",
        default="solutions",
        help="what to check: solutions, exercises (yours), or a folder",
    )
    group.addoption("--seed", type=int, default=0, help="of the checks' random inputs")


def pytest_configure(config):
    # pytest reads this file too late to learn of the options where no path was given
    impl = config.getoption("--impl", "solutions")
    try:
        config.exercise_folder = folder_of(impl)
        config.exercises = {entry.id: entry for entry in all_exercises()}
    except ExerciseError as error:
        raise pytest.UsageError(str(error)) from None
    for entry in config.exercises.values():
        config.addinivalue_line("markers", f"{entry.marker}: exercise {entry.id}, {entry.title}")
    if impl != "solutions":  # the tests of the tests are about solutions/
        collect_ignore.extend(["test_machinery.py", "test_learner.py", "test_kernel_work.py"])
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        running.stderr = os.dup(2)


@pytest.fixture
def impl():
    """Loaded where the check runs, so that a file which cannot be loaded gives a message, not an
    error.
    """


@pytest.fixture
def seed(request):
    return request.config.getoption("--seed", 0)


# ---------------------------------------------------------------- running

# exercise -> its first check that did, because fifteen times the limit tries any patience
_timed_out: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    checks = getattr(pyfuncitem.function, "checks", None)
    if checks is None:
        return None
    check = checks[pyfuncitem.funcargs.get("case")]
    with watching_sectors() as sectors:
        outcome = _run(check, pyfuncitem.config, pyfuncitem.funcargs["seed"])
    record = ("exercise", check.exercise_id), ("status", outcome.status)
    record += ("check", check.name), ("why", check.why)
    pyfuncitem.user_properties += [*record, ("message", outcome.message)]
    if sectors:
        pyfuncitem.user_properties.append(
            (
                "sectors",
                json.dumps(worst(sectors, pyfuncitem.config.exercises[check.exercise_id].file)),
            )
        )
    if outcome.status == NOT_RUN:
        pytest.skip(outcome.message)
    if outcome.status != PASS:
        pytest.fail(outcome.message, pytrace=False)
    return True


@contextmanager
def watching_sectors():
    """Within it, where kernels are compiled for the CPU, each launch is counted and kept."""
    launches = []
    if not compiled_chip():
        yield launches
        return
    WATCHERS.append(launches.append)
    try:
        with counting():
            yield launches
    finally:
        WATCHERS.remove(launches.append)


def worst(launches, file) -> tuple[int, int, int]:
    """(sectors, those that would do, line) of the line of `file` that asks for most in vain."""
    found = Counter()
    for launch in launches:
        columns = launch.counts.columns
        for place, instruction in enumerate(launch.kernel.instructions):
            # by its name, because a kernel that was compiled before may have come from elsewhere
            if Path(instruction.source.file).name == file:
                line = instruction.source.number
                found[line, "asked"] += int(columns["sectors"][place])
                found[line, "least"] += int(columns["least_sectors"][place])
    lines = {line for line, _ in found}
    rows = [(found[line, "asked"], found[line, "least"], line) for line in lines]
    return max(rows, key=lambda row: (row[0] - row[1], row[0]), default=(0, 0, 0))


def _run(check, config, seed) -> Outcome:
    entry, folder = config.exercises[check.exercise_id], config.exercise_folder
    if entry.id in _timed_out:
        return Outcome(FAIL, f"not tried, because {_timed_out[entry.id]} already ran out of time")
    path = folder / entry.file
    outcome = running.run_check(check, lambda: load_exercise(folder, entry), seed, path)
    if outcome.error == "TimeUp":
        _timed_out[entry.id] = check.name
    if outcome.status != FAIL or not outcome.error:
        return outcome
    slip = case = None
    if outcome.error != "TimeUp":  # another wait tells no more
        function, checks = load_exercise(folder, entry), running.checks_of(entry)
        wrong = answers_of(entry.lesson).wrong_for(entry.id)
        slip = running.hint_for(check, function, wrong, checks, seed)
        case = running.case_hint(check, function, checks, seed)
    return Outcome(FAIL, running.explained(outcome, entry, slip, case))


# ---------------------------------------------------------------- reporting


def _record(report) -> dict[str, str]:
    return dict(report.user_properties) if report.when == "call" else {}


def pytest_report_teststatus(report):
    status = _record(report).get("status")
    if status == TODO:
        return "todo", "T", TODO
    if status == NOT_RUN:
        return "not run", "N", NOT_RUN
    return None


def pytest_terminal_summary(terminalreporter):
    for category, text in (("todo", "still to do"), ("not run", "NOT RUN, which is no pass")):
        messages = {}
        for report in terminalreporter.stats.get(category, []):
            record = _record(report)
            messages.setdefault(record["exercise"], record["message"])
        for exercise_id, message in messages.items():
            terminalreporter.write_line(f"exercise {exercise_id} {text}: {message}")
