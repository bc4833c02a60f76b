"""A plugin of pytest that writes down how each test went as soon as it has ended. A run that is cut
off loses only the tests under way, and the next one goes on with those that are missing.

    pytest -p lessons.toolbox.proof.cases --cases FILE --cases-key KEY lessons/l03_kv_cache

FILE has a line of JSON for the key, for each test that began and for each one that ended. Tests
that passed under the same key are left out. One that began and did not end may hang again, so it
comes last.
"""

import faulthandler
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

KERNEL = re.compile(r"\d\d/\w+")  # the names of the properties that `record` leaves
NO_TESTS = 5  # pytest's exit status
PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True)
class Case:
    """One test of a run. kernels: what `proof` recorded, nothing unless the test passed; reason:
    why it was skipped.
    """

    test: str  # "lessons/l03_kv_cache/test_equivalence.py::test_append[bf16]"
    status: str  # "passed", "failed" or "skipped"
    seconds: float
    kernels: dict[str, dict]
    reason: str = ""


def lines_of(file: Path) -> list[dict]:
    """What was written; nothing if there is no file. A last line that was cut off is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def read(file: Path) -> list[Case]:
    """Of each test that ended how it ended last."""
    ended = {line["test"]: Case(**line) for line in lines_of(file) if "test" in line}
    return list(ended.values())


def unfinished(file: Path) -> set[str]:
    """The tests that began and did not end."""
    lines = lines_of(file)
    begun = {line["begun"] for line in lines if "begun" in line}
    return begun - {line["test"] for line in lines if "test" in line}


def still_known(file: Path) -> list[dict]:
    """The lines of an earlier run that count in the next one: what passed, what may hang."""
    passed = [asdict(case) for case in read(file) if case.status == "passed"]
    return passed + [{"begun": test} for test in sorted(unfinished(file))]


# ---------------------------------------------------------------- the plugin


def pytest_addoption(parser):
    parser.addoption("--cases", type=Path, help="the file that receives how each test went")
    parser.addoption("--cases-key", default="", help="what the file's tests depend on")
    parser.addoption("--hangs-s", type=float, help="seconds after which a test ends its process")


def pytest_configure(config):
    if (limit_s := config.getoption("--hangs-s")) is not None:
        config.pluginmanager.register(Hangs(limit_s))
    file, key = config.getoption("--cases"), {"key": config.getoption("--cases-key")}
    # a worker of xdist leaves the writing to the process that started it
    if file is not None and not hasattr(config, "workerinput"):
        kept = [key, *still_known(file)] if lines_of(file)[:1] == [key] else [key]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        config.pluginmanager.register(Writer(file))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if (file := config.getoption("--cases")) is None:
        return
    passed = {case.test for case in read(file) if case.status == "passed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    last = unfinished(file)
    waiting = [item for item in items if item.nodeid not in passed]
    items[:] = sorted(waiting, key=lambda item: item.nodeid in last)


class Writer:
    """Appends to the file. Under xdist reports of several tests come in turns."""

    def __init__(self, file: Path):
        self.file = file
        self.reports: dict[str, list[pytest.TestReport]] = {}

    def write(self, line: dict) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self.write({"begun": nodeid})

    def pytest_runtest_logreport(self, report):
        reports = self.reports.setdefault(report.nodeid, [])
        reports.append(report)
        # xdist reports the test of a process that died under another phase
        if report.when not in PHASES[:2]:
            self.write(asdict(case_of(self.reports.pop(report.nodeid))))

    def pytest_collectreport(self, report):
        if report.failed:  # a file that cannot be imported
            self.write(asdict(Case(report.nodeid, "failed", 0.0, {})))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == NO_TESTS and any(case.status == "passed" for case in read(self.file)):
            session.exitstatus = pytest.ExitCode.OK


def case_of(reports: list[pytest.TestReport]) -> Case:
    """What the reports of a test's phases say together."""
    status = next((s for s in ("failed", "skipped") if any(getattr(r, s) for r in reports)), "")
    why = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    found = {name: value for name, value in reports[-1].user_properties if KERNEL.match(name)}
    kernels = {} if status else {name: json.loads(value) for name, value in found.items()}
    seconds = round(sum(report.duration for report in reports), 3)
    return Case(reports[0].nodeid, status or "passed", seconds, kernels, "".join(why[:1]))


class Hangs:
    """Ends the process in which a test takes too long, because a kernel that hangs would keep the
    GPU busy until the step's limit. xdist goes on with another process.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        # a copy, because pytest catches what a test writes
        self.stderr = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        print(end="", file=self.stderr, flush=True)
        faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
