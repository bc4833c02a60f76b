"""Run one check on one implementation: a status and one message, whatever the implementation does.
conftest.py reports them.
"""

import faulthandler
import importlib
import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode, TorchDispatchMode

from lessons.toolbox.exercises.exercise import Exercise, ExerciseError
from lessons.toolbox.exercises.loading import describe, named
from lessons.toolbox.exercises.parts import hints_of
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.kernels.order import program_order
from lessons.toolbox.kernels.triton_ import TritonMissing
from tests.exercises.checking import Check, alike, comparing, note, seen
from tests.exercises.given import arguments_of, numbers_of, place_of, values_at
from tests.exercises.hint_rules import hint_of_exception, hint_of_refusal
from tests.exercises.hints import hint_of_failure
from tests.exercises.wrong import WrongAnswer

PASS, FAIL, TODO, NOT_RUN = "PASS", "FAIL", "TODO", "NOT RUN"
# a native call cannot be interrupted; this long after its limit the whole process goes
HANG_GRACE_S = 15.0


@dataclass(frozen=True)
class Outcome:
    status: str
    message: str = ""
    error: str = ""  # the exception's class
    results: tuple = ()  # what the check saw before it ended
    said: str = ""  # the exception's class and message, without the line
    numbers: tuple = ()  # (name, value) of those that it was called with
    given: str = ""  # what the implementation was called with last
    place: str = ""  # its line, where the message does not name it
    values: str = ""  # what the names in that line stand for
    comparing: tuple = ()  # the pairs (yours, expected) of a comparison that failed


class TimeUp(BaseException):
    """Not an Exception, because `except Exception` inside an endless loop would swallow it."""


