"""What the compiler says of the kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l24_structured_outputs.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds

BOUNDS = {
    # Many programs share a processor: 128 threads of at most 32 registers, sixteen times in 65536.
    "all": Bounds(registers=32, local_memory=0),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
