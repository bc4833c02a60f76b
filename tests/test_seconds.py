"""The record of what tests cost: how it is measured, and that it names tests that are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seconds import OTHERS, Seconds, Watch, record_of

ROOT = Path(__file__).resolve().parents[1]
RECORD = Seconds.read()
BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_a_file_shares_what_its_tests_prepare():
    """The first case prepares 4 seconds for all four."""
    spent = {
        "a.py::dear[0]": (4.0, 3.0),
        "a.py::dear[1]": (0.0, 2.0),
        "a.py::B::dear": (0.0, 1.0),
        "a.py::dear[2]": (0.0, 1.0),
    }
    assert record_of(spent, {}) == {"a.py": {"dear": 3.0, "B::dear": 2.0, OTHERS: 2.5}}


def test_of_what_a_run_left_out_the_old_lines_stay():
    old = {
        "a.py": {"gone": 7.0, "dear": 9.0, "was_dear": 5.0, OTHERS: 0.1},
        "b.py": {OTHERS: 0.2},
    }
    spent = {"a.py::dear": (0.0, 3.0), "a.py::was_dear": (0.0, 0.02), "a.py::cheap": (0.0, 0.04)}
    lines = {"gone": 7.0, "dear": 3.0, OTHERS: 0.03}
    assert record_of(spent, old) == {"a.py": lines, "b.py": old["b.py"]}


def test_what_has_no_line_counts_as_the_others():
    seconds = Seconds({"a.py": {"dear": 3.0, OTHERS: 0.5}, "b.py": {OTHERS: 0.1}})
    costs_s = {"a.py::dear[x::y[0]]": 3.0, "a.py::new": 0.5, "b.py::T::a[1]": 0.1, "new.py::a": 1.2}
    assert seconds.of(costs_s) == pytest.approx(costs_s)
    assert seconds.of(["new.py::a"]) == {"new.py::a": 0.0}


def test_processes_count_while_they_run_and_when_they_ended():
    watch = Watch()
    before_s = watch.seconds()
    running = subprocess.Popen([sys.executable, "-c", BUSY + "\nprint(flush=True)\ninput()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    running.stdout.readline()
    if Path("/proc/self/stat").exists():
        assert watch.seconds() - before_s > 0.4  # told in hundredths
    running.communicate(b"\n")
    assert 0.5 <= watch.seconds() - before_s < 5


def test_the_record_names_tests_that_are_there():
    """A line of a test that is gone is deleted by hand, or by measuring its file anew."""
    gone = []
    for file, lines in RECORD.record.items():
        text = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
        names = {line.rpartition("::")[2] for line in lines} - {OTHERS}
        gone += [f"{file}::{name}" for name in sorted(names) if not re.search(rf"\b{name}\b", text)]
        if not text:
            gone.append(file)
    assert not gone, f"tests/seconds.json: these tests are gone: {gone}"


def test_most_files_were_measured():
    """What was not counts as the mean of all others, so a run might take longer than it says."""
    files = [path for top in ("tests", "lessons") for path in (ROOT / top).rglob("test_*.py")]
    unknown = [str(path.relative_to(ROOT)) for path in files]
    unknown = [file for file in unknown if file not in RECORD.record]
    message = f"{len(unknown)} of {len(files)}: make test TESTS=--record-seconds"
    assert len(unknown) <= len(files) / 5, message
