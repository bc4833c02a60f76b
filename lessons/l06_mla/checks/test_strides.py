"""q and the latents are read by their own strides. Bugs that mix them up are seen."""

import pytest

from lessons.l03_kv_cache.lab.testing import heads_first, padded
from lessons.l06_mla import optimized
from lessons.l06_mla.lab.testing import RANK
from lessons.l06_mla.optimized import mla_decode_kernel
from lessons.l06_mla.test_equivalence import by_definition, decode_inputs
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug

SCALE = 24**-0.5


def laid_out(seed):
    """q with the queries of a head beside each other, latents between NaN."""
    q, kv_cache, lens = decode_inputs("normal", [7, 0, 50], 60, 5, seed)
    return heads_first(q), padded(kv_cache), lens


def prove_module(module, inputs):
    return prove(
        lambda *x: module.mla_decode(*x, SCALE, RANK), lambda *x: by_definition(*x, SCALE), inputs
    )


def test_each_tensor_is_read_by_its_own_strides(seed, proof):
    for errors in prove_module(optimized, laid_out(seed)):
        proof.record(mla_decode_kernel, errors)


BUGS = {
    "latents with q's batch stride": ("sequence * stride_kb", "sequence * stride_qb"),
    "latents with q's row stride": ("tl.int64) * stride_kn", "tl.int64) * stride_qb"),
    "q's heads by its batch stride": ("None] * stride_qh", "None] * stride_qb"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_mix_up_of_strides_is_seen(name, seed, tmp_path):
    buggy = with_bug(optimized, tmp_path, *BUGS[name])
    with pytest.raises(NotEquivalent):
        prove_module(buggy, laid_out(seed))
