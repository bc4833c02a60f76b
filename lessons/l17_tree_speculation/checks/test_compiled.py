"""What the compiler says of the kernel, for five GPU generations and without a GPU."""

import pytest

from lessons.l17_tree_speculation.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, of_16_bits

BOUNDS = {"all": Bounds(spill_bytes={"fp32": 128}, loads_128bit=1, matrix=of_16_bits)}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
