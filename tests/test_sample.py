"""`--quick` runs what it says, for no more seconds than it says, and the same in all processes of a
run.
"""

from collections import Counter

import pytest

from tests.sample import CHEAP_S, FIRST, OF_A_LESSON, counted, within
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
