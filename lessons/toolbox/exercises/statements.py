"""The exercises in the notebooks: their statements, from the READMEs, and their first code, from
solutions/.

    python -m lessons.toolbox.exercises cells [12]     bring them up to date, where a cell still is
                                                       the stub
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from lessons.toolbox.exercises.exercise import (
    ROOT,
    Exercise,
    ExerciseError,
    all_exercises,
    untouched_line,
)
from lessons.toolbox.exercises.parts import stub_of

FOLD = (
    r"<details><summary><b>{id} (.+?)</b> · (.+?)</summary>\n\n"
    r"(.*?)\n</details>\n(?=<details>|\n|$)"
)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


def statements(lesson: str) -> Iterator[tuple[Exercise, str]]:
    """The exercises of a lesson in the order of its README, each with a Markdown text for its
    notebook: title, minutes, statement, and three hints that are folded.
    """
    (readme,) = (ROOT / "lessons").glob(f"l{lesson}_*/README.md")
    text, found = readme.read_text(encoding="utf-8"), []
    for entry in all_exercises(lesson):
        statement = fold_of(entry.id, text)
        if not statement:
            raise ExerciseError(f"{readme.parent.name}/README.md has no fold of {entry.id}")
        statement = LINK.sub(lambda link: f"]({_from_notebooks(readme, link[1])})", statement)
        found.append((text.index(f"<b>{entry.id} "), entry, statement))
    for _, entry, statement in sorted(found, key=lambda row: row[0]):
        yield entry, statement


def fold_of(exercise_id: str, readme: str) -> str:
    """An exercise in the text of a README, as a notebook states it, with the README's links; "" if
    there is none.
    """
    fold = re.search(FOLD.format(id=re.escape(exercise_id)), readme, re.DOTALL)
    if fold is None:
        return ""
    title, effort, body = fold.groups()
    return "\n".join([f"### {exercise_id} {title}", effort, "", body.strip("\n")])


def _from_notebooks(readme: Path, link: str) -> str:
    return posixpath.normpath(f"../lessons/{readme.parent.name}/{link}")


def code_of(entry: Exercise) -> str:
    """What an exercise's cell begins as. Lesson 0 draws what a puzzle has to read and write."""
    number = int(entry.id.split(".")[1])
    picture = f'\n\n\nshow("{entry.id}")' if entry.lesson == "00" and number <= 10 else ""
    return f"%%exercise {entry.id}\n{stub_of(entry)}{picture}"


def refresh(lesson: str) -> str:
    """Bring the exercises of a lesson's notebook up to date; returns what happened, in words.
    A learner's code stays.
    """
    import nbformat  # here, because the book reads statements without it

    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    notebook, changed = nbformat.read(path, as_version=4), 0
    wanted = {entry.id: (entry, statement) for entry, statement in statements(lesson)}
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        found = re.match(r"%%exercise (\S+)\n", cell.source)
        if found and found[1] in wanted:
            entry, statement = wanted[found[1]]
            code = code_of(entry) if untouched_line(cell.source, entry.id) else cell.source
            changed += (before.source, cell.source) != (statement, code)
            before.source, cell.source = statement, code
    if changed:
        nbformat.write(notebook, path)
    return (
        f"{path.name}: {changed} exercises brought up to date"
        if changed
        else f"{path.name}: up to date"
    )
