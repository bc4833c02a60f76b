"""The test of the tests: what the checks of every exercise reject and accept; then the generator,
which never loses a learner's work.
"""

import os
import random

import pytest
import torch

from lessons.toolbox.exercises.exercise import (
    EXERCISES,
    SOLUTIONS,
    ExerciseError,
    all_exercises,
    generate,
    is_edited,
    read_exercises,
    untouched_line,
    write_stub,
)
from lessons.toolbox.exercises.loading import load_exercise, load_file
from tests.exercises.checking import tolerances_times
from tests.exercises.killing import rejects
from tests.exercises.running import NOT_RUN, PASS, TODO, checks_of, run_check
from tests.exercises.wrong import Answers, answers_of

ALL = all_exercises()
each_exercise = pytest.mark.parametrize("entry", ALL, ids=[entry.id for entry in ALL])
one_of_each_lesson = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.id, marks=pytest.mark.sample(1, of=f"wrong {entry.lesson}"))
        for entry in ALL
    ],
)
FILES = [SOLUTIONS / file for file in dict.fromkeys(entry.file for entry in ALL)]
each_file = pytest.mark.parametrize("solution", FILES, ids=lambda path: path.name[:3])
SLACK = 0.5
FRESH_SEED = random.randrange(10**6)  # named in every message that depends on it


# ---------------------------------------------------------------- every exercise of the course


@one_of_each_lesson
def test_every_wrong_answer_is_rejected_and_every_check_rejects_one(entry):
    """Of the kill matrix only what answers this: each wrong answer first meets the checks that have
    rejected nothing yet.
    """
    checks, answers = checks_of(entry), answers_of(entry.lesson).wrong_for(entry.id)
    assert len(answers) >= 2, "an exercise ships at least two wrong answers"
    survivors, idle = [], list(checks)
    for answer in answers:
        order = idle + [check for check in checks if check not in idle]
        killer = next((check for check in order if rejects(check, answer, FRESH_SEED)), None)
        if killer is None:
            survivors.append(answer.name)
        elif killer in idle:
            idle.remove(killer)
    assert not survivors, f"seed {FRESH_SEED}: these wrong answers pass every check: {survivors}"
    useless = [
        check.name
        for check in idle
        if not any(rejects(check, answer, FRESH_SEED) for answer in answers)
    ]
    assert not useless, (
        f"seed {FRESH_SEED}: these checks reject no wrong answer, add one or drop the check: "
        f"{useless}"
    )


@each_exercise
def test_every_check_fails_on_the_stub(entry, tmp_path):
    stub = tmp_path / entry.file
    stub.write_text(generate(SOLUTIONS / entry.file))
    assert untouched_line(stub.read_text(), entry.id)
    with pytest.raises(NotImplementedError, match=f"Exercise {entry.id}: "):
        load_exercise(tmp_path, entry)
    function = getattr(load_file(stub), entry.name)
    statuses = {c.name: run_check(c, lambda: function, 0).status for c in checks_of(entry)}
    assert set(statuses.values()) == {TODO}, f"these checks never call the exercise: {statuses}"


@each_exercise
@pytest.mark.sample(4)
def test_right_answers_pass_with_slack(entry, request):
    seeds = 20 if request.config.getoption("--all", False) else 3
    alternatives = answers_of(entry.lesson).alternatives_for(entry.id)
    assert alternatives, "an exercise ships an alternative solution"
    for function in (load_exercise(SOLUTIONS, entry), *alternatives):
        for check in checks_of(entry):
            for seed in range(FRESH_SEED, FRESH_SEED + seeds):
                with tolerances_times(SLACK):
                    outcome = run_check(check, lambda function=function: function, seed)
                if outcome.status == NOT_RUN:
                    break  # on this machine, whatever the seed
                assert outcome.status == PASS, f"seed {seed}: {outcome.message}"


@each_file
def test_registries_name_only_known_exercises(solution):
    lesson = solution.name[1:3]
    unknown = answers_of(lesson).exercise_ids() - {entry.id for entry in all_exercises(lesson)}
    assert not unknown
    for entry in read_exercises(solution):
        assert entry.id.split(".")[0] == str(int(entry.lesson)), "an id begins with its lesson"


@each_file
def test_exercise_file_comes_from_its_solution(solution):
    """Compared as text, never rewritten: the file may hold a learner's work."""
    text = (EXERCISES / solution.name).read_text(encoding="utf-8")
    if is_edited(text) and "CI" not in os.environ:
        pytest.skip("a learner solved exercises in it")
    assert text == generate(solution), (
        f"run: python -m lessons.toolbox.exercises generate {solution.name[1:3]}"
    )


@each_file
def test_stub_keeps_imports_and_docstrings(solution, tmp_path):
    stub = tmp_path / solution.name
    stub.write_text(generate(solution))
    solved, left = load_file(solution), load_file(stub)
    for entry in read_exercises(solution):
        assert getattr(left, entry.name).__doc__ == getattr(solved, entry.name).__doc__
        assert "Example" in getattr(left, entry.name).__doc__, "a docstring holds a worked example"
    assert [
        line for line in stub.read_text().splitlines() if line.startswith(("import ", "from "))
    ] == [
        line for line in solution.read_text().splitlines() if line.startswith(("import ", "from "))
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ("- no such line\n+ one", "slip 'rotten' of exercise 4.3: found 0 times"),
        ("- num_kv_heads\n+ num_heads", "slip 'rotten' of exercise 4.3: found .* times"),
        ("", "these slips change nothing: .'rotten'"),
        ("= other", "slip 'rotten' has the parts {'other'}; accepted: set"),
    ],
)
def test_a_slip_that_does_not_fit_its_solution(changes, message):
    with pytest.raises(ValueError, match=message):
        Answers().slips("4.3", f"rotten: a hint\n{changes}")


