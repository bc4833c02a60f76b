"""`--quick` leaves out what it says, and the same in all processes of a run."""

from collections import Counter

import pytest

from tests.sample import OF_A_LESSON, left_out


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
    left = left_out(CASES, "run")
    stay = Counter(case.nodeid.partition("[")[0] for case in CASES if case not in left)
    alone = sum(count for test, count in stay.items() if test.endswith("alone"))
    assert stay["lessons/a.py::plain"] == OF_A_LESSON
    assert (stay["a.py::plain"], stay["a.py::long"], stay["a.py::short"], alone) == (4, 3, 2, 2)


def test_one_run_draws_once_and_many_runs_meet_all():
    assert left_out(CASES, "run") == left_out(CASES, "run")
    met = set()
    for run in range(300):  # 0.7^300: a case is missed by all of them in 1 of 10^46 tries
        left = left_out(CASES, str(run))
        met |= {case.nodeid for case in CASES if case not in left}
    assert len(met) == len(CASES)


def test_a_group_has_one_count():
    other = Case("d.py::alone", pytest.mark.sample(3, of="x").mark)
    with pytest.raises(pytest.UsageError, match=r"'x' has 2 and 3 \(at d.py::alone\)"):
        left_out([*CASES, other], "run")
