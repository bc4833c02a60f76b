"""What the compiler says of the kernels, for five GPU generations."""

import pytest

from lessons.l03_kv_cache.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        # A row of 128 values is one for each of a program's threads.
        wide = "2x64" not in report.name or "decode" in report.name
        found = f"{report.loads_128bit} loads of 16 bytes"
        assert bool(report.loads_128bit) == wide, f"{report.name} on sm_{report.chip}: {found}"
