"""What a learner sees: one message per failure, whatever the file holds. And: a solved exercise
stands in for a lesson's part.
"""

import csv
import json
import re
import subprocess
import sys
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace
from datetime import date
from math import inf, nan
from pathlib import Path

import pytest
import torch

from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.toolbox.exercises import progress as exercise_progress
from lessons.toolbox.exercises import report as exercise_report
from lessons.toolbox.exercises.__main__ import main
from lessons.toolbox.exercises.exercise import ROOT, SOLUTIONS, ExerciseError, all_exercises
from lessons.toolbox.exercises.loading import load_exercise
from lessons.toolbox.kernels.triton_ import _Absent, tl, triton
from lessons.toolbox.measure.device import interpreting
from tests.exercises.checking import assert_equal, assert_largest_tensor, call, check, compare
from tests.exercises.given import arguments_of
from tests.exercises.ranks_apart import Kept
from tests.exercises.running import FAIL, NOT_RUN, PASS, checks_of, hint_for, run_check
from tests.exercises.wrong import WrongAnswer

LESSON = all_exercises("02")
FIRST = LESSON[0]


def checks_from(function, exercise_id="2.1", **options):
    """The checks that a test function makes, outside any test file."""
    return list(check(exercise_id, **options)(function).checks.values())


@pytest.fixture
def mine(tmp_path):
    """A function that writes a learner's lesson 02, spoiled here and there; returns its folder."""

    def write(*changes, folder="mine"):
        text = (SOLUTIONS / FIRST.file).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FIRST.file).write_text(text)
        return tmp_path / folder

    return write


