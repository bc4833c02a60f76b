"""The course keeps its rules: what is false is a failure, what a lesson lacks in form a warning."""

import json
import warnings
from pathlib import Path

import pytest

from tests import (
    anatomy_rules,
    course_rules,
    docstring_rules,
    house_rules,
    link_rules,
    minutes,
    notebook_rules,
    number_rules,
    text_rules,
)
from tests.warned import AnatomyWarning

REPOSITORY = Path(__file__).resolve().parents[1]


RULES = {
    "quoted numbers": number_rules.wrong_numbers,
    "measurements have a source": number_rules.unsourced_numbers,
    "links and images": link_rules.broken_links,
    "tests that texts name": link_rules.unknown_tests,
    "no place on a machine": course_rules.places_on_a_machine,
    "notebooks' outputs": notebook_rules.bad_notebooks,
    "first screens": house_rules.crowded_folders,
    "modules that a room's text names": house_rules.unnamed_modules,
    "who it is that acts": house_rules.vague_persons,
    "plain words": house_rules.unplain_words,
    "one evening a lesson": text_rules.long_cores,
    "minutes of a lesson": minutes.wrong_minutes,
    "minutes of a notebook": minutes.wrong_notebooks,
}
ANATOMY = {
    "parts of a lesson": anatomy_rules.missing_parts,
    "points of a README": anatomy_rules.bad_readmes,
    "docstrings": docstring_rules.wrong_docstrings,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_course_keeps_the_rule(rule):
    complaints = RULES[rule](REPOSITORY)
    assert not complaints, "\n".join(["", *complaints])


@pytest.mark.parametrize("rule", ANATOMY)
def test_anatomy_is_reported(rule):
    """A warning in pytest's summary. The test itself fails only if a file cannot be read."""
    complaints = ANATOMY[rule](REPOSITORY)
    if complaints:
        warnings.warn("\n".join([f"{rule}:", *complaints]), AnatomyWarning, stacklevel=1)


def test_how_the_texts_read_is_reported(request):
    """A warning of `make test-all`. The test itself fails only if a file cannot be read."""
    complaints = text_rules.hard_to_read(REPOSITORY)
    if complaints and request.config.getoption("--all"):
        warnings.warn("\n".join(["texts:", *complaints]), AnatomyWarning, stacklevel=1)


def test_hard_texts_are_seen(tmp_path):
    """The three measures on a text that breaks them all, because a pattern that matches nothing is
    silent.
    """
    room = tmp_path / "lessons/l03_cache"
    room.mkdir(parents=True)
    (room.parent / "GLOSSARY.md").write_text("### slot\nA row. *[Lesson 3](l03_cache/README.md)*\n")
    (room / "README.md").write_text(
        "# A title\n\nRead 5 min · code 5 min · plot 5 min · CPU ok\n\n## Code\nSlots are rows. "
        "They are few · they are small · they are [slots](../GLOSSARY.md#slot) · they are kept.\n"
    )
    sentences, fragments, unlinked = text_rules.hard_to_read(tmp_path)
    assert "words in the mean" in sentences
    assert "a row of fragments" in fragments
    assert "'slot' is used before it is linked" in unlinked


def test_a_long_core_is_seen_and_folds_do_not_count(tmp_path):
    room = tmp_path / "lessons/l03_cache"
    room.mkdir(parents=True)
    line, hidden = "one [two](three.md) four\n", "    code\n<!-- why -->\n"
    fold = "<details>a <details>b\nc</details> d</details>\n"
    (room / "README.md").write_text("# A title\n\n" + 599 * line + hidden + fold)
    assert text_rules.core_words(room) == 2 + 3 * 599
    assert not text_rules.long_cores(tmp_path)
    (room / "README.md").write_text(600 * line + "five\n")
    (complaint,) = text_rules.long_cores(tmp_path)
    assert "1801 words, at most 1800" in complaint


def test_minutes_follow_words_figures_steps_and_exercises(tmp_path):
    """Hints are folded, so they do not count; 11.01 minutes are 15, and the command writes them."""
    room = tmp_path / "lessons/l03_cache"
    room.mkdir(parents=True)
    row = "| [03 cache](lessons/l03_cache/README.md) | slow → fast | 7 | all | none |\n"
    (tmp_path / "README.md").write_text(row)
    steps = "".join(f"\n**Step {number}: a word.**" for number in (1, 2))  # 4 words each
    text = "Read 1 min · code 1 min · plot 10 min\n\n![a figure](a.svg)\n" + steps
    fold = "\n<details><summary><b>3.1 Sum</b> · 8 minutes · ★</summary>\na hint</details>\n"
    words = 8 + 2 + 8  # the dots are no words
    (room / "README.md").write_text(text + fold + (1600 - words) * "word ")
    assert minutes.minutes(room) == (15, 10)  # 8 + 3 = 11
    (complaint,) = minutes.wrong_minutes(tmp_path)
    assert "(1, 1) minutes; by the rule (15, 10)" in complaint
    minutes.write(tmp_path)
    assert not minutes.wrong_minutes(tmp_path)
    assert (tmp_path / "README.md").read_text() == row.replace("| 7 |", "| 35 |")


@pytest.mark.parametrize(
    "said, is_wrong",
    [
        ("The exercises take about an hour. Running the notebook takes a minute.", False),
        ("The exercises\ntake about 70 minutes and everything else 15.", False),
        ("The exercises take about two hours.", True),
        ("About an hour and a half with the exercises; running it takes a minute.", False),
        ("About an hour with the exercises.", True),
        ("The exercises take about a while.", True),
        ("No word of it.", True),
    ],
)
def test_a_notebook_says_the_time_of_its_lesson(said, is_wrong, tmp_path):
    """60 minutes of exercises and 25 of all else; a quarter of an hour may be between them."""
    room = tmp_path / "lessons/l03_cache"
    room.mkdir(parents=True)
    fold = "<details><summary><b>3.1 Sum</b> · 60 minutes · ★</summary>\na hint</details>\n"
    (room / "README.md").write_text("Read 15 min · code 60 min · plot 10 min\n\n" + fold)
    (tmp_path / "notebooks").mkdir()
    cells = {"cells": [{"cell_type": "markdown", "source": said.splitlines(keepends=True)}]}
    (tmp_path / "notebooks/03_cache.ipynb").write_text(json.dumps(cells))
    assert bool(minutes.wrong_notebooks(tmp_path)) == is_wrong


# ---------------------------------------------------------------- notebooks

# Their stored output shows source of another day.
TO_RUN_AGAIN: tuple[str, ...] = ()


def test_source_that_a_notebook_shows_is_that_of_today():
    found = notebook_rules.stale_sources(REPOSITORY)
    stale = [complaint for complaint in found if not complaint.startswith(TO_RUN_AGAIN)]
    assert not stale, "\n".join(["", *stale])
    for path in TO_RUN_AGAIN:
        if not any(complaint.startswith(path) for complaint in found):
            warnings.warn(f"take {path} out of TO_RUN_AGAIN", AnatomyWarning, stacklevel=1)


def test_old_source_in_a_notebook_is_seen(tmp_path):
    """Whole and cut off, decorated, as an excerpt; and text that only looks like a function."""
    (tmp_path / "lessons").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "lessons/naive.py").write_text(
        "@jit\ndef double(x):\n    # twice\n    y = 2 * x\n    return y\n\n\n"
        "class Cache:\n    def read(self):\n        return self.rows\n"
    )
    whole = "@jit\ndef double(x):\n    # twice\n    y = 2 * x\n    return y\n"
    cells = {
        "print(getsource(double))": (whole, whole.replace("twice", "two times")),
        "print(getsource(double).split('return')[0])": (
            whole.replace("return y", ""),
            whole.replace("2 * x\n    return y", "x + x\n    "),
        ),
        "print(getsource(Cache.read)); print(generate(model))": (
            "    def read(self):\n        return self.rows\n\ndef made_up():\n    return 1\n",
            "    def read(self):\n        return self.columns\n",
        ),
        "excerpt(naive.double, 'y =', 'return')": (
            "y = 2 * x\nreturn y\n",
            "y = x + x\nreturn y\n",
        ),
        "excerpt(naive.double, 'y =')": ("y = 2 * x\nreturn y\n", "y = 2 * x\n"),
    }

    def complaints(cell: str, shown: str) -> list[str]:
        output = {"output_type": "stream", "name": "stdout", "text": [shown]}
        code = {"cell_type": "code", "source": [cell], "outputs": [output]}
        (tmp_path / "notebooks/01.ipynb").write_text(json.dumps({"cells": [code]}))
        return notebook_rules.stale_sources(tmp_path)

    for cell, (today, before) in cells.items():
        assert complaints(cell, today) == [], cell
        assert "no file holds" in complaints(cell, before)[0], cell


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "quoted, value",
    [("4.25", 4.2499), ("4", 4.2499), ("1,234", 1234.4), ("1e3", 1400), ("-3", -3.2)],
)
def test_a_number_agrees_to_the_digits_that_it_shows(quoted, value):
    assert number_rules.agrees(quoted, value)


