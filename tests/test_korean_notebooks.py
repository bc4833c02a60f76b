"""Notebooks with Korean text have the code and the outputs of the English ones, and text cells that
agree with theirs.
"""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from book import notebooks
from book.agreement import differences
from book.stage import Stage
from tests.warned import TranslationWarning

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = notebooks.pages(REPOSITORY)
HANGUL = re.compile("[가-힣]")


def test_what_is_missing_or_stale_is_listed():
    if lines := list(notebooks.report(REPOSITORY)):
        warnings.warn("\n".join(lines), TranslationWarning, stacklevel=1)


@pytest.mark.parametrize("page", PAGES)
def test_cells_agree_with_the_english_ones(page):
    assert notebooks.complaints(REPOSITORY, page) == []


@pytest.mark.parametrize("page", PAGES)
def test_code_and_outputs_are_the_same(page):
    english, korean = (
        notebooks.staged(REPOSITORY, name) for name in (page, notebooks.place_of(page))
    )
    assert len(english["cells"]) == len(korean["cells"])
    for ours, theirs in zip(korean["cells"], english["cells"]):
        text = ours.pop("source") if theirs["cell_type"] == "markdown" else ""
        source = theirs.pop("source") if text else ""
        assert ours == theirs
        assert bool(text) == bool(source)


def test_exercises_are_stated_as_the_korean_lesson_states_them():
    notebook = notebooks.staged(REPOSITORY, "ko/notebooks/02_naive_attention.ipynb")
    stated = {exercise: cell for cell, exercise in notebooks.texts(notebook) if exercise}
    assert list(stated) == ["2.1", "2.2", "2.3", "2.4"]
    english = notebooks.read(REPOSITORY, "notebooks/02_naive_attention.ipynb")
    for cell, exercise in notebooks.texts(english):
        if exercise:
            text = stated[exercise]["source"]
            assert HANGUL.search(text) and text.startswith(f"### {exercise} ")
            assert text.count("<details>") == 3
            assert differences(notebooks.source_of(cell), text) == []


def test_links_lead_to_korean_pages():
    notebook = notebooks.staged(REPOSITORY, "ko/notebooks/02_naive_attention.ipynb")
    text = notebook["cells"][0]["source"]
    assert "](../lessons/l02_naive_attention/README.md)" in text
    copy = notebooks.translated(REPOSITORY, PAGES[2], "build/ko/notebooks/02.ipynb")
    assert "](../../../ko/lessons/l02_naive_attention/README.md)" in copy["cells"][0]["source"]


def test_the_book_leads_from_one_language_to_the_other(tmp_path):
    book = Stage(REPOSITORY, tmp_path)
    for name, switch in {
        PAGES[0]: f"[한국어](../ko/{PAGES[0]})",
        f"ko/{PAGES[0]}": f"[English](../../{PAGES[0]})",
    }.items():
        book.notebook(name)
        first = json.loads((tmp_path / name).read_text(encoding="utf-8"))["cells"][0]
        assert first["source"].splitlines()[2] == switch


@pytest.fixture
def course(tmp_path):
    """A course of one notebook with two text cells, of which the first is translated."""
    cells = [{"cell_type": "markdown", "source": [text]} for text in ("# One 1", "two")]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/01_a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    (tmp_path / "ko/notebooks").mkdir(parents=True)
    text = f"<!-- cell {notebooks.key('# One 1')} -->\n# 하나 1\n"
    (tmp_path / "ko/notebooks/01_a.md").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_cell_that_changed_is_english_again_and_is_listed(course):
    page = "notebooks/01_a.ipynb"
    said = [cell["source"] for cell in notebooks.staged(course, f"ko/{page}")["cells"]]
    assert said == ["# 하나 1", "two"] and notebooks.missing(course, page) == ["two"]
    (line,) = notebooks.report(course)
    assert line == f"{page}: 1 cells stay English, the first one: 'two'"
    text = (course / page).read_text().replace("One", "Once")
    (course / page).write_text(text)
    assert notebooks.staged(course, f"ko/{page}")["cells"][0]["source"] == "# Once 1"
    assert notebooks.stale(course, page) == [notebooks.key("# One 1")]
    assert next(notebooks.report(course)).startswith(f"{page}: stale: cell ")


def test_a_number_that_differs_is_seen(course):
    path = course / "ko/notebooks/01_a.md"
    path.write_text(path.read_text("utf-8").replace("하나 1", "하나 2"), encoding="utf-8")
    found = notebooks.complaints(course, "notebooks/01_a.ipynb")
    assert any("number '2' is here alone" in line for line in found)


def test_a_copy_that_is_there_is_kept(course):
    out = course / "build/ko/notebooks"
    assert list(notebooks.write(course, out)) == ["01_a.ipynb: written"]
    (out / "01_a.ipynb").write_text("mine")
    assert list(notebooks.write(course, out)) == ["01_a.ipynb: kept (--force: again)"]
    assert (out / "01_a.ipynb").read_text() == "mine"
    assert list(notebooks.write(course, out, force=True)) == ["01_a.ipynb: written"]


def test_a_copy_starts_as_the_notebooks_do(tmp_path):
    """Its start.py runs notebooks/start.py, and speaks Korean."""
    start = notebooks.START.format(start=str(REPOSITORY / "notebooks/start.py"))
    (tmp_path / "start.py").write_text(start, encoding="utf-8")
    code = "import os; from start import ROOT, begin; print(ROOT, os.environ[%r])"
    done = subprocess.run(
        [sys.executable, "-c", code % "INFERENCE_LADDER_LANG"],
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(REPOSITORY), "ko"], done.stderr
