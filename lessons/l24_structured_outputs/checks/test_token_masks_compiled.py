"""What the compiler says of the token-mask kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l24_structured_outputs.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all


@pytest.mark.compiler
def test_every_configuration_compiles():
    """Nothing is spilled, and many programs share a processor: 128 threads of at most 32 registers,
    sixteen times in 65536.
    """
    for report in check_all(KERNELS):
        if not report.was_run:
            pytest.skip(report.error)
        assert report.fits and not report.local_memory_instructions, report
        assert report.registers <= 32, report
