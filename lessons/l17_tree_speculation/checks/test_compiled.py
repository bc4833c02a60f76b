"""What the compiler says of the kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l17_tree_speculation.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all


@pytest.mark.compiler
def test_every_configuration_compiles():
    for report in check_all(KERNELS):
        if not report.was_run:
            pytest.skip(report.error)
        is_wide = "fp32" in report.name
        assert not report.error and report.spill_bytes <= 128 * is_wide, report
        assert report.shared_bytes <= report.shared_limit_bytes, report
        assert report.loads_128bit, report
        assert bool(report.matrix_instruction) == (report.chip >= 80 and not is_wide), report
        assert not report.serialized_wgmma, report
