"""`%%exercise 2.1` over a learner's code: it is saved in the learner's file, nothing is lost, and
each complaint is one line.
"""

import ast
import shutil
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from lessons.toolbox.exercises import cells
from lessons.toolbox.exercises.exercise import ROOT, SOLUTIONS, all_exercises, write_stub
from lessons.toolbox.exercises.parts import names_of, undecorated
from lessons.toolbox.exercises.statements import code_of, refresh, statements

LESSONS = sorted({entry.lesson for entry in all_exercises()})
FILES = sorted({entry.file for entry in all_exercises()})


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A learner's folder, fresh from solutions/, and no checks."""
    for name in ("EXERCISES", "ATTEMPTS", "ROOT"):
        monkeypatch.setattr(cells, name, tmp_path / {"ROOT": ""}.get(name, name))
    monkeypatch.setattr(cells, "run_checks", lambda id, again: print(f"checked {id}"))
    cells.EXERCISES.mkdir()
    for file in FILES:
        write_stub(SOLUTIONS / file, cells.EXERCISES)
    return cells.EXERCISES


def entry_of(id: str):
    (entry,) = all_exercises(id)
    return entry


def solved(entry) -> str:
    """A cell that solves an exercise."""
    text = (SOLUTIONS / entry.file).read_text()
    names = names_of(entry)
    nodes = [n for n in ast.parse(text).body if getattr(n, "name", None) in names]
    return "\n\n".join(undecorated(text, node) for node in nodes)


def run(id: str, code: str, capsys, **namespace) -> tuple[list[str], dict]:
    """What a cell prints, and what the notebook then knows."""
    cells.run_cell(id, code, namespace)
    return capsys.readouterr().out.splitlines(), namespace


# ---------------------------------------------------------------- the notebooks


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_notebook_has_each_exercise_with_its_statement(lesson):
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    found = nbformat.read(path, as_version=4).cells
    pairs = [
        (before.source, cell.source)
        for before, cell in pairwise(found)
        if cell.source.startswith("%%exercise")
    ]
    wanted = [(statement, code_of(entry)) for entry, statement in statements(lesson)]
    assert pairs == wanted, f"run: python -m lessons.toolbox.exercises cells {lesson}"


def test_a_stub_is_brought_up_to_date_and_a_learners_code_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("lessons.toolbox.exercises.statements.ROOT", tmp_path)
    shutil.copytree(ROOT / "lessons/l12_paged_kv", tmp_path / "lessons/l12_paged_kv")
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks/12_paged_kv.ipynb"
    shutil.copy(ROOT / "notebooks/12_paged_kv.ipynb", path)
    assert refresh("12") == "12_paged_kv.ipynb: up to date"
    notebook = nbformat.read(path, as_version=4)
    first, second, _ = (c for c in notebook.cells if c.source.startswith("%%exercise"))
    first.source, second.source = first.source + "\n# old", "%%exercise 12.2\nmine = 1"
    nbformat.write(notebook, path)
    assert "1 exercises" in refresh("12")
    after = nbformat.read(path, as_version=4).cells
    first, second, _ = (c.source for c in after if c.source.startswith("%%exercise"))
    assert first == code_of(entry_of("12.1")) and second == "%%exercise 12.2\nmine = 1"


# ---------------------------------------------------------------- into the file


@pytest.mark.parametrize("file", FILES)
def test_all_cells_of_a_lesson_make_its_solution(file, mine):
    """Whatever an exercise consists of: a function, a class, a kernel and its wrapper."""
    for entry in all_exercises(file[1:3]):
        if entry.file == file:
            assert cells.save(entry, cells.read_cell(solved(entry)), mine) is None
    made = (mine / file).read_text()
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse((SOLUTIONS / file).read_text()))


def test_a_stub_says_todo_and_saves_nothing(mine, capsys):
    entry = entry_of("12.1")
    before = (mine / entry.file).read_text()
    code = code_of(entry).partition("\n")[2]
    out, names = run("12.1", code, capsys)
    assert out == ["TODO 12.1: write your code in this cell, and run it"] and not names
    assert (mine / entry.file).read_text() == before


