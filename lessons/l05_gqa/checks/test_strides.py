"""Each tensor is read by its own strides: q, K and V lie in other storage, in another order, at
other distances. Bugs that mix them up are seen.
"""

import pytest

from lessons.l03_kv_cache.lab.testing import LAYOUTS, decode_by_slicing, decode_inputs, laid_out
from lessons.l05_gqa import optimized
from lessons.l05_gqa.optimized import decode_attention, gqa_decode_kernel
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug


def inputs_of(layout, seed):
    *tensors, lens = decode_inputs("normal", [7, 0, 70], 75, 6, 2, 24, seed)
    return *laid_out(layout, *tensors), lens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_is_read_by_its_own_strides(layout, seed, proof):
    inputs = inputs_of(layout, seed)
    assert len({x.stride() for x in inputs}) == 4
    proof.record(gqa_decode_kernel, prove(decode_attention, decode_by_slicing, inputs))


# The layout is one in which the wrong stride stays within the tensor that is read.
BUGS = {  # name: (layout, the code as it is, the code with the bug)
    "v with k's batch stride": ("K dense, V wide", "sequence * stride_vb", "sequence * stride_kb"),
    "v with k's head stride": ("K dense, V wide", "tl.int64) * stride_vh", "tl.int64) * stride_kh"),
    "v with k's row stride": ("K dense, V wide", "None] * stride_vn", "None] * stride_kn"),
    "v's tiles by k's rows": ("K dense, V wide", "first * stride_vn", "first * stride_kn"),
    "k with v's batch stride": ("K wide, V dense", "sequence * stride_kb", "sequence * stride_vb"),
    "k with v's head stride": ("K wide, V dense", "tl.int64) * stride_kh", "tl.int64) * stride_vh"),
    "k with v's row stride": ("K wide, V dense", "None] * stride_kn", "None] * stride_vn"),
    "k with q's batch stride": ("K wide, V dense", "sequence * stride_kb", "sequence * stride_qb"),
    "q's heads by its batch stride": ("K wide, V dense", "None] * stride_qh", "None] * stride_qb"),
    "out with q's strides": (
        "K wide, V dense",
        "+ (sequence * tl.num_programs(0) * GROUP + head[:, None]) * HEAD_DIM",
        "+ sequence * stride_qb + head[:, None] * stride_qh",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_mix_up_of_strides_is_seen(name, seed, tmp_path):
    layout, old, new = BUGS[name]
    buggy = with_bug(optimized, tmp_path, old, new)
    with pytest.raises(NotEquivalent):
        prove(buggy.decode_attention, decode_by_slicing, inputs_of(layout, seed))