def test_a_slip_is_the_solution_with_its_changes():
    answers = Answers()
    answers.slips(
        "4.3", "twice: a hint\nof two lines\n- dtype.itemsize\n+ (2 *\n+     dtype.itemsize)"
    )
    [answer] = answers.wrong_for("4.3")
    entry = next(entry for entry in ALL if entry.id == "4.3")
    right = load_exercise(SOLUTIONS, entry)(1, 1, 2, torch.float16)
    assert answer.function(1, 1, 2, torch.float16) == tuple(2 * value for value in right)
    assert (answer.name, answer.hint) == ("twice", "a hint of two lines")


def test_a_slip_of_parts_has_the_changes_of_all():
    """Wherever in the text they are; a part keeps its own."""
    answers = Answers()
    answers.slips(
        "4.3",
        """
        all: every bug
        = twice, swapped

        twice: a hint
        - dtype.itemsize
        + 2 * dtype.itemsize

        swapped: a hint
        - return
        + return -1,
        """,
    )
    every, twice, swapped = (answer.function for answer in answers.wrong_for("4.3"))
    given = 1, 1, 2, torch.float16
    doubled = twice(*given)
    assert every(*given) == (-1, *doubled) != doubled and swapped(*given)[0] == -1


# ---------------------------------------------------------------- generating

SOURCE = '''\
from lessons.toolbox.exercises.exercise import exercise


@exercise("2.1", "Say \\"one\\"", minutes=5, difficulty=1)
def one(x):
    """Example: one(0) is 1."""
    if x:
        # SOLUTION
        return 1
        # STUB
        # if x == 2:
        #     return 2
        # END
    return helper(x)


def helper(x):
    # SOLUTION 2.1
    return 1
    # END
'''


@pytest.fixture
def solution(tmp_path):
    path = tmp_path / "solutions" / "l02_topic.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_stub_text(solution):
    body = generate(solution).split("# ruff: noqa\n")[1]
    assert body == SOURCE.replace(
        """        # SOLUTION
        return 1
        # STUB
        # if x == 2:
        #     return 2
        # END
""",
        """        raise NotImplementedError("Exercise 2.1: Say \\"one\\"")
        if x == 2:
            return 2
""",
    ).replace(
        """    # SOLUTION 2.1
    return 1
    # END
""",
        """    raise NotImplementedError("Exercise 2.1: Say \\"one\\"")
""",
    )


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("        # END\n", "", "line 8: `# SOLUTION` has no partner"),
        ("# SOLUTION 2.1", "# SOLUTION", "line 18: this gap is in no exercise"),
        ("# SOLUTION 2.1", "# SOLUTION 2.7", "line 18: this gap is in no exercise"),
        ("        # STUB\n", "        # END\n", "line 13: `# END` has no partner"),
        (
            "    # SOLUTION 2.1\n    return 1\n    # END\n",
            "    # SOLUTION 2.1\n    return 1\n",
            "line 18: `# SOLUTION 2.1` has no partner",
        ),
    ],
)
def test_markers_that_cannot_work(solution, old, new, message):
    solution.write_text(SOURCE.replace(old, new, 1))
    with pytest.raises(ExerciseError, match=message) as caught:
        generate(solution)
    assert "\n" not in str(caught.value)


def test_a_learners_work_is_never_lost(solution, tmp_path):
    target = tmp_path / solution.name
    assert "written" in write_stub(solution, tmp_path)
    assert "up to date" in write_stub(solution, tmp_path)
    for n, mine in enumerate(
        ("def one(x): return 'my work'\n", "x\udc80".encode(errors="surrogateescape"), ""), start=1
    ):
        target.write_bytes(mine if isinstance(mine, bytes) else mine.encode())
        before = target.read_bytes()
        assert "kept" in write_stub(solution, tmp_path)
        assert target.read_bytes() == before
        assert f"backup{n}" in write_stub(solution, tmp_path, force=True)
        assert (tmp_path / f"l02_topic.backup{n}.py").read_bytes() == before
        assert target.read_text() == generate(solution)
    assert len(list(tmp_path.glob("*.backup*"))) == 3


def test_an_untouched_stub_follows_its_solution(solution, tmp_path):
    write_stub(solution, tmp_path)
    solution.write_text(SOURCE.replace("one(0) is 1", "one(0) gives 1"))
    assert "written" in write_stub(solution, tmp_path)
    assert "gives 1" in (tmp_path / solution.name).read_text()


@pytest.mark.parametrize("old, new", [("minutes=5", "minutes=five"), ("minutes=5, ", "")])
def test_declarations_that_cannot_work(solution, old, new):
    solution.write_text(SOURCE.replace(old, new, 1))
    with pytest.raises((ValueError, TypeError), match=r"malformed node|missing 1 required"):
        generate(solution)
