"""Exercises: solutions/ is the source, exercises/ is generated from it, and neither is imported to
be listed.

    @exercise("2.1", "Attention with a causal mask", minutes=20, difficulty=2, replaces="lessons.l02_….naive:attention")
    def attention(q, k, v):
        '''The docstring stays.'''
        group = q.shape[1] // k.shape[1]     # so does every line outside the markers
        # SOLUTION
        return ...                           # left out: the learner gets `raise NotImplementedError("Exercise 2.1: …")`
        # STUB
        # return ...                         # optional, "find the bug": uncommented, this stands below that line
        # END

A gap in a helper that carries no decorator names its exercise: `# SOLUTION 2.1`.

    python -m lessons.toolbox.exercises generate [02] [--force]   write exercises/ (never over your edits; --force: backup first)
    python -m lessons.toolbox.exercises check [02 | 2.1]          what `make check` runs
    python -m lessons.toolbox.exercises progress                  the map of the course
    python -m lessons.toolbox.exercises kills [02]                which check rejects which wrong answer
"""

import argparse
import ast
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.command import OneLineParser, run_command

ROOT = Path(__file__).resolve().parents[3]
SOLUTIONS, EXERCISES = ROOT / "solutions", ROOT / "exercises"


class ExerciseError(ValueError):
    """One line for the person at the keyboard."""


@dataclass(frozen=True)
class Exercise:
    id: str  # "2.1": lesson 02, first exercise
    title: str
    minutes: int
    difficulty: int  # 1 (a few lines) to 4 (an evening)
    replaces: str | None  # "module:function" that a solved exercise can stand in for
    name: str  # of the decorated function or class
    file: str  # "l02_naive_attention.py", the same in solutions/ and exercises/

    @property
    def lesson(self) -> str:
        return self.file[1:3]

    @property
    def marker(self) -> str:
        """What `pytest -m` selects: ex2_1."""
        return "ex" + self.id.replace(".", "_")


def exercise(
    id: str, title: str, *, minutes: int, difficulty: int, replaces: str | None = None
) -> Callable:
    """Mark the function or class that a learner writes. Every argument is a literal, because the
    file is also read unimported.
    """

    def mark(target):
        target.exercise_id = id
        return target

    return mark


# ---------------------------------------------------------------- reading, without importing


def lesson_key(lesson: str | int) -> str:
    """ "3", 3, "03" and "l03" -> "03". Raises ExerciseError for a lesson without exercises, naming
    those that have some.
    """
    known = sorted(path.name[1:3] for path in SOLUTIONS.glob("l[0-9][0-9]_*.py"))
    digits = str(lesson).removeprefix("l").split("_")[0]
    if not digits.isdecimal() or f"{int(digits):02d}" not in known:
        raise ExerciseError(
            f"lesson {str(lesson)!r} has no exercises; accepted: {', '.join(known) or 'none yet'}"
        )
    return f"{int(digits):02d}"


def solution_files(lesson: str | int | None = None) -> list[Path]:
    """The solution files of one lesson, or of all, in order."""
    return sorted(
        SOLUTIONS.glob("l[0-9][0-9]_*.py" if lesson is None else f"l{lesson_key(lesson)}_*.py")
    )


def all_exercises(lesson: str | int | None = None) -> list[Exercise]:
    """Every exercise of the course, or of one lesson, in order."""
    return [entry for path in solution_files(lesson) for entry in read_exercises(path)]


def find_exercise(exercise_id: str) -> Exercise:
    """Raises ExerciseError for an unknown id, naming the known ones."""
    known = {entry.id: entry for entry in all_exercises()}
    if exercise_id not in known:
        raise ExerciseError(f"exercise {exercise_id!r} is unknown; accepted: {', '.join(known)}")
    return known[exercise_id]


def read_exercises(path: Path) -> list[Exercise]:
    """The exercises that a solution file declares. Raises ExerciseError for a declaration that
    cannot work.
    """
    return [entry for entry, _ in _declared(ast.parse(path.read_text(encoding="utf-8")), path)]


def _declared(tree: ast.Module, path: Path) -> list[tuple[Exercise, ast.stmt]]:
    found = []
    for node in tree.body:
        for call in getattr(node, "decorator_list", []):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "exercise":
                try:
                    id, title = (ast.literal_eval(argument) for argument in call.args)
                    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                    entry = Exercise(
                        id,
                        title,
                        options.pop("minutes"),
                        options.pop("difficulty"),
                        options.pop("replaces", None),
                        node.name,
                        path.name,
                        **options,
                    )
                    number = re.fullmatch(r"(\d+)\.\d+", id)
                    if not number or int(number[1]) != int(path.name[1:3]):
                        raise ValueError(f"the id {id!r} does not belong to this lesson")
                except (ValueError, TypeError, KeyError) as error:
                    raise ExerciseError(
                        f"{path.name}, line {call.lineno}: {type(error).__name__}: {error}; "
                        f"accepted: literals, "
                        "@exercise(id, title, minutes=, difficulty=[, replaces=])"
                    ) from None
                found.append((entry, node))
    return found


def untouched_line(source: str, exercise_id: str) -> int | None:
    """The line at which an exercise still raises NotImplementedError("Exercise 2.1: …"), None once
    it is gone (or unparsable).

    Read from the text, because a stub inside a Triton kernel cannot raise on a GPU.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return None
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = getattr(node.exc.args[0], "value", None)
            if isinstance(message, str) and message.startswith(f"Exercise {exercise_id}:"):
                return node.lineno
    return None


def fingerprint(source: str, entry: Exercise) -> str:
    """Changes when the code of an exercise (or of the helpers beside it) changes; comments and
    other exercises do not count.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source.encode()).hexdigest()[:16]
    others = {other.name for other in read_exercises(SOLUTIONS / entry.file)} - {entry.name}
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in others]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- generating

