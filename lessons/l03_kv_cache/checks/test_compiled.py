"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l03_kv_cache.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds

BOUNDS = {
    "wide loads": Bounds("decode|8x128", loads_128bit=1),
    # A row of 128 values is one for each of a program's threads.
    "short rows": Bounds("append_.*_2x64", loads_128bit=0),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
