"""Exercises: solutions/ is the source, exercises/ is generated from it, and neither is imported to
be listed.

    @exercise("2.1", "Attention with a causal mask", minutes=20, difficulty=2,
              replaces="lessons.l02_….naive:attention")
    def attention(q, k, v):
        '''The docstring stays.'''
        group = q.shape[1] // k.shape[1]     # so does every line outside the markers
        # SOLUTION
        return ...                           # the learner gets a `raise NotImplementedError` here
        # STUB
        # return ...                         # optional, "find the bug": comes after that line
        # END

A gap in a helper that carries no decorator names its exercise: `# SOLUTION 2.1`.

    python -m lessons.toolbox.exercises generate [02] [--force]   write exercises/, but never over
                                                  your edits (with --force: after a backup)
    python -m lessons.toolbox.exercises cells [02]         the exercises in the notebooks, likewise
    python -m lessons.toolbox.exercises check [02 | 2.1]   what `make check` runs
    python -m lessons.toolbox.exercises progress [--export FILE]   the map of the course, as CSV
    python -m lessons.toolbox.exercises kills [02]         which check rejects which wrong answer
    python -m lessons.toolbox.exercises kernels            what each kernel exercise asks for
    python -m lessons.toolbox.exercises otter 02           the lesson as an Otter-Grader assignment
    python -m lessons.toolbox.exercises nbgrader 02        the same for nbgrader
"""

import ast
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOLUTIONS, EXERCISES = ROOT / "solutions", ROOT / "exercises"


class ExerciseError(ValueError):
    """One line for the person at the keyboard."""


@dataclass(frozen=True)
class Exercise:
    id: str  # "2.1": lesson 02, first exercise
    title: str
    name: str  # of the decorated function or class
    file: str  # "l02_naive_attention.py", the same in solutions/ and exercises/
    lines: range  # where it stands in the solution
    minutes: int
    difficulty: int  # 1 (a few lines) to 4 (an evening)
    replaces: str | None = None  # "module:function" that a solved exercise can stand in for
    through: str | None = None  # "module:function" that gives it the arguments of what it replaces

    @property
    def lesson(self) -> str:
        return self.file[1:3]

    @property
    def marker(self) -> str:
        """What `pytest -m` selects: ex2_1."""
        return "ex" + self.id.replace(".", "_")


def exercise(
    id: str,
    title: str,
    *,
    minutes: int,
    difficulty: int,
    replaces: str | None = None,
    through: str | None = None,
) -> Callable:
    """Mark the function or class that a learner writes. Every argument is a literal, because the
    file is also read without importing it.
    """
    return lambda target: target


# ---------------------------------------------------------------- reading, without importing


def all_exercises(which: str | int | None = None) -> list[Exercise]:
    """Every exercise of the course, of one lesson (3, "03", "l03"), or a single one ("3.1"), in
    order. Raises ExerciseError for an unknown one, naming what there is.
    """
    files = sorted(SOLUTIONS.glob("l[0-9][0-9]_*.py"))
    entries = [entry for path in files for entry in read_exercises(path)]
    if which is None:
        return entries
    name = str(which).removeprefix("l")
    chosen = [
        entry for entry in entries if name in (entry.id, entry.lesson, str(int(entry.lesson)))
    ]
    if not chosen:
        known = ", ".join([path.name[1:3] for path in files] + [entry.id for entry in entries])
        raise ExerciseError(f"exercise or lesson {which!r} is unknown; accepted: {known}")
    return chosen


