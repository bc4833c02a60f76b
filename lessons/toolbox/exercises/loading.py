"""Load a learner's file, or say in one line why not; put solved exercises in the place of the
lessons' functions.
"""

import importlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType

from lessons.toolbox.exercises.exercise import (
    ROOT,
    Exercise,
    ExerciseError,
    all_exercises,
    untouched_line,
)


def folder_of(impl: str) -> Path:
    """ "solutions", "exercises" or any folder that holds such files. Raises ExerciseError if there
    is none.
    """
    folder = ROOT / impl if impl in ("solutions", "exercises") else Path(impl).resolve()
    if not folder.is_dir():
        raise ExerciseError(
            f"--impl: got {impl!r}; accepted: solutions, exercises, or a folder with files like "
            f"theirs"
        )
    return folder


def source_of(folder: Path, entry: Exercise) -> str:
    """The text of the file that holds an exercise. Raises ExerciseError if it is missing or not
    text.
    """
    path = folder / entry.file
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ExerciseError(
            f"{_short(path)} is missing; get it back: "
            f"python -m lessons.toolbox.exercises generate {entry.lesson}"
        ) from None
    except UnicodeDecodeError as error:
        raise ExerciseError(
            f"{_short(path)} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def load_file(path: Path) -> ModuleType:
    """Import a file by its path, once. Raises ExerciseError: file, line, the line's text, what is
    wrong.
    """
    name = f"{path.parent.name}.{path.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # before running it, because dataclasses and Triton look their module up there
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise ExerciseError(
                f"{_short(path)}, line {error.lineno}: {type(error).__name__}: {error.msg}: "
                f"`{(error.text or '').strip()}`"
            ) from None
        if isinstance(error, (Exception, SystemExit)):
            raise ExerciseError(describe(error, path)) from None
        raise
    return module


def load_exercise(folder: Path, entry: Exercise):
    """The function or class that solves an exercise in a folder. Raises ExerciseError, one line."""
    source_of(folder, entry)  # a missing file says how to get it back
    module = load_file(folder / entry.file)
    if not hasattr(module, entry.name):
        raise ExerciseError(
            f"{_short(folder / entry.file)} has no `{entry.name}` any more (exercise {entry.id})"
        )
    return getattr(module, entry.name)


def describe(error: BaseException, path: Path) -> str:
    """An exception in one line: what, and where it passed through `path` (else where it was
    raised).
    """
    frames = traceback.extract_tb(error.__traceback__)
    at = next(
        (f for f in reversed(frames) if f.filename == str(path)), frames[-1] if frames else None
    )
    first_line = next(iter(str(error).strip().splitlines()), "")
    what = f"{type(error).__name__}: {first_line}".rstrip(": ")
    if at is None:
        return what
    linecache.checkcache(at.filename)
    line = linecache.getline(at.filename, at.lineno).strip()
    return f"{_short(Path(at.filename))}, line {at.lineno}: {what}: `{line}`"


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# ---------------------------------------------------------------- drop-ins


def use_implementation(impl: str = "exercises") -> list[tuple[str, str, str]]:
    """Put every solved drop-in exercise in the place of the lesson's function, wherever a lesson or
    the reference imported it.

    Returns (exercise id, "module:function" that it replaces, "used" or why not), one entry per
    exercise with `replaces`. Solved means: no longer a stub. Whether it is right is for its checks,
    and for whoever compares the tokens. Call it once, before the work starts. Raises ExerciseError
    for an unknown folder.
    """
    folder = folder_of(impl)
    return [
        (entry.id, entry.replaces, _install(folder, entry))
        for entry in all_exercises()
        if entry.replaces
    ]


def _install(folder: Path, entry: Exercise) -> str:
    try:
        if line := untouched_line(source_of(folder, entry), entry.id):
            return f"not solved yet: {entry.file}, line {line}"
        yours = load_exercise(folder, entry)
    except ExerciseError as error:
        return f"cannot be loaded: {error}"
    module_name, _, name = entry.replaces.partition(":")
    original = getattr(importlib.import_module(module_name), name)
    wanted, got = (list(inspect.signature(f).parameters) for f in (original, yours))
    if got != wanted:
        return f"cannot stand in: it takes ({', '.join(got)}), the lesson calls it with ({', '.join(wanted)})"
    for loaded_name, module in list(sys.modules.items()):
        if loaded_name.startswith(("lessons.", "reference.")):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, yours)
    return "used"
