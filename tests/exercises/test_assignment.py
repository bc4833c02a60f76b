"""A lesson as an assignment for Otter-Grader and for nbgrader: what its cells hold, and what its
tests say.

Neither is installed here. TEACHING.md says with which versions the commands were run.
"""

import nbformat
import pytest

from lessons.toolbox.exercises import assignment
from lessons.toolbox.exercises.assignment import (
    COMMENT,
    answer_of,
    assert_passes,
    begin,
    for_nbgrader,
    for_otter,
    nbgrader_notebook,
    otter_notebook,
    submit,
)
from lessons.toolbox.exercises.exercise import SOLUTIONS, ExerciseError, all_exercises


def given_to_students(code: str) -> str:
    """What Otter makes of a cell: no solutions, and the prompts in their place."""
    kept, skipped = [], False
    for line in code.splitlines():
        if line.strip() == "# BEGIN SOLUTION":
            skipped = True
        if not skipped and line.strip() not in ('""" # BEGIN PROMPT', '"""; # END PROMPT'):
            kept.append(line)
        if line.strip() == "# END SOLUTION":
            skipped = False
    return "\n".join(kept)


def released(code: str) -> str:
    """What nbgrader makes of a cell: its ClearSolutions, in lines."""
    kept, skipped = [], False
    for line in code.splitlines():
        if "BEGIN SOLUTION" in line:
            assert not skipped
            skipped, margin = True, line[: len(line) - len(line.lstrip())]
            kept += [f"{margin}# YOUR CODE HERE", f"{margin}raise NotImplementedError()"]
        elif "END SOLUTION" in line:
            skipped = False
        elif not skipped:
            kept.append(line)
    assert not skipped
    return "\n".join(kept)


@pytest.mark.parametrize("entry", all_exercises(), ids=lambda entry: entry.id)
def test_a_cell_for_nbgrader(entry, tmp_path, monkeypatch, capsys):
    """The source version is the solution, and the released one says TODO."""
    code = answer_of(entry, for_nbgrader)
    student = released(code)
    compile(student, entry.id, "exec")
    assert "SOLUTION" not in student and "raise NotImplementedError()" in student
    bugs = "# STUB" in (SOLUTIONS / entry.file).read_text() and "the code with bugs" in code
    if bugs:  # with the mark taken away it is Python, after a line that raises
        found = student.replace(f"{COMMENT}", "").replace(COMMENT.rstrip(), "")
        compile(found, entry.id, "exec")
        assert found.count("\n") == student.count("\n") and len(found) < len(student)
    monkeypatch.chdir(tmp_path)
    submit(entry.id, student)
    submit(entry.id, code)
    assert capsys.readouterr().out.splitlines()[-1] == f"saved {entry.id}"
    saved = tmp_path / "submission" / entry.file
    assert f'NotImplementedError("Exercise {entry.id}:' not in saved.read_text()


@pytest.mark.parametrize("entry", all_exercises(), ids=lambda entry: entry.id)
def test_a_cell_is_python_with_and_without_its_solution(entry):
    code = answer_of(entry, for_otter)
    student = given_to_students(code)
    compile(code, entry.id, "exec")
    compile(student, entry.id, "exec")
    assert f"raise NotImplementedError  # {entry.id}: your code" in student
    assert "SOLUTION" not in student and code.count("# BEGIN SOLUTION") >= 1


def test_each_exercise_is_a_question_with_its_minutes_as_points():
    notebook = otter_notebook("13")
    nbformat.validate(notebook)
    sources = [cell.source for cell in notebook.cells]
    for entry in all_exercises("13"):
        at = sources.index(f"# BEGIN QUESTION\nname: {entry.marker}\npoints: {entry.minutes}")
        assert sources[at + 1].startswith(f"### {entry.id} ")
        assert sources[at + 3].startswith(f"%%submission {entry.id}\n")
        assert f'assert_passes("{entry.id}")' in sources[at + 6]
        assert sources[at + 8] == "# END QUESTION"


def test_nbgrader_s_cells_have_their_roles_and_points():
    notebook = nbgrader_notebook("13")
    nbformat.validate(notebook)
    cells = {
        cell.metadata.nbgrader.grade_id: cell
        for cell in notebook.cells
        if "nbgrader" in cell.metadata
    }
    assert len(cells) == 1 + 2 * len(all_exercises("13")), "each name once"
    for entry in all_exercises("13"):
        answer, test = cells[f"{entry.marker}_answer"], cells[entry.marker]
        role, other = answer.metadata.nbgrader, test.metadata.nbgrader
        assert role.solution and not role.grade and not role.locked and "points" not in role
        assert other.grade and other.locked and not other.solution
        assert other.points == entry.minutes
        assert answer.source.startswith(f"%%submission {entry.id}\n")
        assert f'assert_passes("{entry.id}")' in test.source
        assert notebook.cells.index(test) == notebook.cells.index(answer) + 1


@pytest.mark.parametrize("notebook", [otter_notebook, nbgrader_notebook])
def test_one_exercise_is_no_assignment(notebook):
    with pytest.raises(ExerciseError, match=r"got exercise '13\.1'; accepted: a lesson"):
        notebook("13.1")


def test_a_submission_is_saved_and_judged(tmp_path, monkeypatch, capsys):
    (entry,) = all_exercises("2.4")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"TODO 2\.4: its cell was never run"):
        assert_passes("2.4")
    submit("2.4", given_to_students(answer_of(entry, for_otter)))
    assert "TODO 2.4" in capsys.readouterr().out
    submit("2.4", answer_of(entry, for_otter))
    assert capsys.readouterr().out == "saved 2.4\n"
    assert "math.isqrt" in (tmp_path / "submission" / entry.file).read_text()
    for status, message in (("PASS", ""), ("FAIL", "too many"), ("NOT RUN", "needs a GPU")):
        record = {"exercise": "2.4", "status": status, "message": message}
        monkeypatch.setattr(assignment, "records_of", lambda *args, record=record: [record])
        if status == "PASS":
            assert_passes("2.4")
            continue
        with pytest.raises(AssertionError, match=f"{status} 2.4: {message}"):
            assert_passes("2.4")


def test_the_magic_is_registered(monkeypatch):
    from IPython.testing.globalipapp import get_ipython as shell_of_tests

    shell = shell_of_tests()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    begin()
    assert shell.find_cell_magic("submission") is submit
