"""What the compiler says of the kernels, for five GPU generations and without a GPU: the rules, and
the report that the README reads.
"""

import re
from pathlib import Path

import pytest

from lessons.l00_gpu_and_triton.lab.specs import KERNELS, SPILLING
from lessons.toolbox.kernels.compile_check import check, check_all
from lessons.toolbox.proof.pages import pages

pytestmark = pytest.mark.compiler
README = pages(Path(__file__).parents[1])


def run(reports):
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
    return reports


def test_every_kernel_compiles_without_spills():
    for report in run(check_all(KERNELS)):
        assert not report.error and not report.spill_bytes, report


@pytest.mark.sample(1, of="compiler")
def test_the_report_of_the_readme():
    """Each row of its table is what the compiler says for an H100."""
    (spilling,) = run(check(SPILLING, [90]))
    reports = [*run(check_all([s for s in KERNELS if 90 in s.chips], [90])), spilling]
    found = {report.name: report for report in reports}
    assert spilling.spill_bytes > 0 and found["scale"].loads_128bit > 0
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\w+|–) \|", README, re.M)
    assert len(rows) == 4
    for name, registers, spilled, wide_loads, matrix in rows:
        report = found[name]
        said = [registers, spilled, wide_loads]
        true = [report.registers, report.spill_bytes, report.loads_128bit]
        assert said == list(map(str, true)), f"{name}: {true}"
        units = [unit for unit in ("HMMA", "HGMMA") if report.census.get(unit)]
        assert matrix == "".join(units) or (matrix == "–" and not units), units
