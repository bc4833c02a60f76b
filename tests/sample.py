"""`pytest --quick`, which `make test` calls: as many cases as fit into BUDGET_S seconds, drawn anew
for each version, so that a few versions meet them all.

First by count. A test marked `@pytest.mark.sample(3)` keeps three of its cases. Tests marked
`@pytest.mark.sample(3, of="processes")` are cases of one such group, wherever they are. Of a
lesson's test that says nothing, OF_A_LESSON cases stay, because kernels are interpreted there.

Then by cost, which tests/seconds.py has recorded. What must be run is: one case of each of FIRST,
and every case cheaper than CHEAP_S. The others stand in line, in a drawn order in which a case that
costs twice as much, and the second case of the same test, come on average twice as late. From the
front of this line each case runs that still fits.

So a run takes as long as before when tests are added: each dear one is met less often instead.
Without the option every case runs: when a file is tried alone, when a proof is recorded, and in
`make test-all`.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.seconds import Seconds
from tests.seeds import seed_of

BUDGET_S = 450.0  # of one processor, by the record; with 600 a run took 518 s on two cores
CHEAP_S = 0.1
LONG_S = 4.0
OF_A_LESSON = 3
# What every run has a case of: each lesson's tests of equivalence, the wrong answers of each
# lesson's exercises, the ladder.
FIRST = re.compile(
    r"(lessons/l\d\d)_\w+/(?:\w+/)*test_equivalence\.py"
    r"|tests/exercises/test_machinery\.py::test_every_wrong_answer\w+\[(\d+)\."
    r"|(tests/test_ladder)\.py"
)
# a marker of a group, on a line of its own
GROUPED = re.compile(r'^ *@?pytest\.mark\.sample\((\d+), of="([^"\n]+)"\)', re.MULTILINE)
QUICK = "of the tests that take longest a sample of their cases (make test)"


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=QUICK)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sample(count, of=None): so many cases of it, or of a group, run with --quick"
    )
    # Before xdist starts its processes: of what one of them raises while it collects, xdist tells
    # nothing but that the process has ended.
    is_one_of_xdist = hasattr(config, "workerinput")
    if config.getoption("--quick") and not config.getoption("--all") and not is_one_of_xdist:
        agreed(written(config.rootpath, config.getini("testpaths")))


def pytest_report_header(config):
    return f"--quick: {QUICK}; make test-all runs all" if config.getoption("--quick") else None


@pytest.hookimpl(trylast=True)  # what else is deselected (-k, --since) costs nothing
def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick") and not config.getoption("--all"):
        run = str(seed_of("sample"))
        stay = counted(items, run)
        costs_s = Seconds.read().of(item.nodeid for item in stay)
        if not config.getoption("--record-seconds"):
            stay = within(stay, run, costs_s)
        config.hook.pytest_deselected(items=list(set(items) - set(stay)))
        # the longest first, so that no process is left with one at the end
        items[:] = sorted(stay, key=lambda item: costs_s[item.nodeid] < LONG_S)


def agreed(counts: Iterable[tuple[str, int, str]]) -> dict[str, int]:
    """{group: its count}. counts: of each marker its group, its count and where it is.

    Raises pytest.UsageError if the markers of one group disagree.
    """
    found: dict[str, int] = {}
    for group, count, where in counts:
        if found.setdefault(group, count) != count:
            both = f"{found[group]} and {count} (at {where})"
            raise pytest.UsageError(f"sample: {group!r} has {both}; accepted: one count")
    return found


def written(root: Path, folders: list[str]) -> Iterator[tuple[str, int, str]]:
    """The markers of groups as the files have them, for `agreed`. A name that is computed is left
    to `counted`.
    """
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for marker in GROUPED.finditer(text):
                line = text.count("\n", 0, marker.start()) + 1
                yield marker[2], int(marker[1]), f"{path.relative_to(root).as_posix()}:{line}"


def counted(items: list, run: str) -> list:
    """The cases that the counts leave: of each test or group as many as its marker says.

    Raises pytest.UsageError if the markers of one group disagree.
    """
    cases, said = defaultdict(list), []
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is None and item.nodeid.startswith("lessons/"):
            marker = pytest.mark.sample(OF_A_LESSON).mark
        if marker is not None:
            group = marker.kwargs.get("of") or item.nodeid.partition("[")[0]
            cases[group].append(item)
            said.append((group, marker.args[0], item.nodeid))
    counts, left = agreed(said), set()
    for group, of_group in cases.items():
        count = min(counts[group], len(of_group))
        left |= {*of_group} - {*random.Random(f"{run} {group}").sample(of_group, count)}
    return [item for item in items if item not in left]


def within(items: list, run: str, costs_s: dict[str, float], budget_s: float = BUDGET_S) -> list:
    """The cases that run, in the order of `items`: those that must, and from the line what fits.

    costs_s: {the name of a case: its seconds}
    """
    must, line = in_line(items, run, costs_s)
    stay, left_s = set(must), budget_s - sum(costs_s[item.nodeid] for item in must)
    for item in line:
        cost_s = costs_s[item.nodeid]
        if cost_s <= left_s:
            stay.add(item)
            left_s -= cost_s
    return [item for item in items if item in stay]


def in_line(items: list, run: str, costs_s: dict[str, float]) -> tuple[list, list]:
    """Those that must run, and the others in the order in which they are asked whether they fit."""
    draw = random.Random(f"{run} line")
    cases, place = Counter(), {}
    for item in draw.sample(items, len(items)):
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        place[item] = draw.expovariate(1) * costs_s[item.nodeid] * cases[test]
    must, line, firsts = [], [], set()
    for item in sorted(items, key=place.get):
        first = FIRST.match(item.nodeid)
        if costs_s[item.nodeid] < CHEAP_S:
            must.append(item)
        elif first and first[first.lastindex] not in firsts:
            firsts.add(first[first.lastindex])
            must.append(item)
        else:
            line.append(item)
    return must, line
