"""The course itself is held to its rules; and each rule is shown, on a tiny course with one slip,
that it can fail.
"""

import base64
import io
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests import course_rules, notebook_rules, text_rules

REPOSITORY = Path(__file__).resolve().parents[1]
# Longer than the rule, each with its reason.
LONG = {
    "lessons/toolbox/measure/bench.py": "one harness: declaration, measurement, command",
    "lessons/toolbox/kernels/interpreter.py": "one table of patches with their reasons",
}
RULES = {  # name -> rule
    "every part is there": course_rules.missing_parts,
    "fourteen points": text_rules.bad_readmes,
    "imports point one way": course_rules.wrong_imports,
    "quoted numbers": text_rules.wrong_numbers,
    "measurements have a source": text_rules.unsourced_numbers,
    "links and images": text_rules.broken_links,
    "no place on a machine": course_rules.denied_words,
    "lengths": lambda root: course_rules.too_long(root, LONG),
    "notebooks": notebook_rules.bad_notebooks,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_course_keeps_the_rule(rule):
    complaints = RULES[rule](REPOSITORY)
    assert not complaints, "\n".join(["", *complaints])


# ---------------------------------------------------------------- a tiny course that keeps every rule


def picture(empty=False):
    figure = Figure(figsize=(2, 2))
    if not empty:
        figure.add_subplot().plot([1, 2, 3], lw=5)
    figure.savefig(buffer := io.BytesIO(), format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def notebook(**changes):
    """A notebook of one text and one code cell; changes: keys of the code cell."""
    figure = {
        "output_type": "display_data",
        "data": {"image/png": picture(), "text/plain": "<Figure size 200x200 with 1 Axes>"},
        "metadata": {},
    }
    code = {
        "cell_type": "code",
        "source": ["1 + 1"],
        "execution_count": 1,
        "metadata": {},
        "outputs": [figure],
    } | changes
    text = {
        "cell_type": "markdown",
        "source": ["See [the lesson](../lessons/l01_copy/README.md#quiz)."],
        "metadata": {},
    }
    return json.dumps({"cells": [text, code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


QUESTION = "Question?\n<details><summary>Answer</summary>Because.</details>\n"
README = f"""# A copy moves every byte twice and no more

20 min read, 20 min code · CPU is enough, GPU for timing · needs no lesson

## You will be able to
- count bytes
## The bottleneck
It was slow.
## The idea in one picture
![Two boxes and an arrow from one to the other](picture.svg)
## Derivation
Two bytes.
## Code
Read [`naive.py`](naive.py).
## What must hold, and what breaks if it doesn't
| what | test |
|---|---|
| all of it | `test_copy` |
## Exercises
`make check LESSON=01`
{QUESTION * 3}
## Measured
It runs at 4.25 TB/s<!-- results/gpu/benchmarks.json#01.records.copy.points.x=8.bytes_per_s * 1e-12 -->, **2.0 ×**<!--
results/gpu/benchmarks.json#01.records.copy.points.-1.bytes_per_s / 01.records.copy.points.0.bytes_per_s --> as fast,
and `3 ms` in code.
## Where it loses
Nowhere; the floor is 3 ms<!-- 12 GB at 4 TB/s -->.
## In production
Everywhere.
## Quiz
{QUESTION * 5}
## Next
[a](https://a.org) *A paper* <https://c.org>
"""
RESULT = {
    "01": {
        "records": {
            "copy": {
                "points": [{"x": 4, "bytes_per_s": 2.125e12}, {"x": 8, "bytes_per_s": 4.2499e12}]
            }
        }
    }
}
OPTIMIZED = '''"""Fast."""
from lessons.toolbox.kernels.triton_ import triton
@triton.jit
def copy_kernel(x_ptr):
    pass
'''
FILES = {
    "README.md": "# Course\n[lesson 1](lessons/l01_copy/)\n",
    "lessons/__init__.py": "",
    "lessons/toolbox/kernels/triton_.py": "import triton\n",
    "lessons/l01_copy/README.md": README,
    "lessons/l01_copy/picture.svg": "<svg/>",
    "lessons/l01_copy/naive.py": "from lessons.toolbox import triton_\n",
    "lessons/l01_copy/optimized.py": OPTIMIZED,
    "lessons/l01_copy/test_equivalence.py": "def test_copy(proof):\n    proof.record(copy_kernel, "
    "None)\n",
    "lessons/l01_copy/benchmark.py": "from lessons.l01_copy.naive import triton_\n",
    # no README: not held to the rest
    "lessons/l02_unfinished/naive.py": "from lessons.l01_copy import naive\n",
    "notebooks/01_copy.ipynb": notebook(),
    "solutions/l01_copy.py": "",
    "exercises/l01_copy.py": "",
    "reference/ladder.py": "from lessons.l02_unfinished import naive\n",
    "tests/exercises/test_l01.py": "from reference.ladder import naive\n",
    "tests/exercises/wrong/l01.py": "",
    "results/gpu/benchmarks.json": json.dumps(RESULT),
}


def course(folder, **changes):
    """Write the tiny course; changes: file -> new content, or a function of the old one, or None to
    leave it out.
    """
    for name, text in {**FILES, **changes}.items():
        text = text(FILES[name]) if callable(text) else text
        if text is not None:
            (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_course_passes(rule, tmp_path):
    assert RULES[rule](course(tmp_path)) == []


def readme(old, new):
    assert old in README
    return {"lessons/l01_copy/README.md": README.replace(old, new)}


def cell(**changes):
    return {"notebooks/01_copy.ipynb": notebook(**changes)}


def shows(**output):
    return cell(outputs=[{"output_type": "stream", "name": "stdout", "text": ""} | output])


SLIPS = [  # (rule, the one file that is wrong, what the complaint says)
    *[
        ("every part is there", {name: None}, f"{name} is missing")
        for name in FILES
        if "01_" in name and not name.endswith(("README.md", ".svg", "gpu"))
    ],
    (
        "fourteen points",
        readme("# A copy moves every byte twice and no more", "# Copies"),
        "makes no claim",
    ),
    ("fourteen points", readme("20 min read, 20 min code", "quick"), "how long it takes"),
    ("fourteen points", readme("CPU is enough", "any machine"), "whether a CPU is enough"),
    ("fourteen points", readme("needs no lesson", "stands alone"), "what it needs"),
    *[
        (
            "fourteen points",
            readme(f"## {heading}", f"## About {heading}"),
            f"headings are missing: {heading}",
        )
        for heading in text_rules.HEADINGS
    ],
    (
        "fourteen points",
        {
            "lessons/l01_copy/README.md": README.replace("## Code", "## X")
            .replace("## Derivation", "## Code")
            .replace("## X", "## Derivation")
        },
        "not in the order",
    ),
    ("fourteen points", readme("![Two", "[Two"), "shows no image"),
    ("fourteen points", readme("`test_copy`", "trust me"), "no test is named"),
    ("fourteen points", readme("`test_copy`", "`test_cpoy`"), "there is no test test_cpoy"),
    ("fourteen points", readme("| all of it | `test_copy` |\n", ""), "there is no table"),
    ("fourteen points", readme("make check", "look at"), "no command that checks them"),
    ("fourteen points", readme(QUESTION * 5, QUESTION * 4), "4 folded answers, not 5"),
    (
        "fourteen points",
        readme(f"LESSON=01`\n{QUESTION}", "LESSON=01`\n"),
        "fewer than three folded hints",
    ),
    ("fourteen points", readme("*A paper*", "**A paper**"), "fewer than three primary"),
    (
        "imports point one way",
        {"lessons/toolbox/kernels/triton_.py": "def f():\n    import lessons.l01_copy\n"},
        "below the lessons",
    ),
    (
        "imports point one way",
        {"lessons/toolbox/kernels/triton_.py": "from lessons import l01_copy\n"},
        "below the lessons",
    ),
    (
        "imports point one way",
        {"lessons/l01_copy/naive.py": "import lessons.l02_unfinished.naive\n"},
        "only lessons before it",
    ),
    (
        "imports point one way",
        {"lessons/l01_copy/naive.py": "from . import optimized\n"},
        "relative imports",
    ),
    (
        "imports point one way",
        {"lessons/l01_copy/naive.py": "from reference import ladder\n"},
        "stand below it",
    ),
    (
        "imports point one way",
        {"lessons/l01_copy/test_equivalence.py": "from solutions import l01_copy\n"},
        "stand below it",
    ),
    (
        "imports point one way",
        {"solutions/l01_copy.py": "from reference import ladder\n"},
        "only notebooks, tests and reference",
    ),
    ("quoted numbers", readme("4.25 TB/s", "4.26 TB/s"), "4.26 is not the recorded 4.2499"),
    ("quoted numbers", readme("2.0 ×", "2.1 ×"), "2.1 is not the recorded 1.99995"),
    ("quoted numbers", readme("x=8", "x=9"), "no entry with x=9"),
    ("quoted numbers", readme("copy.points.x=8", "scale.points.x=8"), "cannot be read (KeyError"),
    ("quoted numbers", readme("x=8.bytes_per_s", "x=8"), "cannot be read (TypeError"),
    ("quoted numbers", {"results/gpu/benchmarks.json": None}, "cannot be read (FileNotFoundError"),
    ("quoted numbers", readme("4.25 TB/s", "fast"), "no number stands before"),
    ("measurements have a source", readme("`3 ms`", "3.5 ms"), "'3.5 ms' has no <!-- results"),
    ("measurements have a source", readme("Nowhere", "At 12 GB/s"), "Where it loses: '12 GB/s'"),
    ("links and images", readme("(naive.py)", "(naiv.py)"), "naiv.py does not exist"),
    (
        "links and images",
        readme("![Two boxes and an arrow from one to the other]", "![]"),
        "picture.svg has no alt text",
    ),
    ("links and images", readme("(naive.py)", "(#quizz)"), "#quizz: there is no such heading"),
    (
        "links and images",
        {"README.md": '<img src="nothing.png" alt="x">'},
        "nothing.png does not exist",
    ),
    (
        "links and images",
        {"README.md": '<img src="lessons/l01_copy/picture.svg">'},
        "has no alt text",
    ),
    (
        "links and images",
        {"notebooks/01_copy.ipynb": notebook().replace("#quiz", "#quibble")},
        "no such heading",
    ),
    (
        "no place on a machine",
        {"solutions/l01_copy.py": "# see /ho" + "me/anna/notes\n"},
        "a path of somebody's machine",
    ),
    ("lengths", {"lessons/l01_copy/naive.py": "\n" * 201}, "201 lines, more than 200"),
    ("lengths", {"reference/ladder.py": "\n" * 301}, "301 lines, more than 300"),
    (
        "lengths",
        {"reference/ladder.py": "def f():\n" + "    f()\n" * 60},
        "f: 61 lines, more than 60",
    ),
    ("notebooks", cell(outputs=[]), "has no outputs"),
    ("notebooks", cell(execution_count=None), "code cell 1 was not run"),
    (
        "notebooks",
        shows(output_type="error", ename="ValueError", evalue="no"),
        "ends in ValueError: no",
    ),
    ("notebooks", shows(name="stderr", text=["Traceback (most recent"]), "shows a traceback"),
    (
        "notebooks",
        shows(output_type="display_data", data={"image/png": picture(empty=True)}),
        "an empty figure",
    ),
    (
        "notebooks",
        shows(output_type="display_data", data={"text/plain": "<Figure size 2x2 with 0 Axes>"}),
        "without axes",
    ),
    ("notebooks", shows(text=["saved in /tm" + "p/x"]), "the absolute path /tm" + "p/x"),
    ("notebooks", cell(source="open('/ho" + "me/x')"), "the absolute path"),
    (
        "notebooks",
        {"notebooks/01_copy.ipynb": json.dumps({"cells": json.loads(notebook())["cells"] * 16})},
        "32 cells",
    ),
]


@pytest.mark.parametrize(
    "rule, wrong, said", SLIPS, ids=[f"{rule}: {said}" for rule, _, said in SLIPS]
)
def test_each_rule_sees_its_slip(rule, wrong, said, tmp_path):
    complaints = RULES[rule](course(tmp_path, **wrong))
    assert any(said in complaint for complaint in complaints), complaints


def test_numbers_agree_to_the_digits_that_they_show():
    for quoted, value in (
        ("4.25", 4.2499),
        ("4.2", 4.2499),
        ("4", 4.2499),
        ("1,234", 1234.4),
        ("1e3", 1400),
        ("-3", -3.2),
    ):
        assert text_rules.agrees(quoted, value), (quoted, value)
    for quoted, value in (
        ("4.24", 4.2499),
        ("4.3", 4.2499),
        ("5", 4.2499),
        ("1,234", 1234.6),
        ("3", -3),
    ):
        assert not text_rules.agrees(quoted, value), (quoted, value)


def test_keys_with_dots_stand_in_quotes():
    assert text_rules.evaluate({"a.b": [{"x": 0.5, "y": 3}]}, '"a.b"."x=0.5".y * 2') == 6
