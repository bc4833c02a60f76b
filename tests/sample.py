"""`pytest --quick`, which `make test` calls: of the tests that take longest, some of their cases.

A test marked `@pytest.mark.sample(3)` then runs three of its cases, drawn anew for each version, so
a few versions meet them all. Tests marked `@pytest.mark.sample(3, of="processes")` are cases of one
such group, wherever they are. Of a lesson's test that says nothing, OF_A_LESSON cases run, because
kernels are interpreted there, which is slow. Without the option every case runs: when a file is
tried alone, when a proof is recorded, and in `make test-all`.
"""

import random
from collections import defaultdict

import pytest

from tests.seeds import seed_of

OF_A_LESSON = 3
QUICK = "of the tests that take longest a sample of their cases (make test)"


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=QUICK)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sample(count, of=None): so many cases of it, or of a group, run with --quick"
    )


def pytest_report_header(config):
    return f"--quick: {QUICK}; make test-all runs all" if config.getoption("--quick") else None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick") and not config.getoption("--all"):
        left = left_out(items, str(seed_of("sample")))
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def left_out(items: list, run: str) -> list:
    """The cases that do not run, of each test all but as many as its marker says.

    Raises pytest.UsageError if the markers of one group disagree.
    """
    cases, counts = defaultdict(list), {}
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is None and item.nodeid.startswith("lessons/"):
            marker = pytest.mark.sample(OF_A_LESSON).mark
        if marker is not None:
            group = marker.kwargs.get("of") or item.nodeid.partition("[")[0]
            cases[group].append(item)
            if counts.setdefault(group, marker.args[0]) != marker.args[0]:
                both = f"{counts[group]} and {marker.args[0]} (at {item.nodeid})"
                raise pytest.UsageError(f"sample: {group!r} has {both}; accepted: one count")
    left = []
    for group, of_group in cases.items():
        count = min(counts[group], len(of_group))
        drawn = random.Random(f"{run} {group}").sample(of_group, count)
        left += [item for item in of_group if item not in drawn]
    return left