@pytest.mark.sample(3, of="processes")
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
    counted = re.search(r"(\d+) failed, (\d+) passed, (\d+) todo", text)
    assert done.returncode == 1 and counted, text
    total = {entry.id: len(checks_of(entry)) for entry in LESSON}
    assert sum(map(int, counted.groups())) == sum(total.values())
    assert int(counted[3]) == total["2.3"]
    assert "Traceback" not in text and "def test_" not in text
    assert (
        "values[fewer_queries], the last query belongs to the last key: your result: worst "
        "element [" in text
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


# ---------------------------------------------------------------- hints


def returns(values, name="known", hint="known"):
    """A wrong answer that returns one of these for each of three inputs."""
    return WrongAnswer("2.1", name, lambda x: values[x], hint)


def first_entry(impl, case, seed):
    """A check whose message tells less than the result."""
    assert impl(int(case))[0] == 1, "wrong"


THREE = checks_from(first_entry, cases={"0": "one input", "1": "another", "2": "a third"})
KNOWN = [[0, 7], [0, 7], [1, 1]]


@pytest.mark.parametrize(
    "mine, hinted",
    [
        (KNOWN, True),
        ([[0, 8], [0, 7], [1, 1]], False),  # another result
        ([[0, True], [0, 7], [1, 1]], False),  # of another type
        ([(0, 7), [0, 7], [1, 1]], False),
        ([[0, 7], [0, 8], [1, 1]], False),  # the same here, another one in half of the failures
        ([[0, 7], [0, 7], [0, 1]], False),  # fails elsewhere too
        ([[0, 7], [1, 7], [1, 1]], False),  # passes elsewhere
    ],
)
def test_a_hint_needs_the_same_results(mine, hinted):
    """Two slips may share a message (worst element, values, count), and even a result."""
    assert run_check(THREE[0], lambda: lambda x: mine[x], 0).status == FAIL
    hint = hint_for(THREE[0], lambda x: mine[x], [returns(KNOWN)], THREE)
    assert hint == ("known" if hinted else None)


def test_a_slip_is_known_although_one_failure_of_three_differs():
    known, mine = returns([[0, 7]] * 3), [[0, 7], [0, 7], [0, 8]]
    hints = [hint_for(check, lambda x: mine[x], [known], THREE) for check in THREE]
    assert hints == ["known", "known", None]


def test_a_named_tuple_of_the_learners_file_is_known_by_its_values():
    """The file of wrong answers has another class of the same name."""
    pair = {box: namedtuple("Pair", "a b") for box in ("mine", "theirs")}
    known = replace(returns(KNOWN), function=lambda x: [pair["theirs"](KNOWN[x], 2.0)])
    for second, hint in ((2.0, "known"), (3.0, None)):
        mine = lambda x, second=second: [pair["mine"](KNOWN[x], second)]
        assert hint_for(THREE[0], mine, [known], THREE) == hint


def test_of_two_that_fit_no_hint_is_shown():
    value = [[nan, 7], [nan, 7], [1, 1]]
    known, other = returns(value, hint="0 / 0"), returns(value, "other", "inf - inf")
    apart = returns([[nan, 7], [1, 7], [1, 1]], "apart", "fails once")

    def hint(*answers):
        return hint_for(THREE[0], lambda x: value[x], answers, THREE)

    assert hint(known, apart) == "0 / 0"
    assert hint(known, other) is None
    assert hint(known, replace(other, hint="0 / 0")) == "0 / 0"


def test_what_is_compared_tells_slips_apart():
    """An object of a class is not compared, so what the check looked at has to be."""

    class Box:
        def __init__(self, value):
            self.value = value

    def looks_inside(impl, seed):
        assert_equal(impl().value, torch.ones(2), atol=0.1)

    checks = checks_from(looks_inside)
    known = WrongAnswer("2.1", "known", lambda: Box(torch.tensor([1.0, 3.0])), "3")
    for value, hint in (([1.0, 3.0 + 1e-6], "3"), ([1.05, 3.0], None), ([1.0, 3.1], None)):
        box = Box(torch.tensor(value))
        assert hint_for(checks[0], lambda box=box: box, [known], checks) == hint


def test_a_rule_that_is_broken_differently_is_another_slip():
    """The results are right here: only the message knows what was done wrong."""

    def allocates(impl, seed):
        assert_largest_tensor(8, "one row is enough", impl, torch.ones(4))

    checks = checks_from(allocates)
    known = WrongAnswer("2.1", "known", lambda x: x.repeat(4)[:4] * 1, "four copies")
    assert hint_for(checks[0], lambda x: x.repeat(4)[:4] + 0, [known], checks) == "four copies"
    assert hint_for(checks[0], lambda x: x.repeat(5)[:4] + 0, [known], checks) is None


def test_what_the_learner_prints_is_not_printed_again(capsys):
    def talks(x):
        print("here")
        return KNOWN[x]

    assert hint_for(THREE[0], talks, [returns(KNOWN)], THREE) == "known"
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- whatever the file holds


def outcome_of(folder, entry=FIRST):
    check = checks_of(entry)[0]
    return run_check(check, lambda: load_exercise(folder, entry), 0, folder / entry.file)


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
            ": ModuleNotFoundError: No module named 'maths': `import maths`",
        ),
        (("def attention(", "def attend("), "has no `attention` any more (exercise 2.1)"),
        (
            ("import math", "import math, sys; sys.exit('done')"),
            ": SystemExit: done: `import math, sys; sys.exit('done')`",
        ),
    ],
)
def test_a_file_that_does_not_load(mine, change, message):
    outcome = outcome_of(mine(change))
    assert outcome.status == FAIL and message in outcome.message and "\n" not in outcome.message


@pytest.mark.parametrize(
    "line",
    [
        "from lessons.l02_naive_attention.naive import attention as theirs",
        "import solutions.l02_naive_attention",
        "from reference.engine.engine import llm",
    ],
)
def test_a_file_that_imports_the_answer(mine, line):
    folder = mine(("import math\n", f"import math\n{line}\n"))
    outcome = outcome_of(folder)
    assert outcome.status == FAIL
    assert re.search(r"imports (lessons|solutions|reference)\..*2.1 without it", outcome.message)


def test_what_an_earlier_lesson_built_may_be_imported(mine):
    line = "from lessons.l01_roofline.naive import *  # noqa"
    assert outcome_of(mine(("import math\n", f"import math\n{line}\n"))).status == PASS


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
    (this,) = checks_from(endless, seconds=0.3)
    outcome = run_check(this, lambda: impl, 0)
    assert (outcome.status, outcome.message) == (
        FAIL,
        "endless: stopped after 0.3 s. Is there an endless loop?",
    )