def test_a_cell_is_saved_checked_and_known_to_the_notebook(mine, capsys):
    entry = entry_of("12.1")
    code = solved(entry) + "\n\nfor n in (1, 2):\n    print(n)\nmemory_plan([5, 8], 16, 4, 10, 100)"
    out, names = run("12.1", code, capsys)
    assert out[:3] == ["checked 12.1", "1", "2"] and "0.59375" in out[3]
    assert names["memory_plan"]([5, 8], 16, 4, 10, 100) == ([2, 2], 0.59375, 0.1875, 2, 4000)
    text = (mine / entry.file).read_text()
    assert "print(n)" not in text and '@exercise("12.1"' in text


def test_the_file_counts_while_the_cell_is_the_stub(mine, capsys):
    """Written in an editor, and then the notebook runs from the top."""
    entry = entry_of("12.1")
    shutil.copy(SOLUTIONS / entry.file, mine / entry.file)
    out, names = run("12.1", code_of(entry).partition("\n")[2], capsys)
    assert out == [
        f"this cell is the stub, so exercises/{entry.file} is checked as it is",
        "checked 12.1",
    ]
    assert names["memory_plan"]([4], 4, 4, 1, 1)[0] == [1]


def test_helpers_and_imports_go_along_and_are_replaced(mine, capsys):
    entry = entry_of("12.1")
    help_ = (
        "import math\nSTEP = 1\n\n\ndef up(n, size):\n    return math.ceil(n / size) * STEP\n\n\n"
    )
    for step in (1, 1, 2):
        code = help_.replace("STEP = 1", f"STEP = {step}") + solved(entry)
        run("12.1", code, capsys)
    text = (mine / entry.file).read_text()
    counts = [text.count(part) for part in ("import math", "STEP = ", "def up(", "STEP = 2")]
    assert counts == [1, 1, 1, 1]
    assert text.index("def up(") < text.index("def memory_plan")
    compile(text, "<file>", "exec")


def test_what_a_cell_replaces_is_kept_once(mine, capsys):
    entry, out = entry_of("12.1"), []
    for last in ("return 1", "return 2", "return 2", "return 1", "return 2"):
        code = f"def memory_plan(*arguments):\n    {last}"
        out += run("12.1", code, capsys)[0]
    kept = sorted((cells.ATTEMPTS / "12.1").iterdir())
    assert [path.name for path in kept] == ["001.py", "002.py"]
    assert "return 1" in kept[0].read_text() and "return 2" in kept[1].read_text()
    assert f"saved in exercises/{entry.file}; before: ATTEMPTS/12.1/001.py" in out


@pytest.mark.parametrize(
    ("id", "code", "said"),
    [
        (
            "12.1",
            "def memory_plan(:\n    return 1",
            "12.1: line 2: invalid syntax: `def memory_plan(:`",
        ),
        (
            "12.1",
            "def plan():\n    return 1",
            "12.1: this cell lacks `memory_plan` of exercise 12.1",
        ),
        (
            "12.1",
            "class BlockManager: ...\ndef memory_plan(): ...",
            "`BlockManager` is of exercise 12.2",
        ),
        ("", "x = 1", "which exercise? Begin the cell with its number: %%exercise 12.2"),
        ("12", "x = 1", "which exercise?"),
        ("99.9", "x = 1", "exercise or lesson '99.9' is unknown"),
    ],
)
def test_what_cannot_be_saved_is_said_in_one_line(id, code, said, mine, capsys):
    before = {path: path.read_text() for path in mine.iterdir()}
    out, _ = run(id, code, capsys)
    assert len(out) == 1 and said in out[0]
    assert before == {path: path.read_text() for path in mine.iterdir()}


def test_a_file_that_is_broken_elsewhere_is_named(mine, capsys):
    entry = entry_of("12.1")
    path = mine / entry.file
    path.write_text(path.read_text() + "\ndef broken(:\n")
    before = path.read_text()
    out, _ = run("12.1", solved(entry), capsys)
    assert len(out) == 1 and "mend this first" in out[0] and "def broken(:" in out[0]
    assert path.read_text() == before


def test_a_file_that_is_lost_comes_back(mine, capsys):
    entry = entry_of("12.1")
    (mine / entry.file).unlink()
    for code in (code_of(entry).partition("\n")[2], solved(entry)):
        run("12.1", code, capsys)
    assert Path(mine / entry.file).exists()
