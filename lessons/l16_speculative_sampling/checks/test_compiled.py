"""What the compiler says of the kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l16_speculative_sampling.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all


@pytest.mark.compiler
def test_every_configuration_compiles():
    reports = check_all(KERNELS)
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
        assert not report.error and not report.spill_bytes, report
        assert report.shared_bytes <= 1024 and report.registers <= 96, report
        # A vocabulary that is a multiple of 16 is read 16 bytes at a time.
        assert bool(report.loads_128bit) == ("odd" not in report.name), report