def test_a_file_that_never_loads_is_tried_once(tmp_path):
    (tmp_path / FIRST.file).write_text("while True: pass\n")
    impatient = replace(checks_of(FIRST)[0], seconds=0.3)
    first, second = (
        run_check(impatient, lambda: load_exercise(tmp_path, FIRST), 0) for _ in range(2)
    )
    assert "endless loop" in first.message and "does not finish loading" in second.message


def test_not_run_is_not_passed():
    def skips(impl, seed):
        pytest.skip("needs a CUDA device")

    (this,) = checks_from(skips)
    outcome = run_check(this, lambda: None, 0)
    assert (outcome.status, outcome.message) == (NOT_RUN, "needs a CUDA device")


def test_a_kernel_without_triton_is_not_run_and_not_wrong():
    """As on macOS, where no kernel can be tested."""

    def launches(impl, seed):
        impl()[(1,)]()

    (this,) = checks_from(launches)
    outcome = run_check(this, lambda: lambda: _Absent("my_kernel"), 0)
    assert outcome.status == NOT_RUN
    assert "Triton is not installed, so kernel 'my_kernel' cannot run" in outcome.message


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
        ([1, 2], (1, 2), "your result is a list of 2 (list, expected tuple)"),
        ([(1, 2)], [[1, 2]], "your result[0] is a tuple of 2 (tuple, expected list)"),
        (float("nan"), 1.0, "is nan, expected 1"),
    ],
)
def test_comparing_what_is_no_tensor(got, want, message):
    with pytest.raises(AssertionError) as caught:
        assert_equal(got, want)
    assert message in str(caught.value)
    assert_equal(want, want)


@pytest.mark.parametrize("rtol", [0.0, 1e-2])
@pytest.mark.parametrize("want", [-inf, inf])
def test_where_infinity_is_expected_only_infinity_passes(want, rtol):
    wanted = torch.tensor([0.0, want])
    for tensor in (wanted, wanted.double(), wanted.half()):
        assert_equal(tensor, tensor.double(), atol=1e-3, rtol=rtol, dtype=tensor.dtype)
    assert_equal(want, want, atol=1e-3, rtol=rtol)
    for got in (nan, -want, 0.0, -1e30, 3e38):
        with pytest.raises(AssertionError, match=r"\[1\]: yours .* \(tolerance 0\); 1 of 2 wrong"):
            assert_equal(torch.tensor([0.0, got]), wanted, atol=1e-3, rtol=rtol)
        with pytest.raises(AssertionError, match=r"expected -?inf"):
            assert_equal(got, want, atol=1e-3, rtol=rtol)


@pytest.mark.parametrize("rtol", [0.0, 1e-2])
@pytest.mark.parametrize("got", [nan, inf, -inf])
def test_neither_nan_nor_infinity_passes_for_a_number(got, rtol):
    for want in (0.0, 1.0, nan):
        with pytest.raises(AssertionError, match="1 of 2 wrong"):
            assert_equal(torch.tensor([1.0, got]), torch.tensor([1.0, want]), atol=1, rtol=rtol)


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
    monkeypatch.setattr(exercise_progress, "PROGRESS_FILE", tmp_path / "build" / "progress.json")
    monkeypatch.setattr(exercise_progress, "EXERCISES", mine(folder="solved"))
    (entry,) = all_exercises("2.4")
    outcomes = {"PASS": True, "NOT RUN": True, "TODO": False, "FAIL": False}
    for status, good in outcomes.items():
        records = [
            {"exercise": "2.4", "status": "PASS", "message": ""},
            {"exercise": "2.4", "status": status, "message": "because [of] this"},
        ]
        monkeypatch.setattr(exercise_report, "records_of", lambda *args, records=records: records)
        assert exercise_report.run_checks("2.4") is good
        assert exercise_progress.status_now(entry) == status
        text = capsys.readouterr().out
        assert status in text and ("because [of] this" in text) == (status in ("FAIL", "NOT RUN"))
    exercise_progress.print_progress()
    text = capsys.readouterr().out
    # of this lesson 2.1 alone is a part of the ladder, and the folder has no other lesson
    assert "✗ 2.4" in text and "* 2.1◆" in text and "2.4◆" not in text
    assert re.search(r"◆ a part of the ladder.*: 1 of \d+ are yours", text)
    spoiled = mine(("math.isqrt", "1 + math.isqrt"), folder="spoiled")
    monkeypatch.setattr(exercise_progress, "EXERCISES", spoiled)
    assert exercise_progress.status_now(entry) == "CHANGED"
    exercise_progress.export_progress(tmp_path / "progress.csv")
    rows = list(csv.DictReader((tmp_path / "progress.csv").open()))
    (row,) = (row for row in rows if row["exercise"] == "2.4")
    assert len(rows) == len(all_exercises()) and row["status"] == "CHANGED"
    # a first pass stays, and an untouched stub is no attempt
    assert row["first passed"] == date.today().isoformat() and row["checks"] == "3"


