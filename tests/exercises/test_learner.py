"""What a learner sees: one message per failure, whatever the file holds. And: a solved exercise
stands in for a lesson's part.
"""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from lessons.toolbox.exercises import report as exercise_report
from lessons.toolbox.exercises.exercise import (
    ROOT,
    SOLUTIONS,
    ExerciseError,
    find_exercise,
    lesson_key,
    main,
    read_exercises,
)
from tests.exercises.checking import assert_equal, assert_largest_tensor, call, check, compare
from tests.exercises.killing import runs_of
from tests.exercises.running import FAIL, NOT_RUN, hint_for, load, run_check
from tests.exercises.wrong import WrongAnswer

FIRST, *_ = read_exercises(SOLUTIONS / "l02_naive_attention.py")


@pytest.fixture
def mine(tmp_path):
    """A function that writes a learner's lesson 02, spoiled here and there, and returns its folder."""

    def write(*changes, folder="mine"):
        text = (SOLUTIONS / FIRST.file).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FIRST.file).write_text(text)
        return tmp_path / folder

    return write


def test_a_learners_terminal(mine):
    """A known slip, an exception, a stub and an endless loop in one file: one message each, no
    traceback, exit code 1.
    """
    folder = mine(
        (".tril(num_keys - num_queries)", ".tril()"),
        ("p.sort(dim=-1,", "p.sort(dim=7,"),
        (
            "    output = []\n",
            '    raise NotImplementedError("Exercise 2.3: later")\n    output = []\n',
        ),
        ("    budget_bytes =", "    while num_heads == 16: pass\n    budget_bytes ="),
    )
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "pytest",
        "tests/exercises/test_l02.py",
        "--impl",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "18 failed, 15 passed, 7 todo" in text, text
    assert "Traceback" not in text and "def test_" not in text
    assert (
        "values[fewer_queries], the last query stands at the last key: your result: worst element ["
        in text
    )
    assert "looks like: Your mask is aligned top left." in text
    assert (
        "mine/l02_naive_attention.py, line" in text and "IndexError: Dimension out of range" in text
    )
    assert "exercise 2.3 still to do" in text
    assert (
        "tokens_that_fit[half_a_gib], memory need not be whole: stopped after 5 s. Is there an "
        "endless loop?" in text
    )


def test_a_hint_needs_the_same_results():
    """Two slips may share a message (worst element, values, count); only equal results make one
    look like the other.
    """

    def same_message(impl, seed):
        assert impl(1)[0] == 1, "wrong"

    answer = WrongAnswer("2.1", "known", lambda x: [0, 7], "you return 7")
    this = check("2.1")(same_message).check
    for mine, hint in (([0, 7], "you return 7"), ([0, 8], None), ([0, True], None)):
        failed = run_check(this, lambda mine=mine: lambda x: mine, None, 0)
        assert failed.status == FAIL and hint_for(failed, this, [answer], None, 0) == hint


def outcome_of(folder, entry=FIRST):
    run = runs_of(entry)[0]
    return run_check(run.check, lambda: load(folder, entry), run.case, 0, folder / entry.file)


def test_a_file_that_does_not_parse(mine):
    folder = mine(("scores = torch.einsum(", "scores = torch.einsum(("))
    line = (folder / FIRST.file).read_text().split("scores = ")[0].count("\n") + 1
    for _ in range(2):  # the second answer comes from memory
        outcome = outcome_of(folder)
        assert outcome.status == FAIL and "\n" not in outcome.message
        assert (
            f"mine/{FIRST.file}, line {line}: SyntaxError: '(' was never closed: `scores = "
            in outcome.message
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            ("import math", "import maths"),
            "line 5: ModuleNotFoundError: No module named 'maths': `import maths`",
        ),
        (("def attention(", "def attend("), "has no `attention` any more (exercise 2.1)"),
        (("import math", "import math, sys; sys.exit('done')"), "line 5: SystemExit: done"),
    ],
)
def test_a_file_that_does_not_load(mine, change, message):
    outcome = outcome_of(mine(change))
    assert outcome.status == FAIL and message in outcome.message and "\n" not in outcome.message


