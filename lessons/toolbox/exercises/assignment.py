"""A lesson's exercises as an assignment for Otter-Grader or nbgrader, and what its cells and tests
call.

    python -m lessons.toolbox.exercises otter 13 > lesson13.ipynb
    otter assign lesson13.ipynb dist

    python -m lessons.toolbox.exercises nbgrader 13 > source/lesson13/lesson13.ipynb
    nbgrader generate_assignment lesson13

The student's cell begins with `%%submission 13.1`: it puts the code into the folder `submission`
beside the notebook, as a file like those of exercises/. The question's test runs the course's
checks on this folder. The notebook's kernel needs the course: start it with PYTHONPATH set to the
course's folder.
"""

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path

from lessons.toolbox.exercises.cells import read_cell, save
from lessons.toolbox.exercises.exercise import (
    GAP,
    SOLUTIONS,
    Exercise,
    ExerciseError,
    all_exercises,
    write_stub,
)
from lessons.toolbox.exercises.parts import names_of, undecorated
from lessons.toolbox.exercises.report import records_of, status_of

FOLDER = "submission"
IMPORT = "from lessons.toolbox.exercises.assignment"


# ---------------------------------------------------------------- in the student's notebook


def begin() -> None:
    """Teach the notebook `%%submission 13.1`."""
    from IPython import get_ipython

    get_ipython().register_magic_function(submit, "cell", "submission")


def submit(which: str, code: str) -> None:
    """Put a cell's code into its file. Raises ExerciseError for code that cannot be saved."""
    (entry,) = all_exercises(which.strip())
    folder = Path(FOLDER)
    folder.mkdir(exist_ok=True)
    if not (folder / entry.file).exists():
        write_stub(SOLUTIONS / entry.file, folder)
    raised = [node.exc for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Raise)]
    names = [getattr(what, "func", what) for what in raised]  # of a call, too
    if any(getattr(name, "id", "") == "NotImplementedError" for name in names):
        print(f"TODO {entry.id}: write your code in this cell, and run it")
    else:
        save(entry, read_cell(code), folder)
        print(f"saved {entry.id}")


def assert_passes(which: str) -> None:
    """Raise AssertionError, with the first message of the checks, unless the code in the folder
    passes all checks of an exercise. A check that cannot run here is no pass.
    """
    (entry,) = all_exercises(which)
    folder = Path(FOLDER).resolve()
    if not folder.is_dir():
        raise AssertionError(f"TODO {entry.id}: its cell was never run")
    records = records_of([entry], str(folder))
    status = status_of(entry, records)
    found = [record["message"] for record in records if record["status"] == status]
    assert status == "PASS", f"{status} {entry.id}: {found[0] if found else 'no check ran'}"


# ---------------------------------------------------------------- the assignment

