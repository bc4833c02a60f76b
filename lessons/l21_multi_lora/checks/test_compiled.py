"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l21_multi_lora.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, of_16_bits

BOUNDS = {
    # Nothing is spilled; 16 bits run on matrix units, float32 and a T4 have none.
    "shrink": Bounds("shrink", local_memory=0, matrix=of_16_bits),
    "expand": Bounds("expand", local_memory=0, matrix=of_16_bits),
    # Rows of A and of B are stored along K and N, so neighbouring threads read neighbouring
    # numbers, at every rank.
    "loads of A": Bounds("shrink_bf16", loads_128bit=4),
    "loads of B": Bounds("expand_bf16", loads_128bit=4),
    # The same of q, k and v together.
    "slices": Bounds("slices", local_memory=0, matrix=of_16_bits),
    "loads of slices": Bounds("slices_(shrink|expand)_bf16", loads_128bit=4),
    # Many programs of a decode step share a processor. Ranks up to 16: 128 threads of at most 64
    # registers, eight times in 65536; and eight times the shared memory in an H200's 227 KiB.
    "low ranks": Bounds("bf16_r(8|16)$", [90], registers=64, shared_bytes=227 * 1024 // 8),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