@pytest.mark.parametrize(
    "quoted, value", [("4.24", 4.2499), ("4.3", 4.2499), ("1,234", 1234.6), ("3", -3)]
)
def test_a_number_that_rounds_otherwise_disagrees(quoted, value):
    assert not number_rules.agrees(quoted, value)


def test_a_source_is_evaluated_from_left_to_right():
    noisy = {"x": 2, "y": 9, "flags": ["noisy: the 20-80 % band spans 90% of the median"]}
    data = {"a.b": [{"x": 0.5, "y": 3}, {"x": 1, "y": 6, "flags": []}, noisy]}
    assert number_rules.evaluate(data, '"a.b"."x=0.5".y * 2 / "a.b".x=1.y') == 1
    for expression, error in (
        ('"a.b".x=3.y', LookupError),
        ('"a.b".x=2.y', ValueError),
        ('"a.b".x=1', TypeError),
        ("c", KeyError),
    ):
        with pytest.raises(error):
            number_rules.evaluate(data, expression)


def test_numbers_with_a_wrong_source_or_none_are_seen(tmp_path):
    """The two rules on a text of four numbers, because a pattern that matches nothing is silent."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/r.json").write_text('{"y": 4.2499}')
    room = tmp_path / "lessons/l01_copy"
    room.mkdir(parents=True)
    (room / "README.md").write_text(
        "## Measured\nIt runs at 4.25 TB/s<!-- results/r.json#y -->, **4.3 ×**<!--\n"
        "results/r.json#y -->, in 3 ms, or in `3 ms` of code, as `7<!-- results/r.json#y -->`.\n"
    )
    (wrong,) = number_rules.wrong_numbers(tmp_path)
    assert "4.3 is not the recorded 4.2499" in wrong
    (unsourced,) = number_rules.unsourced_numbers(tmp_path)
    assert "Measured: '3 ms'" in unsourced


def test_a_crowded_room_and_an_unnamed_module_are_seen(tmp_path):
    room = tmp_path / "lessons/l03_cache"
    (room / "kernels").mkdir(parents=True)
    (room / "lab").mkdir()
    (room / "README.md").write_text("Read `cache.py`, then `kernels/decode.py`.")
    for name in ("cache.py", "kernels/decode.py", "lab/pictures.py", "__init__.py"):
        (room / name).write_text("")
    assert not house_rules.crowded_folders(tmp_path) and not house_rules.unnamed_modules(tmp_path)
    (room / "kernels/cache.py").write_text("")  # the text names another file of this name
    (complaint,) = house_rules.unnamed_modules(tmp_path)
    assert "kernels/cache.py" in complaint
    for number in range(9):
        (room / f"{number}.txt").write_text("")
    (complaint,) = house_rules.crowded_folders(tmp_path)
    assert "13 entries" in complaint and "kernels" in complaint
    (room / "cache.py").write_text('"""Nobody owns it.\n\nSomebodys do not count."""')
    (complaint,) = house_rules.vague_persons(tmp_path)
    assert complaint.startswith("lessons/l03_cache/cache.py:1: 'Nobody'")


def test_a_word_that_is_not_plain_is_seen(tmp_path):
    """In a text and in a notebook's Markdown, not in code, and only with this meaning."""
    room = tmp_path / "lessons/l03_cache"
    room.mkdir(parents=True)
    plain = "A stand-in may lie, and understand. `behind` is a name. It lies.\n"
    (room / "README.md").write_text(plain + "The row lies\n behind it.\n")
    cells = [
        {"cell_type": "markdown", "source": ["Nobody waits."]},
        {"cell_type": "code", "source": ["behind = 1"]},
    ]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/03_cache.ipynb").write_text(json.dumps({"cells": cells}))
    found = house_rules.unplain_words(tmp_path)
    assert [complaint.split(": ")[1].split(" in ")[0] for complaint in found] == [
        "'behind'",
        "'Nobody'",
    ]
