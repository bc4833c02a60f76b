"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l26_kv_transfer.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds

BOUNDS = {
    # The offsets are 64 bits wide and cost the loads nothing of their width.
    "16 bytes a load": Bounds("llama|latents", loads_128bit=4, registers=40, matrix=False),
    "narrow addresses": Bounds("scales|odd", loads_128bit=0, matrix=False),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
