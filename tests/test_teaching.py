"""TEACHING.md: its plans name figures and exercises that exist, and its grading works as
printed.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.toolbox.exercises.exercise import SOLUTIONS, all_exercises
from tests.markdown import section

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "lessons/TEACHING.md").read_text(encoding="utf-8")
LESSONS = sorted(int(file.name[1:3]) for file in SOLUTIONS.glob("l*.py"))
PARTS = ("Ask first.", "Show.", "Exercise.", "What goes wrong.")


def plans() -> dict[int, str]:
    """{lesson: its plan}."""
    found = section(TEXT, "Plans").split("### Lesson ")[1:]
    return {int(plan.partition(":")[0]): plan for plan in found}


def answers() -> dict[int, str]:
    """{lesson: its folded answers}."""
    folds = section(TEXT, "Model answers").split("<details><summary>Lesson ")[1:]
    return {int(fold.partition("<")[0]): fold for fold in folds}


def test_plans_have_their_parts_and_name_exercises_that_exist():
    for lesson, plan in plans().items():
        for part in PARTS:
            assert f"**{part}**" in plan, f"lesson {lesson} lacks {part}"
        assert f"(l{lesson:02}_" in plan, f"lesson {lesson} shows no figure of its own"
        named = re.search(r"\*\*Exercise\.\*\* (\d+\.\d+)", plan)
        assert named[1] in {entry.id for entry in all_exercises(lesson)}


def test_no_lesson_is_without_a_plan_and_answers():
    assert set(plans()) == set(answers()) >= set(range(18)) & set(LESSONS)


@pytest.mark.parametrize(
    "lesson", [0, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22, 23, 24, 25, 26, 27, 28]
)
def test_every_question_of_a_notebook_has_an_answer(lesson):
    (file,) = (ROOT / "notebooks").glob(f"{lesson:02}_*.ipynb")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    texts = "\n\n".join("".join(cell["source"]) for cell in cells)
    asked = re.findall(r"^\d\. ", section(texts, "Explain your result"), re.MULTILINE)
    assert len(re.findall(r"^\d\. ", answers()[lesson], re.MULTILINE)) == len(asked) > 0


def adding_up() -> str:
    """The program of the page that adds up reports."""
    programs = re.findall(r"```python\n(.*?)```", section(TEXT, "Grading"), re.DOTALL)
    (program,) = [text for text in programs if "ElementTree" in text]
    return program


@pytest.mark.sample(3, of="processes")
def test_a_submission_is_graded_as_printed(tmp_path):
    """A student who solved 14.2 and broke 14.1."""
    file, folder, grades = "l14_continuous_batching.py", tmp_path / "ada", tmp_path / "grades"
    solved = (SOLUTIONS / file).read_text(encoding="utf-8")
    broken = solved.replace("return static, max(free_at)", "return static + 1, max(free_at)")
    assert broken != solved
    folder.mkdir()
    (folder / file).write_text(broken, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "tests/exercises/test_l14.py"]
    command += ["-m", "ex14_1 or ex14_2", "-p", "no:cacheprovider", "--impl", str(folder)]
    command += ["--junitxml", str(grades / "ada.xml")]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 1
    program = [sys.executable, "-c", adding_up(), str(grades)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout == "ada 1 of 2 14.2\n"