def test_a_missing_file(tmp_path):
    outcome = outcome_of(tmp_path)
    assert outcome.status == FAIL
    assert (
        "is missing; get it back: python -m lessons.toolbox.exercises generate 02"
        in outcome.message
    )


def endless(impl, seed):
    while True:
        impl()


def deaf():
    """Swallows Exception, as a learner's loop may."""
    while True:
        with suppress(Exception):
            sum(range(1000))


@pytest.mark.parametrize("impl", [lambda: None, deaf], ids=["plain", "swallows exceptions"])
def test_an_endless_loop(impl):
    outcome = run_check(check("2.1", seconds=0.3)(endless).check, lambda: impl, None, 0)
    assert (outcome.status, outcome.message) == (
        FAIL,
        "endless: stopped after 0.3 s. Is there an endless loop?",
    )


def test_a_file_that_never_loads_is_tried_once(tmp_path):
    (tmp_path / FIRST.file).write_text("while True: pass\n")
    run = runs_of(FIRST)[0]
    impatient = replace(run.check, seconds=0.3)
    first, second = (
        run_check(impatient, lambda: load(tmp_path, FIRST), run.case, 0) for _ in range(2)
    )
    assert "endless loop" in first.message and "does not finish loading" in second.message


def test_not_run_is_not_passed():
    def skips(impl, seed):
        pytest.skip("needs a CUDA device")

    outcome = run_check(check("2.1")(skips).check, lambda: None, None, 0)
    assert (outcome.status, outcome.message) == (NOT_RUN, "needs a CUDA device")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda x: None, "NoneType, expected a tensor of shape [2, 3] (is a `return` missing?)"),
        (lambda x: x[:1], "has shape [1, 3], expected [2, 3]"),
        (lambda x: x.half(), "is float16, expected float32"),
        (
            lambda x: x.index_fill(0, torch.tensor(1), float("nan")),
            "[1, 0]: yours nan, expected 0 (tolerance 0.1); 3 of 6 wrong",
        ),
        (
            lambda x: x + torch.tensor([0, 0.05, 2]),
            "worst element [0, 2]: yours 2, expected 0 (tolerance 0.1); 2 of 6 wrong",
        ),
        (lambda x: x.add_(1), "changed its argument `x` in place: 6 of 6 elements"),
        (
            lambda x: x.unsqueeze_(0),
            "changed its argument `x` in place: its shape was [2, 3], is [1, 2, 3]",
        ),
    ],
)
def test_comparing(spoil, message):
    with pytest.raises(AssertionError) as caught:
        compare(spoil, {"x": torch.zeros(2, 3)}, torch.zeros(2, 3), atol=0.1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "got, want, message",
    [
        (None, 3, "is None, expected 3 (is a `return` missing?)"),
        (3.0, 3, "is 3.0, expected 3 (float, expected int)"),
        (torch.tensor([3, 4]), 3, "(Tensor, expected int)"),
        ([1, 5], [1, 2], "your result[1] is 5, expected 2"),
        ([1], [1, 2], "has 1 entries, expected 2"),
        (float("nan"), 1.0, "is nan, expected 1"),
    ],
)
def test_comparing_what_is_no_tensor(got, want, message):
    with pytest.raises(AssertionError) as caught:
        assert_equal(got, want)
    assert message in str(caught.value)
    assert_equal(want, want)


@pytest.mark.parametrize(
    "spoil", [lambda x: x.append(1), lambda x: x[0].add(7), lambda x: x.clear()]
)
def test_arguments_other_than_tensors_are_watched_too(spoil):
    with pytest.raises(AssertionError, match="changed its argument `x` in place: it was"):
        call(spoil, {"x": [{1, 2}, 3]})


