"""What every command of the course has in common: a mistake is one line and exit code 2, Ctrl-C is
one line and exit code 130.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lessons.toolbox.language import said
from lessons.toolbox.model.arguments import one_line

NUMBERS = {"int": "a whole number", "float": "a number"}
NO_NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.*)", re.DOTALL)
ROOM_BYTES = 2**20  # more than a record and its figures take
TYPED = "LADDER_COMMAND"  # the command `inference-ladder` says by it what the reader typed


class OneLineParser(argparse.ArgumentParser):
    """Errors without the usage text in front of them. `prog` is "python -m a.b.command"."""

    def error(self, message: str) -> None:
        """Exit with 2. What argparse says of a number is said as everywhere in the course."""
        if found := NO_NUMBER.fullmatch(message):
            flag, kind, value = found.groups()
            message = f"{flag}: got {value}; accepted: {NUMBERS[kind]}"
        self.exit(2, one_line(f"{self.prog.removeprefix('python -m ')}: {message}") + "\n")


def typed(otherwise: str) -> str:
    """What the reader typed to start this process: "inference-ladder check", or `otherwise` where
    the course was not started by that command.
    """
    return os.environ.get(TYPED, otherwise)


def was_interrupted(error: BaseException) -> bool:
    """Whether it is Ctrl-C, or what Python 3.11 and older make of one while a class is created."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def say_interrupted(kind: type, error: BaseException, trace) -> None:
    """An excepthook: one line for Ctrl-C, everything for any other error."""
    if was_interrupted(error):
        print("interrupted", file=sys.stderr)
        if not isinstance(error, KeyboardInterrupt):
            raise SystemExit(130)  # Python would exit with 1
    else:
        sys.__excepthook__(kind, error, trace)


def check_writable(folder: Path) -> None:
    """Make the folder of --out, and raise ValueError if no file can be written into it: better now
    than when everything was measured.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a file without a name, which leaves nothing behind even if it is interrupted
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM_BYTES))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ValueError(
            f"--out: {error}; accepted: a folder, here or to be made, with {ROOM_BYTES // 1024} KiB"
        ) from None


def run_command(name: str, run: Callable[[], int], interrupted: str = "interrupted") -> int:
    """The exit code of run(): 2 after a mistake (ValueError, OSError), 130 after Ctrl-C, each told
    in one line.

    Call it before anything slow is imported: importing takes seconds, and Ctrl-C may come
    meanwhile.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal of ASCII has no ×
    try:
        return run()
    except (ValueError, OSError) as error:
        print(one_line(f"{name}: {said(str(error))}"), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, RuntimeError) as error:
        if not was_interrupted(error):
            raise
        print(one_line(f"{name}: {said(interrupted)}"), file=sys.stderr)
        return 130