class Recorder:
    """Stands in for an implementation and keeps what it returned."""

    def __init__(self, function: Callable):
        self.bare, self.given, self.numbers = function, "", {}

    def __call__(self, *args, **kwargs) -> Any:
        self.given = arguments_of(self.bare, args, kwargs)
        self.numbers = numbers_of(self.bare, args, kwargs)
        return note(self.bare(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)


def checks_of(entry: Exercise) -> list[Check]:
    """The checks of an exercise, case by case, in the order of the file."""
    module = importlib.import_module(f"tests.exercises.test_l{entry.lesson}")
    found = [check for f in vars(module).values() for check in getattr(f, "checks", {}).values()]
    return [check for check in found if check.exercise_id == entry.id]


def run_check(
    check: Check, loader: Callable[[], Callable], seed: int, path: Path = Path()
) -> Outcome:
    """One run of a check on what `loader` returns. path: the implementation's file, for messages
    that name its lines.
    """
    seen.clear()
    comparing.clear()
    implementation = None
    try:
        with time_limit(check.seconds), _modes_at_no_cost(), in_bounds():
            implementation = Recorder(loader())
            torch.manual_seed(seed)
            check(implementation, seed)
    except pytest.skip.Exception as skip:
        return Outcome(NOT_RUN, str(skip.msg))
    except TritonMissing as error:  # macOS: the code may be right, but no kernel runs here
        return Outcome(NOT_RUN, str(error))
    except ExerciseError as error:
        return Outcome(FAIL, str(error))
    except (Exception, SystemExit, pytest.fail.Exception, TimeUp) as error:
        if todo := _untouched(error):
            return Outcome(TODO, todo)
        if isinstance(error, TimeUp):
            message = f"stopped after {check.seconds:g} s. Is there an endless loop?"
        elif isinstance(error, (AssertionError, pytest.fail.Exception)) and str(error):
            # What pytest appends to the message of an assert is about the check, not the answer.
            message = str(error).split("\nassert ")[0]
        else:
            message = describe(error, path)
        place = place_of(error, path)
        return Outcome(
            FAIL,
            f"{check.label}: {message}",
            type(error).__name__,
            tuple(seen),
            named(error),
            tuple(getattr(implementation, "numbers", {}).items()),
            getattr(implementation, "given", ""),
            "" if place and place.partition(":")[0] in message else place,
            values_at(error, path),
            tuple(comparing) if isinstance(error, AssertionError) else (),
        )
    return Outcome(PASS)


def _untouched(error: BaseException | None) -> str | None:
    """The message of a stub anywhere in the chain of causes: Triton's interpreter wraps what a
    kernel raises.
    """
    while error is not None:
        if isinstance(error, NotImplementedError) and str(error).startswith("Exercise "):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


# ---------------------------------------------------------------- hints


def explained(outcome: Outcome, entry: Exercise, slip: str | None, case: str | None) -> str:
    """The whole message of a failure: what, where, what was given, and a hint. slip: the hint of
    the known wrong answer that it looks like; without one, what stands out; else the first hint of
    the exercise. case: what case_hint says.
    """
    lines = [outcome.message]
    if outcome.place:
        lines.append(f"at {outcome.place}")
    if outcome.given:
        lines.append(f"exercise {entry.id} was given: {outcome.given}")
    if outcome.values:
        lines.append(f"in that line: {outcome.values}")
    hint = general_hint(outcome)
    if slip:
        lines.append(f"looks like: {slip}")
    elif hint:
        lines.append(f"hint: {hint}")
    if case:
        lines.append(case)
    if not (slip or hint or case) and (hints := hints_of(entry)):
        lines.append(f"hint 1 of {len(hints)}: {hints[0]}")
    return "\n  ".join(lines)


def general_hint(outcome: Outcome) -> str | None:
    """A hint by what is seen of a failure, without knowing which slip it was."""
    if outcome.error in ("AssertionError", "NotEquivalent"):
        return hint_of_failure(outcome.message, outcome.comparing, dict(outcome.numbers))
    if hint := hint_of_refusal(outcome.message):
        return hint
    is_time = outcome.error == "TimeUp"
    hint = hint_of_exception(outcome.message if is_time else outcome.said)
    if not hint and outcome.values:
        return "which of the values in that line is not what you expect? Print it one line before"
    return hint


def case_hint(check: Check, function: Callable, checks: list[Check], seed: int = 0) -> str | None:
    """In which cases a check passes that fails in this one: what they lack is what matters. Of the
    docstring's example, that it is worked out there.
    """
    if "example" in check.name:
        return "the docstring works this example out: follow it by hand, number by number"
    if not check.why:
        return None
    with redirect_stdout(io.StringIO()):
        passes = []
        for other in checks:
            if other.function is check.function and other.case != check.case:
                outcome = _outcome(other, function, seed)
                if outcome.error == "TimeUp":
                    return None  # and the others might take as long
                passes += [other.case] if outcome.status == PASS else []
    if not passes:
        return None
    return f"it passes for {', '.join(passes)}; not for {check.case}: {check.why}"


def hint_for(
    check: Check, function: Callable, answers: list[WrongAnswer], checks: list[Check], seed: int = 0
) -> str | None:
    """The hint of the one known wrong answer that looks like this implementation: the same results
    in this check, failures in the same ones of all `checks`, and in two thirds of these the same
    results too (a slip may meet another line of the learner's in the rest).

    None where no answer or several fit, because a hint that is not true costs more than it helps.
    """
    with redirect_stdout(io.StringIO()):  # what the learner prints belongs to the check itself
        hints = {
            answer.hint
            for answer in answers
            if _same(check, function, answer.function, seed)
            and _fail_alike(checks, function, answer.function, seed)
        }
    return hints.pop() if len(hints) == 1 else None


def _fail_alike(checks: list[Check], mine: Callable, theirs: Callable, seed: int) -> bool:
    failures = []
    for check in checks:
        status = _outcome(check, mine, seed).status
        if status != _outcome(check, theirs, seed).status:
            return False
        if status == FAIL:
            failures.append(_same(check, mine, theirs, seed))
    return 3 * sum(failures) >= 2 * len(failures)


@cache
def _outcome(check: Check, function: Callable, seed: int) -> Outcome:
    # in one order of programs, because the program that fails first decides what an error says
    with program_order(seed):
        return run_check(check, lambda: function, seed)


def forget_outcomes() -> None:
    """Free the results that the search for a slip keeps."""
    _outcome.cache_clear()


def _same(check: Check, mine: Callable, theirs: Callable, seed: int) -> bool:
    a, b = _outcome(check, mine, seed), _outcome(check, theirs, seed)
    if (a.status, a.error) != (b.status, b.error) or not alike(a.results, b.results):
        return False
    # Of a failed comparison the values are in the results, and the rest of the first line says
    # which rule it broke. A picture of what the learner's own kernel touched may be below it.
    firsts = [outcome.message.partition("\n")[0] for outcome in (a, b)]
    texts = [re.sub(r"-?\d+\.\d+(e[-+]\d+)?", "#", first) for first in firsts]
    if a.error in ("AssertionError", "NotEquivalent"):
        return texts[0] == texts[1]
    return a.said == b.said


# ---------------------------------------------------------------- time

stderr = sys.stderr  # conftest.py puts the real one here, which pytest does not capture


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp after `seconds`, again and again until it is heard; if it never is, print where
    it hangs and end the process.
    """
    faulthandler.dump_traceback_later(seconds + HANG_GRACE_S, exit=True, file=stderr)
    alarm = hasattr(signal, "SIGALRM")
    if alarm:
        previous = signal.signal(signal.SIGALRM, _time_up)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


def _time_up(signum, frame):
    raise TimeUp


@contextmanager
def stopped_clock() -> Iterator[None]:
    """What takes place within it does not count for the time limit around it."""
    left, again = signal.setitimer(signal.ITIMER_REAL, 0) if hasattr(signal, "SIGALRM") else (0, 0)
    if left:
        faulthandler.cancel_dump_traceback_later()
    try:
        yield
    finally:
        if left:
            faulthandler.dump_traceback_later(left + HANG_GRACE_S, exit=True, file=stderr)
            signal.setitimer(signal.ITIMER_REAL, left, again)


@contextmanager
def _modes_at_no_cost() -> Iterator[None]:
    """Within it a TorchDispatchMode costs a check no time, and a check without one nothing at all.

    The first operation within a mode imports SymPy. On a slow machine that takes longer than a
    check may, and an import that was broken off fails again and again.
    """

    def enter(mode: TorchDispatchMode) -> TorchDispatchMode:
        _import_what_modes_need()
        return _enter_mode(mode)

    with mock.patch.object(TorchDispatchMode, "__enter__", enter):
        yield


_enter_mode = TorchDispatchMode.__enter__


@cache
def _import_what_modes_need() -> None:
    plain = mock.patch.object(TorchDispatchMode, "__enter__", _enter_mode)
    with stopped_clock(), plain, BaseTorchDispatchMode():
        torch.zeros(1) + 1
