"""What every room of the course must hold, as functions from a root folder to complaints: [] means
that all is well.

A lesson whose README.md exists claims to be complete and is held to every part of it. What its text
says is judged by text_rules.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

Complaints = list[str]
DENIED = {"a path of somebody's machine": r"(?<![\w.])/(?:root|home|Users|work)/\w"}
LINES_OF_A_LESSON, LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 200, 300, 60


def rooms(root: Path) -> list[Path]:
    """The lessons' folders, in order."""
    return [path for path in sorted((root / "lessons").glob("l[0-9][0-9]_*")) if path.is_dir()]


def complete_rooms(root: Path) -> list[Path]:
    """The lessons that claim to be complete."""
    return [room for room in rooms(root) if (room / "README.md").exists()]


def committed_files(root: Path, *suffixes: str) -> list[Path]:
    """Files that git tracks or would track, of these suffixes; without git, all files."""
    command = [
        "git",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    names = (
        filter(None, done.stdout.split("\0"))
        if done.returncode == 0
        else (str(p.relative_to(root)) for p in root.rglob("*"))
    )
    paths = sorted({root / name for name in names})
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def within(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


# ---------------------------------------------------------------- every part is there


def missing_parts(root: Path) -> Complaints:
    """Files that a complete lesson lacks."""
    missing = []
    for room in complete_rooms(root):
        number, topic = room.name[:3], room.name
        wanted = [
            f"lessons/{topic}/{name}"
            for name in ("naive.py", "optimized.py", "test_equivalence.py", "lab/benchmark.py")
        ]
        wanted += [
            f"notebooks/{topic[1:]}.ipynb",
            f"solutions/{topic}.py",
            f"exercises/{topic}.py",
            f"tests/exercises/test_{number}.py",
            f"tests/exercises/wrong/{number}.py",
        ]
        missing += [f"{topic}: {name} is missing" for name in wanted if not (root / name).exists()]
    return missing


# ---------------------------------------------------------------- imports point one way


def wrong_imports(root: Path) -> Complaints:
    """Imports against the direction toolbox <- lessons in order <- reference <- notebooks, tests."""
    complaints = []
    for path in committed_files(root, ".py"):
        floor = within(root, path)
        for module in imported(path.read_text(encoding="utf-8")):
            if why := forbidden(floor, module):
                complaints.append(f"{floor} imports {module}: {why}")
    return complaints


def imported(source: str) -> Iterator[str]:
    """The modules that a file imports, wherever in it; "lessons.l03_x" for `from lessons import
    l03_x`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module not in ("lessons", "reference")
            yield from (
                node.module if whole else f"{node.module}.{alias.name}" for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level


def forbidden(floor: str, module: str) -> str:
    """Why the file `floor` may not import `module`; "" if it may."""
    top, lesson = module.split(".")[0], re.match(r"lessons\.l(\d\d)_", module)
    if module.startswith("."):
        return "relative imports hide from which floor"
    if floor.startswith("lessons/toolbox/"):
        return (
            "the toolbox stands below the lessons"
            if lesson or top in ("reference", "solutions", "exercises")
            else ""
        )
    if room := re.match(r"lessons/l(\d\d)_", floor):
        if top in ("reference", "solutions", "exercises"):
            return "lessons stand below it"
        return (
            "a lesson uses only lessons before it"
            if lesson and int(lesson[1]) > int(room[1])
            else ""
        )
    if floor.startswith(("solutions/", "exercises/", "models/")) and top == "reference":
        return "only notebooks, tests and reference itself import reference"
    return ""


# ---------------------------------------------------------------- words and lengths


def denied_words(root: Path) -> Complaints:
    """What does not belong into a published course: places on the author's machine."""
    complaints = []
    for path in committed_files(
        root, ".py", ".md", ".ipynb", ".toml", ".json", ".txt", ".cu", ".svg", ""
    ):
        text = path.read_text(encoding="utf-8", errors="replace")
        complaints += [
            f"{within(root, path)}: {what}: {found[0]!r}"
            for what, pattern in DENIED.items()
            for found in re.finditer(pattern + r"\S{0,30}", text)
        ]
    return complaints


def too_long(root: Path, exceptions: Iterable[str] = ()) -> Complaints:
    """Files and functions beyond what one can read in a sitting. exceptions: "path" or
    "path:function"; tests may be long.
    """
    complaints = []
    for path in committed_files(root, ".py"):
        name, text = within(root, path), path.read_text(encoding="utf-8")
        limit = (
            LINES_OF_A_LESSON
            if re.match(r"lessons/l\d\d_", name) and not path.name.startswith("test_")
            else LINES_OF_A_FILE
        )
        if (
            (count := text.count("\n")) > limit
            and not name.startswith("tests/")
            and "test_" not in path.name
        ):
            complaints.append((name, f"{name}: {count} lines, more than {limit}"))
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and (count := _length(node)) > LINES_OF_A_FUNCTION
            ):
                complaints.append(
                    (
                        f"{name}:{node.name}",
                        f"{name}: {node.name}: {count} lines, more than {LINES_OF_A_FUNCTION}",
                    )
                )
    return [complaint for where, complaint in complaints if where not in set(exceptions)]


def _length(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = (
        function.body[0].end_lineno - function.body[0].lineno + 1
        if ast.get_docstring(function)
        else 0
    )
    return function.end_lineno - function.lineno + 1 - docstring
