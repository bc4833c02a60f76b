"""What the compiler says of the kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l16_speculative_sampling.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds

BOUNDS = {
    # A vocabulary that is a multiple of 16 is read 16 bytes at a time.
    "even": Bounds("(?<!_odd)$", registers=96, shared_bytes=1024, loads_128bit=1),
    "odd": Bounds("_odd$", registers=96, shared_bytes=1024, loads_128bit=0),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
