"""Each tensor is read by its own strides, as in lesson 5, in splits; latents too. Bugs that mix
them up are seen.
"""

from functools import partial

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import (
    DEVICE,
    LAYOUTS,
    decode_by_slicing,
    decode_inputs,
    far_apart,
    heads_first,
    laid_out,
    padded,
)
from lessons.l10_flash_decoding import mla, optimized
from lessons.l10_flash_decoding.mla import mla_split_kernel
from lessons.l10_flash_decoding.optimized import combine, split_decode_kernel
from lessons.l10_flash_decoding.test_equivalence import LATENT, latent_by_slicing
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug


def in_splits(module):
    """flash_decode of a module in three splits of small tiles, as `prove` calls it."""

    def decode(q, *caches_and_lens):
        partials = module.split_decode(q, *caches_and_lens, num_splits=3, block_n=16)
        return combine(*partials, q.dtype)[0]

    return decode


def inputs_of(layout, seed):
    *tensors, lens = decode_inputs("normal", [7, 0, 70], 75, 4, 2, 24, seed)
    return *laid_out(layout, *tensors), lens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_is_read_by_its_own_strides(layout, seed, proof):
    inputs = inputs_of(layout, seed)
    assert len({x.stride() for x in inputs}) == 4
    proof.record(split_decode_kernel, prove(in_splits(optimized), decode_by_slicing, inputs))


# The layout is one in which the wrong stride stays within the tensor that is read.
BUGS = {  # name: (layout, the code as it is, the code with the bug)
    "v with k's batch stride": ("K dense, V wide", "sequence * stride_vb", "sequence * stride_kb"),
    "v with k's head stride": ("K dense, V wide", "tl.int64) * stride_vh", "tl.int64) * stride_kh"),
    "v with k's row stride": ("K dense, V wide", "None] * stride_vn", "None] * stride_kn"),
    "v's tiles by k's rows": ("K dense, V wide", "tile * stride_vn", "tile * stride_kn"),
    "k with v's batch stride": ("K wide, V dense", "sequence * stride_kb", "sequence * stride_vb"),
    "k with v's head stride": ("K wide, V dense", "tl.int64) * stride_kh", "tl.int64) * stride_vh"),
    "k with q's batch stride": ("K wide, V dense", "sequence * stride_kb", "sequence * stride_qb"),
    "q's heads by its batch stride": ("K wide, V dense", "None] * stride_qh", "None] * stride_qb"),
    "out with q's strides": (
        "K wide, V dense",
        "partial[:, None] * HEAD_DIM + column",
        "(sequence * stride_qb + head * stride_qh)[:, None] + column",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_mix_up_of_strides_is_seen(name, seed, tmp_path):
    layout, old, new = BUGS[name]
    buggy = with_bug(optimized, tmp_path, old, new)
    with pytest.raises(NotEquivalent):
        prove(in_splits(buggy), decode_by_slicing, inputs_of(layout, seed))


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
@pytest.mark.parametrize("what", ["q", "caches"])
def test_heads_beyond_two_to_the_31_elements(what, seed, tmp_path):
    """Three heads of queries, or of K and V, so far apart that int32 cannot tell where the third
    is.
    """
    near = decode_inputs("normal", [3, 2], 3, 3, 3, 16, seed, torch.float16)
    q, k_cache, v_cache, lens = near
    if what == "q":
        q = far_apart(q, 1, tmp_path / "q")
    else:
        k_cache, v_cache = (
            far_apart(x, 2, tmp_path / name) for name, x in zip("kv", (k_cache, v_cache))
        )
    decode = in_splits(optimized)
    assert_same_bits(decode(q, k_cache, v_cache, lens), decode(*near))


# ---------------------------------------------------------------- latents


def latents_laid_out(seed):
    """q with the queries of a head beside each other, latents between NaN."""
    q, kv_cache, _, lens = decode_inputs("normal", [16, 0, 50], 60, 5, 1, 48, seed)
    return heads_first(q), padded(kv_cache[:, :, 0]), lens


def test_latents_are_read_by_their_own_strides(seed, proof):
    decode = partial(mla.mla_flash_decode, **LATENT, num_splits=3)
    proof.record(mla_split_kernel, prove(decode, latent_by_slicing, latents_laid_out(seed)))


LATENT_BUGS = {
    "latents with q's batch stride": ("sequence * stride_kb", "sequence * stride_qb"),
    "latents with q's row stride": ("tl.int64) * stride_kn", "tl.int64) * stride_qb"),
    "q's heads by its batch stride": ("None] * stride_qh", "None] * stride_qb"),
}


@pytest.mark.parametrize("name", LATENT_BUGS)
def test_a_mix_up_of_latent_strides_is_seen(name, seed, tmp_path):
    buggy = with_bug(mla, tmp_path, *LATENT_BUGS[name])
    decode = partial(buggy.mla_flash_decode, **LATENT, num_splits=3)
    with pytest.raises(NotEquivalent):
        prove(decode, latent_by_slicing, latents_laid_out(seed))