HEADER = """\
# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON={lesson}
# Generated from solutions/{file}, checksum {checksum}. Generating again never overwrites your edits.
# ruff: noqa
"""


def generate(path: Path) -> str:
    """The text of exercises/<same name> for a solution file. Raises ExerciseError for markers that
    do not pair up.
    """
    source = path.read_text(encoding="utf-8")
    spans = [
        (node.lineno, node.end_lineno, entry) for entry, node in _declared(ast.parse(source), path)
    ]
    by_id = {entry.id: entry for _, _, entry in spans}
    lines, state, filled = [], "text", set()
    for number, line in enumerate(source.splitlines(), start=1):
        mark = re.fullmatch(r"(\s*)# (SOLUTION|STUB|END)(?: (\S+))?", line)
        event = mark[2] if mark else None
        if (event, state) not in _STEPS:
            raise ExerciseError(
                f"{path.name}, line {number}: `# {event}` cannot follow here; the order is "
                f"SOLUTION[, STUB], END"
            )
        state = _STEPS[event, state]
        if event == "SOLUTION":
            around = next((entry for first, last, entry in spans if first <= number <= last), None)
            entry = by_id.get(mark[3]) if mark[3] else around
            if entry is None:
                raise ExerciseError(
                    f"{path.name}, line {number}: this gap lies in no exercise; write `# SOLUTION "
                    f"<id>`"
                )
            filled.add(entry.id)
            message = f"Exercise {entry.id}: {entry.title}".replace("\\", "\\\\").replace(
                '"', '\\"'
            )
            lines.append(f'{mark[1]}raise NotImplementedError("{message}")')
        elif event is None and state == "text":
            lines.append(line)
        elif event is None and state == "stub":
            lines.append(re.sub(r"^(\s*)# ?", r"\1", line))
    if state != "text":
        raise ExerciseError(f"{path.name}: the last `# SOLUTION` has no `# END`")
    if empty := by_id.keys() - filled:
        raise ExerciseError(
            f"{path.name}: exercise {min(empty)} leaves nothing out; mark its solution by `# "
            f"SOLUTION`, `# END`"
        )
    body = "\n".join(lines) + "\n"
    return HEADER.format(lesson=path.name[1:3], file=path.name, checksum=_checksum(body)) + body


_STEPS = {
    (None, "text"): "text",
    (None, "solution"): "solution",
    (None, "stub"): "stub",
    ("SOLUTION", "text"): "solution",
    ("STUB", "solution"): "stub",
    ("END", "solution"): "text",
    ("END", "stub"): "text",
}


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def is_edited(text: str) -> bool:
    """Whether somebody changed a generated text: its header's checksum no longer fits (or the
    header is gone).
    """
    lines = text.splitlines(keepends=True)
    header = len(HEADER.splitlines())
    found = re.search(r"checksum ([0-9a-f]{12})", "".join(lines[:header]))
    return found is None or found[1] != _checksum("".join(lines[header:]))


def write_stub(path: Path, folder: Path = EXERCISES, force: bool = False) -> str:
    """Bring one file of `folder` up to date with its solution; returns what happened, in words.

    An edited file is left alone unless `force`, and then copied first to a backup that never
    replaces another one.
    """
    fresh, target = generate(path), folder / path.name
    note = "written"
    if target.exists():
        current = target.read_text(encoding="utf-8", errors="replace")
        if current == fresh:
            return f"{target.name}: up to date"
        if is_edited(current):
            if not force:
                return f"{target.name}: kept, because you edited it (--force starts again and keeps a backup)"
            backup = next(
                name
                for n in range(1, 10_000)
                if not (name := target.with_suffix(f".backup{n}.py")).exists()
            )
            # a copy rather than a rename, so that an interruption leaves both
            shutil.copy2(target, backup)
            note = f"written anew; your version is {backup.name}"
    part = target.with_suffix(".part")
    part.write_text(fresh, encoding="utf-8")
    os.replace(part, target)
    return f"{target.name}: {note}"


# ---------------------------------------------------------------- for notebooks and the command line


def check(which: str | int | None = None, impl: str = "exercises") -> bool:
    """Run the checks of a lesson ("02"), of one exercise ("2.1") or of all, print a summary; True
    if every one passed.
    """
    from lessons.toolbox.exercises.report import run_checks

    return run_checks(which, impl)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m lessons.toolbox.exercises", description=__doc__.split("\n")[0]
    )
    parser.add_argument("command", choices=("generate", "check", "progress", "kills"))
    parser.add_argument(
        "which", nargs="?", help="a lesson (02), or for check one exercise (2.1); default: all"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="generate: start again even where you edited; a backup is kept",
    )
    parser.add_argument(
        "--impl", default="exercises", help="check: exercises (yours), solutions, or a folder"
    )
    args = parser.parse_args(argv)
    return run_command("exercises", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """What the command line asks for; returns the exit code."""
    if args.command == "generate":
        for path in solution_files(args.which):
            print(write_stub(path, force=args.force))
    elif args.command == "check":
        return 0 if check(args.which, args.impl) else 1
    elif args.command == "progress":
        from lessons.toolbox.exercises.report import print_progress

        print_progress()
    else:
        from lessons.toolbox.exercises.report import print_kills

        return 0 if print_kills(args.which) else 1
    return 0