def test_memory_guard():
    assert_largest_tensor(65, "the row alone is needed", lambda x: x.sum(0), torch.ones(8, 8))
    with pytest.raises(
        AssertionError,
        match=r"a tensor of 64 elements, \[8, 8\]; fewer than 64 are enough: stream the tiles",
    ):
        assert_largest_tensor(64, "stream the tiles", lambda x: (x + 1).sum(0), torch.ones(8, 8))


# ---------------------------------------------------------------- make check, make progress


def test_check_and_progress(mine, capsys, monkeypatch, tmp_path):
    """PASS is remembered for the code that passed, and for no other."""
    solved, spoiled = (
        mine(folder="solved"),
        mine(("math.isqrt", "1 + math.isqrt"), folder="spoiled"),
    )
    monkeypatch.setattr(exercise_report, "PROGRESS_FILE", tmp_path / "build" / "progress.json")
    monkeypatch.setattr(
        exercise_report, "folder_of", lambda impl: solved if impl == "exercises" else spoiled
    )
    entry = find_exercise("2.4")
    outcomes = {"PASS": True, "NOT RUN": True, "TODO": False, "FAIL": False}
    for status, good in outcomes.items():
        monkeypatch.setattr(
            exercise_report,
            "_records",
            lambda entries, impl, status=status: [
                {"exercise": "2.4", "check": "a", "status": "PASS", "message": ""},
                {"exercise": "2.4", "check": "b", "status": status, "message": "because [of] this"},
            ],
        )
        assert exercise_report.run_checks("2.4") is good
        assert exercise_report.status_now(entry, exercise_report._remembered()) == status
        assert status in (text := capsys.readouterr().out) and ("because [of] this" in text) == (
            status in ("FAIL", "NOT RUN")
        )
    exercise_report.print_progress()
    assert "✗ 2.4" in capsys.readouterr().out
    monkeypatch.setattr(exercise_report, "folder_of", lambda impl: spoiled)
    assert exercise_report.status_now(entry, exercise_report._remembered()) == "CHANGED"


def test_check_runs_the_checks(mine, capsys):
    folder = mine(("math.isqrt", "1 + math.isqrt"))
    assert main(["check", "2.4", "--impl", str(folder)]) == 1
    text = capsys.readouterr().out
    assert (
        "FAIL    2.4" in text
        and "0 of 5 checks passed" in text
        and "One token more than that does not fit" in text
    )


@pytest.mark.parametrize("lesson", ["99", "x", "", "2.1"])
def test_unknown_lesson(lesson, capsys):
    with pytest.raises(ExerciseError, match=r"has no exercises; accepted: .*02"):
        lesson_key(lesson)
    assert main(["generate", "99"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["check", "2.99"]) == 2


# ---------------------------------------------------------------- drop-ins

DROP_IN = """
import json, sys
from lessons.l02_naive_attention import naive
from lessons.toolbox.exercises.loading import use_implementation
for folder in sys.argv[1:]:
    report = use_implementation(folder)
    print(json.dumps([next(row for row in report if row[0] == "2.1"), naive.attention.__module__]))
"""


def test_drop_in(mine):
    """The three that cannot be used leave the lesson as it was; then the one that can takes its
    place.
    """
    later = '    raise NotImplementedError("Exercise 2.1: later")\n    group = num_heads'
    folders = [
        mine(("    group = num_heads", later), folder="stub"),
        mine(("import math", "import maths"), folder="broken"),
        mine(("window: int | None = None", "width: int | None = None"), folder="renamed"),
        mine(folder="solved"),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DROP_IN, *map(str, folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    lesson, starts = (
        "lessons.l02_naive_attention.naive",
        ["not solved yet", "cannot be loaded", "cannot stand in", "used"],
    )
    assert [row[0][1] for row in rows] == [f"{lesson}:attention"] * 4
    assert [row[0][2].startswith(start) for row, start in zip(rows, starts)] == [True] * 4, rows
    assert [row[1] for row in rows] == [lesson] * 3 + ["solved.l02_naive_attention"]
