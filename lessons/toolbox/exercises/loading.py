"""Load a learner's file, or say in one line why not."""

import ast
import importlib.util
import sys
import traceback
import types
from pathlib import Path
from types import ModuleType

from lessons.toolbox.exercises.exercise import (
    ROOT,
    SOLUTIONS,
    Exercise,
    ExerciseError,
    untouched_line,
)


def folder_of(impl: str) -> Path:
    """ "solutions", "exercises" or any folder that holds such files. Raises ExerciseError if there
    is none.
    """
    folder = ROOT / impl  # a path of its own stays what it is
    if not folder.is_dir():
        raise ExerciseError(
            f"--impl: got {impl!r}; accepted: solutions, exercises, or a folder with files like "
            "theirs"
        )
    return folder


_never_loaded: set[Path] = set()  # files whose loading was broken off


def load_file(path: Path) -> ModuleType:
    """Import a file by its path, once. Raises ExerciseError: file, line, the line's text, what is
    wrong.

    A file that does not finish loading is not tried again, because every check would hang.
    """
    name = f"{path.parent.name}.{path.stem}"
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    if path in _never_loaded:
        raise ExerciseError(
            f"{short_path(path)} does not finish loading: is there a loop outside every function?"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # before running it, because dataclasses and Triton look their module up there
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (Exception, SystemExit)):
            raise ExerciseError(describe(error, path)) from None
        _never_loaded.add(path)
        raise
    return module


def load_exercise(folder: Path, entry: Exercise):
    """The function or class that solves an exercise in a folder. Raises NotImplementedError for an
    untouched stub, ExerciseError (one line) if it cannot be loaded.
    """
    path = folder / entry.file
    if not path.exists():
        raise ExerciseError(
            f"{short_path(path)} is missing; get it back: "
            f"python -m lessons.toolbox.exercises generate {entry.lesson}"
        )
    source = path.read_text(encoding="utf-8", errors="replace")
    if line := untouched_line(source, entry.id):
        raise NotImplementedError(
            f"Exercise {entry.id}: {entry.title} ({short_path(path)}, line {line})"
        )
    if borrowed := _borrowed(source, entry):
        raise ExerciseError(
            f"{short_path(path)} imports {borrowed}, which holds the answer: write exercise "
            f"{entry.id} without it"
        )
    found = getattr(load_file(path), entry.name, None)
    if found is None:
        raise ExerciseError(
            f"{short_path(path)} has no `{entry.name}` any more (exercise {entry.id})"
        )
    return found


def _borrowed(source: str, entry: Exercise) -> str | None:
    """The first name that a file imports and its solution does not, if the answer may lie there:
    the solutions, the reference, the exercise's own lesson, what the exercise replaces.
    """
    places = ["solutions", "reference"]
    # a lesson may have more than one file of exercises, so its room is found by its number
    places += [f"lessons.{room.name}" for room in (ROOT / "lessons").glob(f"l{entry.lesson}_*")]
    if entry.replaces:
        places.append(entry.replaces.replace(":", "."))

    def imported(text: str) -> list[str]:
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):
            return []  # load_file() says what is wrong
        plain = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
        wholes = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
        return plain + [f"{n.module}.{alias.name}" for n in wholes for alias in n.names]

    given = imported((SOLUTIONS / entry.file).read_text(encoding="utf-8"))
    inside = tuple(f"{place}." for place in places)
    new = (name for name in imported(source) if name not in given)
    return next((name for name in new if f"{name}.".startswith(inside)), None)


def describe(error: BaseException, path: Path) -> str:
    """An exception in one line: what, and where it passed through `path` (else where it was
    raised).
    """
    error = cause_of(error)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, code = error.lineno, (error.text or "").strip()
        return f"{short_path(path)}, line {line}: SyntaxError: {error.msg}: `{code}`"
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if frame.filename == str(path)), frames[-1])
    return f"{short_path(Path(at.filename))}, line {at.lineno}: {named(error)}: `{at.line}`"


def named(error: BaseException) -> str:
    """Its class and the first line of its message."""
    error = cause_of(error)
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}".rstrip(": ")


def cause_of(error: BaseException) -> BaseException:
    """What a kernel raised, which Triton's interpreter wraps once for each function on its way;
    else the exception itself.
    """
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        error = error.__cause__
    return error


def frames_in(error: BaseException, path: Path) -> list[tuple[types.FrameType, int]]:
    """Of an exception's way, the frames that are in a file, with their lines; the outermost
    first.
    """
    steps = traceback.walk_tb(cause_of(error).__traceback__)
    return [(frame, line) for frame, line in steps if frame.f_code.co_filename == str(path)]


def short_path(path: Path) -> str:
    return str(path).removeprefix(f"{ROOT}/")
