"""Caches that are larger than 32 bits can count."""

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from lessons.l28_sparse_attention.index_scores import index_scores
from lessons.l28_sparse_attention.lab.testing import DEVICE, index_inputs, paged, some_keys
from lessons.l28_sparse_attention.optimized import sparse_mla


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
def test_keys_past_two_to_the_31(seed, tmp_path):
    """The last block is so far away that int32 cannot tell where."""
    case = paged([13], block_size=4)
    far = far_apart(case.keys, 0, tmp_path / "keys")
    inputs = index_inputs(case, 13)
    want = index_scores(*inputs)
    inputs[2] = far
    assert torch.equal(index_scores(*inputs), want)
    latents = far_apart(case.latents, 0, tmp_path / "latents")
    arguments = case.block_table, some_keys(case, 5), case.sequences, 0.2, 32
    want = sparse_mla(case.q, case.latents, *arguments)
    assert torch.equal(sparse_mla(case.q, latents, *arguments), want)