def read_exercises(path: Path) -> list[Exercise]:
    """The exercises that a solution file declares. Raises ValueError or TypeError for a declaration
    that cannot work.
    """
    return list(_declared(path.name, path.read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=256)  # all files are asked for, again and again
def _declared(file: str, source: str) -> tuple[Exercise, ...]:
    found = []
    for node in ast.parse(source).body:
        for call in getattr(node, "decorator_list", []):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "exercise":
                id, title = map(ast.literal_eval, call.args)
                options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                lines = range(node.lineno, node.end_lineno + 1)
                found.append(Exercise(id, title, node.name, file, lines, **options))
    return tuple(found)


def has_kernel(entry: Exercise) -> bool:
    """Whether the learner writes a part of a Triton kernel."""
    source = (SOLUTIONS / entry.file).read_text(encoding="utf-8")
    lines = source.splitlines()
    return any(
        first in entry.lines or f"# SOLUTION {entry.id}" in map(str.strip, lines[first:last])
        for first, last in _kernels(source)
    )


@functools.lru_cache(maxsize=256)
def _kernels(source: str) -> list[tuple[int, int]]:
    """First and last line of each Triton kernel."""
    found = []
    for node in ast.parse(source).body:
        if any(ast.unparse(call) == "triton.jit" for call in getattr(node, "decorator_list", [])):
            found.append((node.lineno, node.end_lineno))
    return found


def untouched_line(source: str, exercise_id: str) -> int | None:
    """The line at which an exercise still raises NotImplementedError("Exercise 2.1: …"), None once
    it is gone.

    Read from the text, because a stub inside a Triton kernel cannot raise on a GPU.
    """
    stub = rf"(?m)^\s*raise NotImplementedError\(\s*[\"']Exercise {re.escape(exercise_id)}:"
    found = re.search(stub, source)
    return _line(source, found.end()) if found else None


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---------------------------------------------------------------- generating

HEADER = """\
# Yours to edit: put your code in place of each `raise NotImplementedError`, \
then run  make check LESSON={lesson}
# Generated from solutions/{file}, checksum {checksum}. \
Generating again never overwrites your edits.
# ruff: noqa
"""
MARK = r" *# (?:SOLUTION|STUB|END)(?: \S+)?$"
LINES = rf"((?:(?!{MARK}).*\n)*)"
GAP = re.compile(rf"(?m)^( *)# SOLUTION(?: (\S+))?\n{LINES}(?: *# STUB\n{LINES})? *# END$")


def generate(path: Path) -> str:
    """The text of exercises/<same name> for a solution file. Raises ExerciseError for markers that
    do not pair up.
    """
    source = path.read_text(encoding="utf-8")
    entries = {entry.id: entry for entry in read_exercises(path)}

    def stub(gap: re.Match) -> str:
        line = _line(source, gap.start())
        around = [id for id, entry in entries.items() if line in entry.lines]
        entry = entries.get(gap[2] or "".join(around))
        if entry is None:
            raise ExerciseError(
                f"{path.name}, line {line}: this gap is in no exercise; write `# SOLUTION <id>`"
            )
        message = json.dumps(f"Exercise {entry.id}: {entry.title}", ensure_ascii=False)
        left = re.sub(r"(?m)^( *)# ?", r"\1", gap[4] or "")
        return f"{gap[1]}raise NotImplementedError({message})\n{left}".rstrip("\n")

    body = GAP.sub(stub, source)
    rest = GAP.sub(lambda gap: "\n" * gap[0].count("\n"), source)
    if mark := re.search(rf"(?m)^{MARK}", rest):
        raise ExerciseError(
            f"{path.name}, line {_line(rest, mark.start())}: `{mark[0].strip()}` has no partner; "
            "the order is SOLUTION[, STUB], END"
        )
    return HEADER.format(lesson=path.name[1:3], file=path.name, checksum=_checksum(body)) + body


def is_edited(text: str) -> bool:
    """Whether a generated text was changed: its header's checksum no longer fits (or the
    header is gone).
    """
    header, _, body = text.partition("# ruff: noqa\n")
    return f"checksum {_checksum(body)}." not in header


def write_stub(path: Path, folder: Path = EXERCISES, force: bool = False) -> str:
    """Bring one file of `folder` up to date with its solution; returns what happened, in words.

    An edited file is left alone unless `force`, and then copied first to a backup that never
    replaces another one.
    """
    fresh, target, note = generate(path), folder / path.name, "written"
    if target.exists():
        current = target.read_text(encoding="utf-8", errors="replace")
        if current == fresh:
            return f"{target.name}: up to date"
        if is_edited(current):
            if not force:
                return f"{target.name}: kept, because you edited it (--force: again, with a backup)"
            names = (target.with_suffix(f".backup{n}.py") for n in itertools.count(1))
            backup = next(name for name in names if not name.exists())
            target.rename(backup)
            note = f"written anew; your version is {backup.name}"
    target.write_text(fresh, encoding="utf-8")
    return f"{target.name}: {note}"
