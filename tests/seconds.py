"""What a case of each test costs, which `--quick` draws by: seconds of a processor, because those
of a clock depend on what else the machine does.

    make test TESTS=--record-seconds                      measures, and writes tests/seconds.json
    make test TESTS="--record-seconds lessons/l27_new"    a part; the lines of other tests stay

What a test prepares is mostly for its whole file, so each case of the file counts the same share of
it. Processes that a test starts count with it.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
LEAST_S = 0.1  # a test with cheaper cases has no line of its own
OTHERS = "others"  # a file's mean over the cases of tests that have none
PREPARING, ALL_ELSE = "seconds of preparing", "seconds of all else"


class Seconds:
    """The record, {file: {test: seconds of a case}}."""

    def __init__(self, record: dict[str, dict[str, float]]):
        self.record = record

    @classmethod
    def read(cls) -> "Seconds":
        return cls(json.loads(FILE.read_text("utf-8")))

    def of(self, nodeids: Iterable[str]) -> dict[str, float]:
        """Of each case. A test without a line counts as the others of its file, and those of a file
        that was never measured as the mean of all other cases.
        """
        known, unknown = {}, []
        for nodeid in nodeids:
            file, test = parts(nodeid)
            if file in self.record:
                known[nodeid] = self.record[file].get(test, self.record[file][OTHERS])
            else:
                unknown.append(nodeid)
        return known | dict.fromkeys(unknown, mean([*known.values()] or [0.0]))


def parts(nodeid: str) -> tuple[str, str]:
    """The file and the test of a case: "tests/test_a.py", "TestB::test_c"."""
    file, _, test = nodeid.partition("[")[0].partition("::")
    return file, test


def record_of(spent: dict[str, tuple[float, float]], old: dict) -> dict[str, dict[str, float]]:
    """The record after a run. Of what it did not measure the old lines stay.

    spent: {case: (seconds of preparing, of all else)}
    """
    prepared, files = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for nodeid, (before_s, then_s) in spent.items():
        file, test = parts(nodeid)
        prepared[file].append(before_s)
        files[file][test].append(then_s)
    record = dict(old)
    for file, tests in files.items():
        share_s = mean(prepared[file])
        means = {test: share_s + mean(seconds) for test, seconds in tests.items()}
        cheap = [s for test, seconds in tests.items() if means[test] < LEAST_S for s in seconds]
        lines = {test: s for test, s in old.get(file, {}).items() if test not in tests}
        lines |= {test: round(s, 2) for test, s in means.items() if s >= LEAST_S}
        if cheap or OTHERS not in lines:
            lines[OTHERS] = round(share_s + mean(cheap) if cheap else mean([*means.values()]), 3)
        record[file] = lines
    return record


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# ---------------------------------------------------------------- measuring


def pytest_addoption(parser):
    parser.addoption(
        "--record-seconds", action="store_true", help=f"write what each test costs to {FILE.name}"
    )


def pytest_configure(config):
    if config.getoption("--record-seconds"):
        config.pluginmanager.register(Recorder(), "seconds of tests")


class Recorder:
    """Measures a run, and writes its record at the end."""

    def __init__(self):
        self.watch = Watch()
        self.spent = {}  # case -> (seconds of preparing, of all else)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._measured(item, PREPARING))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._measured(item, ALL_ELSE))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._measured(item, ALL_ELSE))

    def _measured(self, item, what: str):
        before_s = self.watch.seconds()
        try:
            return (yield)
        finally:
            # in the report, which xdist brings to the process that writes
            item.user_properties.append((what, self.watch.seconds() - before_s))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            of = defaultdict(float)
            for name, value in report.user_properties:
                if name in (PREPARING, ALL_ELSE):
                    of[name] += value
            self.spent[report.nodeid] = (of[PREPARING], of[ALL_ELSE])

    def pytest_sessionfinish(self, session):
        if not hasattr(session.config, "workerinput"):  # a process that xdist started
            write(record_of(self.spent, Seconds.read().record))


def write(record: dict[str, dict[str, float]]) -> None:
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")


class Watch:
    """Seconds of a processor: of this process, of those that it waited for, and of those below it
    that still run.
    """

    def __init__(self):
        self.waited_s = self.running_s = self.looked_at_s = 0.0

    def seconds(self) -> float:
        import resource  # Windows has none

        own, waited = (
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        # looking takes milliseconds, and what is over sooner leaves no process behind
        if waited != self.waited_s or time.monotonic() - self.looked_at_s > 0.3:
            self.running_s = seconds_below(os.getpid())
        self.waited_s, self.looked_at_s = waited, time.monotonic()
        return own + waited + self.running_s


def seconds_below(process: int) -> float:
    """Of the processes that a process started and theirs, as Linux tells it; elsewhere 0."""
    used, children = {}, defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(file.parent.name)
        used[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        children[int(fields[1])].append(number)

    def below(parent: int) -> float:
        return sum(used[child] + below(child) for child in children[parent])

    return below(process)