BEGIN = f"{IMPORT} import begin\n\nbegin()"  # the first code cell of a notebook
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def otter_notebook(lesson: str):
    """The master notebook of a lesson for `otter assign`. Raises ExerciseError for an exercise in
    place of a lesson.
    """
    import nbformat.v4 as nbf

    cells = [
        nbf.new_raw_cell("# ASSIGNMENT CONFIG\nexport_cell: false\ngenerate: true"),
        nbf.new_code_cell(BEGIN),
    ]
    for entry, statement in questions(lesson):
        question = f"# BEGIN QUESTION\nname: {entry.marker}\npoints: {entry.minutes}"
        cells += [
            nbf.new_raw_cell(question),
            nbf.new_markdown_cell(statement),
            nbf.new_raw_cell("# BEGIN SOLUTION"),
            nbf.new_code_cell(f"%%submission {entry.id}\n{answer_of(entry, for_otter)}"),
            nbf.new_raw_cell("# END SOLUTION"),
            nbf.new_raw_cell("# BEGIN TESTS"),
            nbf.new_code_cell(test_of(entry)),
            nbf.new_raw_cell("# END TESTS"),
            nbf.new_raw_cell("# END QUESTION"),
        ]
    return nbf.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def nbgrader_notebook(lesson: str):
    """The source version of a lesson for `nbgrader generate_assignment`. Raises ExerciseError for
    an exercise in place of a lesson.
    """
    import nbformat.v4 as nbf

    def cell(source: str, name: str, **what):
        role = {"grade": False, "solution": False, "locked": True, "task": False} | what
        role |= {"grade_id": name, "schema_version": 3}
        return nbf.new_code_cell(source, metadata={"nbgrader": role})

    cells = [cell(BEGIN, "begin")]
    for entry, statement in questions(lesson):
        answer = f"%%submission {entry.id}\n{answer_of(entry, for_nbgrader)}"
        cells += [
            nbf.new_markdown_cell(statement),
            cell(answer, f"{entry.marker}_answer", solution=True, locked=False),
            cell(test_of(entry), entry.marker, grade=True, points=entry.minutes),
        ]
    return nbf.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def questions(lesson: str) -> list[tuple[Exercise, str]]:
    """A lesson's exercises with their statements. Raises ExerciseError for a single one."""
    from lessons.toolbox.exercises.statements import statements

    if "." in lesson:
        raise ExerciseError(f"got exercise {lesson!r}; accepted: a lesson, such as 13")
    return statements(all_exercises(lesson)[0].lesson)


def test_of(entry: Exercise) -> str:
    return f'{IMPORT} import assert_passes\n\nassert_passes("{entry.id}")'


def for_otter(entry: Exercise, margin: str, solved: str, left: str) -> list[str]:
    """What students do not get, and a string with what they get in its place."""
    prompt = f"{margin}raise NotImplementedError  # {entry.id}: your code\n{left}"
    prompt = prompt.replace('"""', "'''")  # it is in a string itself
    lines = [f"{margin}# BEGIN SOLUTION", solved, f"{margin}# END SOLUTION"]
    return [*lines, f'{margin}""" # BEGIN PROMPT', prompt, f'{margin}"""; # END PROMPT']


def for_nbgrader(entry: Exercise, margin: str, solved: str, left: str) -> list[str]:
    """What students do not get: nbgrader raises in its place. Code with bugs is a comment, because
    the solution runs before it.
    """
    lines = [f"{margin}### BEGIN SOLUTION", solved, f"{margin}### END SOLUTION"]
    if left.strip():
        lines.append(f"{margin}# the code with bugs: take the {COMMENT!r} away")
        bare = [line.removeprefix(margin) for line in left.rstrip("\n").splitlines()]
        lines += [f"{margin}{COMMENT}{line}".rstrip() for line in bare]
    return lines


COMMENT = "#: "


def answer_of(entry: Exercise, marks: Callable[..., list[str]]) -> str:
    """The solution's definitions, each gap marked for a grader: for_otter or for_nbgrader."""
    source = (SOLUTIONS / entry.file).read_text(encoding="utf-8")

    def marked(gap: re.Match) -> str:
        line = source.count("\n", 0, gap.start()) + 1
        if gap[2] != entry.id and (gap[2] or line not in entry.lines):
            return gap[3]  # of another exercise
        left = re.sub(r"(?m)^( *)# ?", r"\1", gap[4] or "").rstrip("\n")
        return "\n".join(marks(entry, gap[1], gap[3].rstrip("\n"), left)).rstrip("\n")

    text = GAP.sub(marked, source)
    nodes = [n for n in ast.parse(text).body if getattr(n, "name", None) in names_of(entry)]
    return "\n\n\n".join(undecorated(text, node) + marks_after(text, node) for node in nodes)


def marks_after(text: str, node: ast.stmt) -> str:
    """The comments at a definition's end, which Python does not count as its lines."""
    following = text.splitlines()[node.end_lineno :]
    comments = itertools.takewhile(lambda line: re.match(r" +#", line), following)
    return "".join(f"\n{line}" for line in comments)
