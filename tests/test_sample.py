"""`--quick` runs what it says, for no more seconds than it says, and the same in all processes of a
run.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sample import CHEAP_S, FIRST, OF_A_LESSON, counted, within, written
from tests.seconds import OTHERS, Seconds


class Case:
    """What the sampler asks of a collected test."""

    def __init__(self, nodeid, marker=None):
        self.nodeid, self.marker = nodeid, marker

    def get_closest_marker(self, name):
        return self.marker if name == "sample" else None


CASES = [
    *(Case(f"a.py::plain[{i}]") for i in range(4)),
    *(Case(f"a.py::long[{i}]", pytest.mark.sample(3).mark) for i in range(10)),
    *(Case(f"a.py::short[{i}]", pytest.mark.sample(3).mark) for i in range(2)),
    *(Case(f"lessons/a.py::plain[{i}]") for i in range(9)),
    *(Case(f"{f}.py::alone", pytest.mark.sample(2, of="x").mark) for f in "abc"),
]


def test_so_many_cases_stay():
    stay = Counter(case.nodeid.partition("[")[0] for case in counted(CASES, "run"))
    alone = sum(count for test, count in stay.items() if test.endswith("alone"))
    assert stay["lessons/a.py::plain"] == OF_A_LESSON
    assert (stay["a.py::plain"], stay["a.py::long"], stay["a.py::short"], alone) == (4, 3, 2, 2)


def test_one_run_draws_once_and_many_runs_meet_all():
    assert counted(CASES, "run") == counted(CASES, "run")
    met = set()
    for run in range(300):  # 0.7^300: a case is missed by all of them in 1 of 10^46 tries
        met |= {case.nodeid for case in counted(CASES, str(run))}
    assert len(met) == len(CASES)


def test_a_group_has_one_count():
    other = Case("d.py::alone", pytest.mark.sample(3, of="x").mark)
    with pytest.raises(pytest.UsageError, match=r"'x' has 2 and 3 \(at d.py::alone\)"):
        counted([*CASES, other], "run")


SAMPLED = """import pytest

pytestmark = [
    pytest.mark.sample({count}, of="a group"),
]


@pytest.mark.sample({other}, of="another")
def test_it():
    pass
"""


@pytest.fixture
def course(tmp_path) -> Path:
    """Two files of tests whose markers disagree in the second group, with this plugin alone."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "conftest.py").write_text(
        "pytest_plugins = ['tests.sample']\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--all', action='store_true')\n"
        "    parser.addoption('--record-seconds', action='store_true')\n"
    )
    for name, count, other in (("a", 2, 1), ("b", 2, 3)):
        path = tmp_path / f"tests/folder/test_{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SAMPLED.format(count=count, other=other))
    return tmp_path


def test_markers_are_read_where_they_are_written(course):
    found = list(written(course, ["tests"]))
    assert found == [
        ("a group", 2, "tests/folder/test_a.py:4"),
        ("another", 1, "tests/folder/test_a.py:8"),
        ("a group", 2, "tests/folder/test_b.py:4"),
        ("another", 3, "tests/folder/test_b.py:8"),
    ]


def test_a_disagreement_is_told_before_processes_start(course):
    """In one line. xdist would say `INTERNALERROR> AssertionError` of a process that has ended."""
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "--quick", "-p", "no:cacheprovider"],
        cwd=course,
        env=os.environ | {"PYTHONPATH": root, "LADDER_SEED": "7"},
        capture_output=True,
        text=True,
    )
    said = "'another' has 1 and 3 (at tests/folder/test_b.py:8); accepted: one count"
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert done.stderr.split("\n", 1)[0] == f"ERROR: sample: {said}", done.stderr
    assert not done.stdout.strip()


# ---------------------------------------------------------------- the seconds of a run

EQUIVALENCE = "lessons/l{:02d}_a/test_equivalence.py"
PRICES = Seconds(
    {
        "tests/a.py": {"cheap": 0.05, "dear": 2.0, "dearest": 30.0, OTHERS: 1.0},
        **{
            EQUIVALENCE.format(lesson): {"same": 4.0, "refuses": 0.01, OTHERS: 1.0}
            for lesson in (1, 2, 3)
        },
    }
    | {"tests/b.py": {OTHERS: 1.0}}
)
PRICED = [
    *(Case(f"tests/a.py::{name}[{i}]") for name in ("cheap", "dear", "dearest") for i in range(20)),
    *(Case(f"tests/b.py::unknown[{i}]") for i in range(20)),
    *(Case(f"{EQUIVALENCE.format(n)}::same[{i}]") for n in (1, 2, 3) for i in range(5)),
    *(Case(f"{EQUIVALENCE.format(n)}::refuses") for n in (1, 2, 3)),
]


COSTS_S = PRICES.of(case.nodeid for case in PRICED)


def cost_s(cases) -> float:
    return sum(COSTS_S[case.nodeid] for case in cases)


def test_a_run_costs_no_more_than_its_budget():
    for run in range(100):
        stay = within(PRICED, str(run), COSTS_S, budget_s=60)
        assert 59 <= cost_s(stay) <= 60
        assert stay == within(PRICED, str(run), COSTS_S, budget_s=60)
    assert within(PRICED, "run", COSTS_S, budget_s=cost_s(PRICED)) == PRICED


def test_what_is_cheap_and_a_case_of_each_lesson_run_whatever_the_budget():
    for run in range(100):
        stay = within(PRICED, str(run), COSTS_S, budget_s=0)
        cheap = [case for case in PRICED if COSTS_S[case.nodeid] < CHEAP_S]
        same = Counter(case.nodeid[:11] for case in stay if "same" in case.nodeid)
        assert set(cheap) < set(stay) and len(stay) == len(cheap) + 3
        assert set(same.values()) == {1} and len(same) == 3


def test_many_runs_meet_every_case_and_a_dear_one_less_often():
    met = Counter()
    for run in range(1000):
        stay = within(PRICED, str(run), COSTS_S, budget_s=60)
        met.update(case.nodeid for case in stay)
    assert len(met) == len(PRICED)
    per_test = Counter()
    for nodeid, count in met.items():
        per_test[nodeid.partition("[")[0]] += count
    unknown, dear, dearest = (
        per_test[name]
        for name in ("tests/b.py::unknown", "tests/a.py::dear", "tests/a.py::dearest")
    )
    assert unknown > 1.5 * dear > 1.5 * 5 * dearest > 0


@pytest.mark.parametrize(
    "nodeid, group",
    [
        ("lessons/l08_online_softmax/test_equivalence.py::test_a[1]", "lessons/l08"),
        ("lessons/l02_naive_attention/batched/test_equivalence.py::test_a", "lessons/l02"),
        ("lessons/l08_online_softmax/checks/test_rung.py::test_a", None),
        (
            "tests/exercises/test_machinery.py::test_every_wrong_answer_is_rejected_and_every_"
            "check_rejects_one[12.3]",
            "12",
        ),
        ("tests/test_ladder.py::test_a", "tests/test_ladder"),
        ("tests/test_ladder_report.py::test_a", None),
    ],
)
def test_what_is_first(nodeid, group):
    found = FIRST.match(nodeid)
    assert (found and found[found.lastindex]) == group
