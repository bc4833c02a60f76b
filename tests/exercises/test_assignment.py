"""A lesson as an assignment for Otter-Grader: what its cells hold, and what its tests say.

Otter itself is not installed here. TEACHING.md says with which version the commands were run.
"""

import nbformat
import pytest

from lessons.toolbox.exercises import assignment
from lessons.toolbox.exercises.assignment import (
    answer_of,
    assert_passes,
    begin,
    otter_notebook,
    submit,
)
from lessons.toolbox.exercises.exercise import ExerciseError, all_exercises


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


@pytest.mark.parametrize("entry", all_exercises(), ids=lambda entry: entry.id)
def test_a_cell_is_python_with_and_without_its_solution(entry):
    code = answer_of(entry)
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


def test_one_exercise_is_no_assignment():
    with pytest.raises(ExerciseError, match=r"got exercise '13\.1'; accepted: a lesson"):
        otter_notebook("13.1")


def test_a_submission_is_saved_and_judged(tmp_path, monkeypatch, capsys):
    (entry,) = all_exercises("2.4")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"TODO 2\.4: its cell was never run"):
        assert_passes("2.4")
    submit("2.4", given_to_students(answer_of(entry)))
    assert "TODO 2.4" in capsys.readouterr().out
    submit("2.4", answer_of(entry))
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