def test_what_an_earlier_version_remembered_is_read(tmp_path, monkeypatch):
    """And a file that is none loses nothing but itself."""
    file = tmp_path / "progress.json"
    monkeypatch.setattr(exercise_progress, "PROGRESS_FILE", file)
    file.write_text('{"2.4": ["PASS", "abc"], "2.1": {"status": "FAIL", "code": "x", "checks": 2}}')
    found = exercise_progress.remembered()
    assert (found["2.4"].status, found["2.4"].code) == ("PASS", "abc")
    assert found["2.1"].checks == 2
    for text in ("{", "[1]", '{"2.4": {"other": 1}}'):
        file.write_text(text)
        assert exercise_progress.remembered() == {}


def test_fingerprint_knows_whose_code_changed(mine, monkeypatch):
    def fingerprints(folder):
        monkeypatch.setattr(exercise_progress, "EXERCISES", folder)
        return [exercise_progress.fingerprint(entry) for entry in LESSON[:2]]

    first, second = fingerprints(mine(folder="solved"))
    commented = mine(("    group = num_heads", "    # why\n    group  = num_heads"), folder="same")
    assert fingerprints(commented) == [first, second]
    changed = fingerprints(mine(("    group = num_heads", "    group = 1 * num_heads"), folder="x"))
    assert changed[0] != first and changed[1] == second
    assert fingerprints(mine(("import math", "import math as"), folder="y")) == ["", ""]


def test_a_neighbours_kernel_does_not_count(tmp_path, monkeypatch):
    """It has no decorator: what an exercise asks for is more than the function that it names."""
    entries = {entry.id: entry for entry in all_exercises("12")}
    text = (SOLUTIONS / entries["12.1"].file).read_text()
    monkeypatch.setattr(exercise_progress, "EXERCISES", tmp_path)
    found = []
    for code in (text, text.replace("column = tl.arange(0, BLOCK_D)", "column = tl.arange(0, 8)")):
        (tmp_path / entries["12.1"].file).write_text(code)
        found.append([exercise_progress.fingerprint(entry) for entry in entries.values()])
    (first, second, third), (same, equal, changed) = found
    assert (first, second) == (same, equal) and third != changed


@pytest.mark.sample(3, of="processes")
def test_check_runs_the_checks(mine, capsys):
    folder = mine(("math.isqrt", "1 + math.isqrt"))
    assert main(["check", "2.4", "--impl", str(folder)]) == 1
    text = capsys.readouterr().out
    assert (
        "FAIL    2.4" in text
        and "0 of 5 checks passed" in text
        and "One token more than that does not fit" in text
    )


CRASH = "ctypes.memset(16, 1, 1)"


