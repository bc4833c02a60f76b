"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l27_states.lab.specs import KERNELS, WITH_MATRIX_UNITS
from lessons.toolbox.proof.compiled import Bounds

BOUNDS = {
    # A state is most of what a step moves: its rows are read 16 bytes at a time.
    "wide loads of a step": Bounds("^step", loads_128bit=8, local_memory=0, matrix=False),
    # float32 as three products of tf32; without matrix units they would not fit the registers
    "chunks": Bounds(
        "^(prepare|states|outputs)",
        WITH_MATRIX_UNITS,
        matrix=True,
        spill_bytes={"states_delta": 80},
    ),
    "the convolution": Bounds(
        "^conv", matrix=False, spill_bytes={"conv_prompts_bf16 on sm_100": 8}
    ),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
