"""What the compiler says of the kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l17_tree_speculation.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, of_16_bits, reports_of

BOUNDS = {"all": Bounds(spill_bytes={"fp32": 128}, loads_128bit=1, matrix=of_16_bits)}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)


@pytest.mark.compiler
def test_two_programs_fit_on_an_sm():
    """Of Llama's heads: four warps, and room for two in an H100's shared memory. Equal splits and
    lists count on it (`PROGRAMS_PER_SM`).
    """
    llama = [spec for spec in KERNELS if spec.name.startswith("tree_bf16_4x128_26")]
    assert {spec.num_warps for spec in llama} == {4} and len(llama) == 4
    for report in reports_of(llama, chips=[90]):
        # 1 KiB is the system's.
        assert 2 * (report.shared_bytes + 1024) <= 228 * 1024 and report.registers <= 255
