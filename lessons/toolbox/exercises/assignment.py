"""A lesson's exercises as an assignment for Otter-Grader, and what its cells and tests call.

    python -m lessons.toolbox.exercises otter 13 > lesson13.ipynb
    otter assign lesson13.ipynb dist

The student's cell begins with `%%submission 13.1`: it puts the code into the folder `submission`
beside the notebook, as a file like those of exercises/. The question's test runs the course's
checks on this folder. The notebook's kernel needs the course: start it with PYTHONPATH set to the
course's folder.
"""

import ast
import re
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
    if any(isinstance(what, ast.Name) and what.id == "NotImplementedError" for what in raised):
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


def otter_notebook(lesson: str):
    """The master notebook of a lesson for `otter assign`. Raises ExerciseError for an exercise in
    place of a lesson.
    """
    import nbformat.v4 as nbf

    from lessons.toolbox.exercises.statements import statements

    if "." in lesson:
        raise ExerciseError(f"otter: got exercise {lesson!r}; accepted: a lesson, such as 13")
    lesson = all_exercises(lesson)[0].lesson
    cells = [
        nbf.new_raw_cell("# ASSIGNMENT CONFIG\nexport_cell: false\ngenerate: true"),
        nbf.new_code_cell(f"{IMPORT} import begin\n\nbegin()"),
    ]
    for entry, statement in statements(lesson):
        question = f"# BEGIN QUESTION\nname: {entry.marker}\npoints: {entry.minutes}"
        test = f'{IMPORT} import assert_passes\n\nassert_passes("{entry.id}")'
        cells += [
            nbf.new_raw_cell(question),
            nbf.new_markdown_cell(statement),
            nbf.new_raw_cell("# BEGIN SOLUTION"),
            nbf.new_code_cell(f"%%submission {entry.id}\n{answer_of(entry)}"),
            nbf.new_raw_cell("# END SOLUTION"),
            nbf.new_raw_cell("# BEGIN TESTS"),
            nbf.new_code_cell(test),
            nbf.new_raw_cell("# END TESTS"),
            nbf.new_raw_cell("# END QUESTION"),
        ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbf.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def answer_of(entry: Exercise) -> str:
    """The solution's definitions with Otter's marks: what students do not get, and what they get
    in its place.
    """
    source = (SOLUTIONS / entry.file).read_text(encoding="utf-8")

    def marked(gap: re.Match) -> str:
        line = source.count("\n", 0, gap.start()) + 1
        if gap[2] != entry.id and (gap[2] or line not in entry.lines):
            return gap[3]  # of another exercise
        margin, left = gap[1], re.sub(r"(?m)^( *)# ?", r"\1", gap[4] or "")
        left = left.replace('"""', "'''")  # the prompt is a string itself
        prompt = f"{margin}raise NotImplementedError  # {entry.id}: your code\n{left}"
        lines = [f"{margin}# BEGIN SOLUTION", gap[3].rstrip("\n"), f"{margin}# END SOLUTION"]
        lines += [f'{margin}""" # BEGIN PROMPT', prompt.rstrip("\n"), f'{margin}"""; # END PROMPT']
        return "\n".join(lines)

    text = GAP.sub(marked, source)
    nodes = [n for n in ast.parse(text).body if getattr(n, "name", None) in names_of(entry)]
    return "\n\n\n".join(undecorated(text, node) for node in nodes)
