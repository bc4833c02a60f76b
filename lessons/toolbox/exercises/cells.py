"""An exercise in a cell of a notebook: `%%exercise 12.2` over the learner's code.

Running the cell puts the code into the learner's file in exercises/ and checks it there. The file
is the one place that counts, for `make check` and for the ladder. What a cell replaces is kept in
build/attempts/.
"""

import ast
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.exercises.exercise import (
    EXERCISES,
    ROOT,
    SOLUTIONS,
    Exercise,
    ExerciseError,
    all_exercises,
    untouched_line,
    write_stub,
)
from lessons.toolbox.exercises.loading import describe, load_file
from lessons.toolbox.exercises.parts import Definition, first_line, is_mark, names_of, source_of
from lessons.toolbox.exercises.report import run_checks
from lessons.toolbox.language import said

ATTEMPTS = ROOT / "build" / "attempts"


@dataclass
class Cell:
    """What a cell holds, by its statements."""

    imports: list[str]
    definitions: dict[str, str]  # by name, in order; constants too
    rest: list[ast.stmt]  # calls, loops: they run in the notebook and are not saved


# ---------------------------------------------------------------- from the cell into the file


def read_cell(code: str) -> Cell:
    """Raises ExerciseError, in one line, for code that does not parse."""
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        line = (error.text or "").strip()
        at = error.lineno + 1  # the cell's first line has the exercise's number
        raise ExerciseError(f"line {at}: {error.msg}: `{line}`; not saved") from None
    cell = Cell([], {}, [])
    for node in tree.body:
        name = _name(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            cell.imports.append(source_of(code, node))
        elif name:
            cell.definitions[name] = source_of(code, node)
        else:
            cell.rest.append(node)
    return cell


def _name(node: ast.stmt) -> str | None:
    """What a statement defines: a function, a class or a constant."""
    if isinstance(node, Definition):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return getattr(node.targets[0], "id", None)
    return None


def save(entry: Exercise, cell: Cell, folder: Path) -> Path | None:
    """Put a cell's definitions into the learner's file. Returns where the code is kept that they
    replace, if it was the learner's. Raises ExerciseError, in one line, and then the file is as it
    was.
    """
    path, wanted = folder / entry.file, names_of(entry)
    text = _text(path)
    if lacking := [name for name in wanted if name not in cell.definitions]:
        raise ExerciseError(f"this cell lacks `{lacking[0]}` of exercise {entry.id}; not saved")
    others = [e for e in all_exercises(entry.lesson) if e.file == entry.file and e.id != entry.id]
    for other in others:
        if taken := set(names_of(other)) & set(cell.definitions):
            raise ExerciseError(f"`{min(taken)}` is of exercise {other.id}; not saved")
    try:
        nodes = ast.parse(text, str(path)).body
    except SyntaxError as error:
        raise ExerciseError(f"mend this first: {describe(error, path)}; not saved") from None
    new = _merged(text, nodes, cell, wanted)
    if new == text:
        return None
    kept = _keep(entry, "\n\n\n".join(source_of(text, n) for n in nodes if _name(n) in wanted))
    beside = path.with_suffix(".tmp")
    beside.write_text(new, encoding="utf-8")
    beside.replace(path)  # whole or not at all
    return kept


def _text(path: Path) -> str:
    """A learner's file; bytes that are no text become replacement characters, not a traceback."""
    return path.read_text(encoding="utf-8", errors="replace")


def _merged(text: str, nodes: list[ast.stmt], cell: Cell, wanted: list[str]) -> str:
    """The file's text with a cell's definitions: in their places, and new ones before the first
    that the exercise asks for.
    """
    lines, places = text.splitlines(), {_name(node): node for node in nodes}
    edits = []  # (first line, line after the last, new text)
    for name, source in cell.definitions.items():
        if name in places:
            node = places[name]
            marks = [d for d in getattr(node, "decorator_list", []) if is_mark(d)]
            mark = ["\n".join(lines[d.lineno - 1 : d.end_lineno]) for d in marks]
            edits.append((first_line(node), node.end_lineno + 1, "\n".join([*mark, source])))
    here = min(
        (first_line(places[name]) for name in wanted if name in places), default=len(lines) + 1
    )
    known = {ast.unparse(node) for node in nodes}
    fresh = [line for line in cell.imports if ast.unparse(ast.parse(line)) not in known]
    fresh += [source for name, source in cell.definitions.items() if name not in places]
    if fresh:
        edits.append((here, here, "\n\n\n".join(fresh) + "\n\n"))
    for first, end, new in sorted(edits, reverse=True):
        lines[first - 1 : end - 1] = new.splitlines()
    return "\n".join(lines) + "\n"


def _keep(entry: Exercise, replaced: str) -> Path | None:
    """Keep what a cell replaces, unless it is the stub or kept already."""
    if untouched_line(replaced, entry.id):
        return None
    folder = ATTEMPTS / entry.id
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.py"):
        if path.read_text(encoding="utf-8") == replaced:
            return path
    names = (folder / f"{n:03}.py" for n in itertools.count(1))
    path = next(path for path in names if not path.exists())
    path.write_text(replaced, encoding="utf-8")
    return path


# ---------------------------------------------------------------- running a cell


def run_cell(which: str, code: str, namespace: dict) -> None:
    """What `%%exercise 12.2` does: save, check, and give the notebook the learner's definitions.
    A cell that still is the stub saves nothing; then the file counts as it is.
    """
    try:
        entry = _entry(which)
        cell = read_cell(code)
        path = EXERCISES / entry.file
        if not path.exists():
            write_stub(SOLUTIONS / entry.file, EXERCISES)
        if not untouched_line(code, entry.id):
            if kept := save(entry, cell, EXERCISES):
                before = kept.relative_to(ROOT)
                print(said(f"saved in exercises/{entry.file}; before: {before}"))
        elif untouched_line(_text(path), entry.id):
            print(said(f"TODO {entry.id}: write your code in this cell, and run it"))
        else:
            print(said(f"this cell is the stub, so exercises/{entry.file} is checked as it is"))
        is_solved = not untouched_line(_text(path), entry.id)
        if is_solved:
            run_checks(entry.id, again="run this cell; three hints are in the folds above it")
            sys.modules.pop(f"exercises.{path.stem}", None)  # what was loaded before this cell
            module = load_file(path)
            namespace |= {name: getattr(module, name) for name in names_of(entry)}
    except ExerciseError as error:
        print(f"{which.strip()}: {said(str(error))}")
        return
    _run_rest(cell.rest, namespace)


def _entry(which: str) -> Exercise:
    found = all_exercises(which.strip() or None)
    if len(found) != 1:
        raise ExerciseError("which exercise? Begin the cell with its number: %%exercise 12.2")
    return found[0]


def _run_rest(statements: list[ast.stmt], namespace: dict) -> None:
    """What a cell says after its definitions. The value of its last line is shown."""
    from IPython.display import display

    for node in statements:
        if isinstance(node, ast.Expr):
            code = compile(ast.Expression(node.value), "<cell>", "eval")
            value = eval(code, namespace)
            if value is not None and node is statements[-1]:
                display(value)
        else:
            exec(compile(ast.Module([node], []), "<cell>", "exec"), namespace)


def register(shell) -> None:
    """Teach IPython `%%exercise`."""

    def run(line: str, cell: str) -> None:
        run_cell(line, cell, shell.user_ns)

    shell.register_magic_function(run, "cell", "exercise")