@pytest.mark.sample(3, of="processes")
def test_a_crash_is_named_and_hides_no_other_exercise(mine, capsys):
    """A write to an address of no tensor ends the process."""
    later = f"    import ctypes\n    {CRASH}\n    budget_bytes ="
    folder = mine(("    budget_bytes =", later))
    line = (folder / FIRST.file).read_text().split(CRASH)[0].count("\n") + 1
    records = exercise_report.records_of([LESSON[3], LESSON[0]], str(folder))
    crashed = [record for record in records if record["exercise"] == "2.4"]
    (check, *_), (record,) = checks_of(LESSON[3]), crashed
    assert (record["status"], record["message"]) == (
        FAIL,
        f"{check.name}: your code read or wrote out of bounds, and Python crashed "
        f"(mine/{FIRST.file}, line {line})",
    )
    others = [record["status"] for record in records if record["exercise"] == "2.1"]
    assert others == [PASS] * len(checks_of(FIRST))


def test_a_hang_that_nothing_interrupts_ends_the_process():
    program = """
import signal
from tests.exercises import running
running.HANG_GRACE_S = 0.1
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
with running.time_limit(0.1):
    while True:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "nothing could interrupt it" in exercise_report._why_it_broke_off(done)


def test_a_mode_costs_a_check_no_time_and_a_check_without_one_nothing():
    """The first operation within a mode imports SymPy, once in a process."""
    program = """
import sys, torch
from tests.exercises.checking import Operations, check
from tests.exercises.running import run_check

def without(impl, seed):
    torch.zeros(1) + 1

def within(impl, seed):
    with Operations():
        torch.zeros(1) + 1

for function, seconds in ((without, 60), (within, 0.3)):
    (this,) = check("2.1", seconds=seconds)(function).checks.values()
    print(run_check(this, lambda: None, 0), "sympy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    without, within = done.stdout.splitlines()
    assert "status='PASS'" in without and without.endswith("False"), done
    assert "status='PASS'" in within and within.endswith("True"), done


def test_what_was_given_is_named_as_the_learner_knows_it():
    """A type of numbers by its name, an object by the class of the exercise."""

    def of(dtype, ranks, known):
        """Asked for by its arguments alone."""

    said = arguments_of(of, (torch.float8_e4m3fn, Kept(2), Ranks(2)), {})
    assert said == "dtype = torch.float8_e4m3fn, ranks: a Ranks, known: a Ranks"


@triton.jit
def copy_too_much(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < size), mask=at < size)


@triton.jit
def too_much(x_ptr, at, size):
    return tl.load(x_ptr + at, mask=at < size)


@triton.jit
def too_much_by_a_helper(x_ptr, at, size):
    return too_much(x_ptr, at, size)


@triton.jit
def copy_too_much_by_a_hook(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, too_much_by_a_helper(x_ptr, at, size), mask=at < size)


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: kernels are compiled here")
@pytest.mark.parametrize(
    "kernel, line",
    [
        (copy_too_much, "tl.store("),
        (copy_too_much_by_a_hook, "return tl.load(x_ptr + at, mask=at < size)`"),
    ],
    ids=["itself", "in a function that it calls"],
)
def test_a_kernel_that_leaves_its_tensors(kernel, line):
    """One message, in the interpreter, whether or not the process would have crashed. It names the
    learner's own line, also where a kernel calls it as a hook.
    """

    def copies(impl, seed):
        assert_equal(impl(torch.ones(4)), torch.ones(4))

    def too_many(x):
        out = torch.empty(8)
        kernel[(1,)](x, out, 8, 8)
        return out[:4]

    (this,) = checks_from(copies)
    outcome = run_check(this, lambda: too_many, 0, Path(__file__))
    assert (outcome.status, outcome.error) == (FAIL, "InterpreterError")
    assert (
        "OutOfBounds: the kernel read out of bounds: 4 of 8 addresses are in no tensor that it was "
        f"given, the first one 0 bytes after the end of `x_ptr`: `{line}" in outcome.message
    )


@pytest.mark.parametrize("lesson", ["99", "x", "", "2.99"])
def test_unknown_lesson(lesson, capsys):
    with pytest.raises(ExerciseError, match=r"is unknown; accepted: .*02"):
        all_exercises(lesson)
    assert main(["generate", "99"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["check", "2.99"]) == 2


# ---------------------------------------------------------------- drop-ins

DROP_IN = """
import json, sys
from lessons.l02_naive_attention import naive
from lessons.toolbox.exercises.drop_ins import use_implementation
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
