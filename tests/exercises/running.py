"""Run one check on one implementation: a status and one message, whatever the implementation does.
conftest.py reports them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lessons.toolbox.exercises.exercise import Exercise, ExerciseError, untouched_line
from lessons.toolbox.exercises.loading import describe, load_exercise, source_of
from tests.exercises.checking import Check, alike, comparable
from tests.exercises.wrong import WrongAnswer

PASS, FAIL, TODO, NOT_RUN = "PASS", "FAIL", "TODO", "NOT RUN"
# a native call cannot be interrupted; this long after its limit the whole process goes
HANG_GRACE_S = 15.0
HANG_EXIT_CODE = 70


@dataclass(frozen=True)
class Outcome:
    status: str
    message: str = ""
    results: tuple = ()  # what the implementation returned, call by call
    timed_out: bool = False


class TimeUp(BaseException):
    """Not an Exception, because `except Exception` inside an endless loop would swallow it."""


class Recorder:
    """Stands in for an implementation and keeps what it returned."""

    def __init__(self, function: Callable):
        self.function, self.results = function, []

    def __call__(self, *args, **kwargs) -> Any:
        result = self.function(*args, **kwargs)
        self.results.append(
            tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, result)
        )
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def load(folder: Path, entry: Exercise) -> Callable:
    """The implementation in a folder. Raises NotImplementedError for an untouched stub,
    ExerciseError if it cannot be loaded.

    A file that failed once fails the same way again at once, because one that hangs while loading
    would hang every check.
    """
    path = folder / entry.file
    if path not in _failed:
        if line := untouched_line(source_of(folder, entry), entry.id):
            raise NotImplementedError(
                f"Exercise {entry.id}: {entry.title} ({path.parent.name}/{path.name}, line {line})"
            )
        _failed[path] = (
            f"{path.parent.name}/{path.name} does not finish loading: is there a loop outside "
            f"every function?"
        )
        try:
            function = load_exercise(folder, entry)
        except ExerciseError as error:
            _failed[path] = str(error)
            raise
        del _failed[path]
        return function
    raise ExerciseError(_failed[path])


_failed: dict[Path, str] = {}


def run_check(
    check: Check,
    loader: Callable[[], Callable],
    case: str | None,
    seed: int,
    path: Path | None = None,
) -> Outcome:
    """One run of a check on what `loader` returns. path: the implementation's file, for messages
    that name its lines.
    """
    recorder = Recorder(lambda: None)
    arguments = {} if case is None else {"case": case}
    try:
        with time_limit(check.seconds):
            recorder.function = loader()
            torch.manual_seed(seed)
            check.function(recorder, seed=seed, **arguments)
    except TimeUp:
        return Outcome(
            FAIL,
            f"{_label(check, case)}: stopped after {check.seconds:g} s. Is there an endless loop?",
            timed_out=True,
        )
    except pytest.skip.Exception as skip:
        return Outcome(NOT_RUN, str(skip.msg))
    except ExerciseError as error:
        return Outcome(FAIL, str(error))
    except (Exception, SystemExit, pytest.fail.Exception) as error:
        if todo := _untouched(error):
            return Outcome(TODO, todo)
        plain = isinstance(error, (AssertionError, pytest.fail.Exception)) and str(error)
        message = str(error) if plain else describe(error, path or Path())
        return Outcome(FAIL, f"{_label(check, case)}: {message}", tuple(recorder.results))
    return Outcome(PASS, "", tuple(recorder.results))


def _label(check: Check, case: str | None) -> str:
    return check.name if case is None else f"{check.name}[{case}], {check.cases[case]}"


def _untouched(error: BaseException | None) -> str | None:
    """The message of a stub anywhere in the chain of causes: Triton's interpreter wraps what a
    kernel raises.
    """
    while error is not None:
        if isinstance(error, NotImplementedError) and str(error).startswith("Exercise "):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def hint_for(
    failed: Outcome, check: Check, answers: list[WrongAnswer], case: str | None, seed: int
) -> str | None:
    """The hint of the known wrong answer that fails this check with the same results, best with the
    same message too.

    Results that cannot be compared (objects of a class) leave only the message, which two different
    slips may share.
    """
    found = None
    for answer in answers:
        outcome = run_check(check, lambda answer=answer: answer.function, case, seed)
        same_message = outcome.message == failed.message
        if outcome.status == FAIL and (
            alike(outcome.results, failed.results) if comparable(failed.results) else same_message
        ):
            if same_message:
                return answer.hint
            found = found or answer.hint
    return found


# ---------------------------------------------------------------- time

on_hang: Callable[[str], None] = lambda message: None  # conftest.py writes the last message down


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp after `seconds`, again and again until it is heard; if it never is, end the
    process with HANG_EXIT_CODE.
    """
    _watchdog.watch(seconds)
    alarm = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if alarm:
        previous = signal.signal(signal.SIGALRM, _time_up)
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        _watchdog.rest()


def _time_up(signum, frame):
    raise TimeUp


class Watchdog:
    """One thread for the whole run, because starting one per check would cost more than most
    checks.
    """

    def __init__(self):
        self.deadline, self.seconds, self.thread = None, 0.0, None

    def watch(self, seconds: float) -> None:
        self.seconds = seconds + HANG_GRACE_S
        self.deadline = time.monotonic() + self.seconds
        if self.thread is None:
            self.thread = threading.Thread(target=self._look, daemon=True)
            self.thread.start()

    def rest(self) -> None:
        self.deadline = None

    def _look(self) -> None:
        while True:
            time.sleep(1.0)
            deadline = self.deadline
            if deadline is not None and time.monotonic() > deadline:
                message = f"nothing could interrupt it for {self.seconds:g} s, so the whole run ended here"
                on_hang(message)
                os.write(2, f"\nexercises: {message}\n".encode())
                os._exit(HANG_EXIT_CODE)


_watchdog = Watchdog()
