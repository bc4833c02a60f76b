"""What `make check` adds to a kernel that passes: its code compiled for an H100, and its memory
traffic.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest

from lessons.toolbox.exercises.exercise import ROOT, SOLUTIONS, all_exercises, has_kernel
from lessons.toolbox.exercises.report import traffic_of
from lessons.toolbox.measure.device import has_gpu, has_triton

needs_machine = pytest.mark.skipif(
    has_gpu() or not has_triton(), reason="NOT RUN: compiled kernels run on a CPU with Triton"
)


def check(which: str, impl: str) -> str:
    command = [sys.executable, "-m", "lessons.toolbox.exercises", "check", which, "--impl", impl]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_which_exercises_are_kernels():
    kernels = {entry.id for entry in all_exercises() if has_kernel(entry)}
    assert {"0.1", "0.10", "7.1", "9.2", "12.3", "21.3"} <= kernels
    assert not {"0.11", "2.1", "7.4", "12.1"} & kernels


@needs_machine
@pytest.mark.sample(1, of="compiled code")
def test_a_transposition_asks_for_more_sectors_than_a_sum():
    said = check("0.6", "solutions")
    assert "compiled for an H100 it is right too; line " in said and "would do" in said
    assert "no line wastes sectors" in check("0.2", "solutions")


@needs_machine
@pytest.mark.sample(1, of="compiled code")
def test_the_line_is_the_learners(tmp_path):
    """The same addition, each program reading every eighth element: as right, and eight times the
    sectors.
    """
    source = (SOLUTIONS / "l00_gpu_and_triton.py").read_text()
    neighbours = "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"
    assert neighbours in source
    apart = neighbours.replace("* BLOCK + tl.arange(0, BLOCK)", "+ tl.arange(0, BLOCK) * PROGRAMS")
    first, _, rest = source.partition("def add_kernel(")
    assert neighbours in rest, "the learner's kernel of 0.2"
    rest = rest.replace(neighbours, apart.replace("PROGRAMS", "tl.num_programs(0)"), 1)
    shutil.copytree(SOLUTIONS, tmp_path / "mine")
    (tmp_path / "mine" / "l00_gpu_and_triton.py").write_text(first + "def add_kernel(" + rest)
    said = check("0.2", str(tmp_path / "mine"))
    line = int(re.search(r"line (\d+) asks for", said)[1])
    code = (tmp_path / "mine" / "l00_gpu_and_triton.py").read_text().splitlines()[line - 1]
    assert "PASS" in said and re.search(r"tl\.(load|store)\(.*_ptr \+ at", code), said


def test_a_kernel_that_fails_only_when_compiled_is_told():
    entry = all_exercises("0.2")[0]
    right = {"exercise": "0.2", "status": "PASS", "sectors": json.dumps([8, 8, 50])}
    wrong = {"exercise": "0.2", "status": "FAIL", "message": "fault: a race"}
    assert traffic_of(entry, [right, wrong]).endswith("not right: fault: a race")
    assert "was not run" in traffic_of(entry, [])
