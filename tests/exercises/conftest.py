"""pytest for exercises: --impl, a marker per exercise, and PASS, FAIL, TODO or NOT RUN with one
message each.
"""

import json
from pathlib import Path

import pytest

from lessons.toolbox.exercises.exercise import ExerciseError, all_exercises, find_exercise
from lessons.toolbox.exercises.loading import folder_of
from tests.exercises import running
from tests.exercises.checking import Check
from tests.exercises.running import FAIL, NOT_RUN, PASS, TODO, Outcome, hint_for, load, run_check
from tests.exercises.wrong import answers_of


def pytest_addoption(parser):
    group = parser.getgroup("exercises")
    group.addoption(
        "--impl",
        default="solutions",
        help="what to check: solutions, exercises (yours), or a folder",
    )
    group.addoption("--seed", type=int, default=0, help="of the checks' random inputs")
    group.addoption(
        "--outcomes", default=None, help="also write one line of JSON per check into this file"
    )


def option(config, name: str, default):
    """An option's value; the default where pytest read this file too late to learn of the option
    (no path was given).
    """
    return config.getoption(name, default)


def pytest_configure(config):
    try:
        config.exercise_folder = folder_of(option(config, "--impl", "solutions"))
        exercises = all_exercises()
    except ExerciseError as error:
        raise pytest.UsageError(str(error)) from None
    for entry in exercises:
        config.addinivalue_line("markers", f"{entry.marker}: exercise {entry.id}, {entry.title}")
    for lesson in sorted({entry.lesson for entry in exercises}):
        config.addinivalue_line("markers", f"lesson{lesson}: every exercise of lesson {lesson}")


def pytest_ignore_collect(collection_path, config):
    """The tests of the tests are about solutions/, not about a learner's files."""
    if (
        collection_path.name in ("test_machinery.py", "test_learner.py")
        and option(config, "--impl", "solutions") != "solutions"
    ):
        return True


@pytest.fixture
def impl():
    """Loaded where the check runs, so that a file which cannot be loaded gives a message, not an
    error.
    """


@pytest.fixture
def seed(request):
    return option(request.config, "--seed", 0)


# ---------------------------------------------------------------- running

# exercise -> its first check that did, because fifteen times the limit tries any patience
_timed_out: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    check: Check | None = getattr(pyfuncitem.function, "check", None)
    if check is None:
        return None
    case, seed = pyfuncitem.funcargs.get("case"), pyfuncitem.funcargs["seed"]
    entry = find_exercise(check.exercise_id)
    folder = pyfuncitem.config.exercise_folder
    path = option(pyfuncitem.config, "--outcomes", None)
    running.on_hang = lambda message: (
        path and _write(Path(path), check, case, Outcome(FAIL, message))
    )
    if entry.id in _timed_out:
        outcome = Outcome(
            FAIL, f"not tried, because {_timed_out[entry.id]} already ran out of time"
        )
    else:
        outcome = run_check(check, lambda: load(folder, entry), case, seed, folder / entry.file)
    if outcome.timed_out:
        _timed_out[entry.id] = _record(check, case, FAIL, "")["check"]
    message = outcome.message
    if outcome.status == FAIL and outcome.results:
        hint = hint_for(outcome, check, answers_of(entry.lesson).wrong_for(entry.id), case, seed)
        message += f"\n  looks like: {hint}" if hint else ""
    pyfuncitem.user_properties.append(("exercise", _record(check, case, outcome.status, message)))
    if outcome.status == NOT_RUN:
        pytest.skip(message)
    if outcome.status != PASS:
        pytest.fail(message, pytrace=False)
    return True


def _record(check: Check, case: str | None, status: str, message: str) -> dict[str, str]:
    name = check.name + (f"[{case}]" if case else "")
    return {"exercise": check.exercise_id, "check": name, "status": status, "message": message}


def _write(path: Path, check: Check, case: str | None, outcome: Outcome) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_record(check, case, outcome.status, outcome.message)) + "\n")


# ---------------------------------------------------------------- reporting


def _outcome(report) -> dict[str, str] | None:
    return dict(report.user_properties).get("exercise") if report.when == "call" else None


def pytest_report_teststatus(report):
    outcome = _outcome(report)
    if outcome and outcome["status"] == TODO:
        return "todo", "T", TODO
    if outcome and outcome["status"] == NOT_RUN:
        return "not run", "N", NOT_RUN
    return None


class OutcomeFile:
    """Appends every outcome to a file, in the process that sees them all (under xdist the workers'
    reports arrive there).
    """

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if outcome := _outcome(report):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")


def pytest_sessionstart(session):
    path = option(session.config, "--outcomes", None)
    if path and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(OutcomeFile(Path(path)))


def pytest_terminal_summary(terminalreporter):
    for category, text in (("todo", "still to do"), ("not run", "NOT RUN, which is no pass")):
        messages = {}
        for report in terminalreporter.stats.get(category, []):
            outcome = _outcome(report)
            messages.setdefault(outcome["exercise"], outcome["message"])
        for exercise_id, message in messages.items():
            terminalreporter.write_line(f"exercise {exercise_id} {text}: {message}")
