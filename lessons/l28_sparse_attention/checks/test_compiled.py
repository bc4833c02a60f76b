"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l28_sparse_attention.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, of_16_bits

BOUNDS = {
    "products of the indexer": Bounds("index", matrix=of_16_bits),
    "the top k has no products": Bounds("top_k", registers=128, matrix=False),
    "products of the attention": Bounds("sparse_mla", matrix=of_16_bits),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
