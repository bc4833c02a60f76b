"""Proves attention over a batch, whose operations are the same at every step, and what a step reads
and writes.
"""

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.lab.testing import CONFIG, DEVICE, new_pool
from lessons.l11_cuda_graphs.naive import LOCKSTEP, decode_batch
from lessons.l11_cuda_graphs.stand_ins import batched_decode_attention
from lessons.toolbox.proof.numerics import prove

LENGTHS = [5, 0, 1, 9, 12]


def by_slicing(window):
    def decode(q, keys, values):
        outs = []
        for b, n in enumerate(LENGTHS):
            k, v = keys[b, :n], values[b, :n]
            outs.append(attention(q[b : b + 1], k, v, 0.4, window=window)[0])
        return torch.stack(outs)

    return decode


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_batched_decode_attention(dtype, window, seed):
    """Ragged lengths, one of them 0; what is not in use holds large numbers.

    K and V have different widths, strides and storage, as views of a pool have.
    """
    q = torch.randn(5, 4, 6).to(dtype)
    keys = torch.randn(5, 14, 2, 8).to(dtype)[:, :12, :, :6]
    values = torch.randn(5, 2, 12, 5).to(dtype).transpose(1, 2)
    for b, n in enumerate(LENGTHS):
        keys[b, n:] = values[b, n:] = 1e4

    def batched(q, keys, values):
        return batched_decode_attention(q, keys, values, torch.tensor(LENGTHS), 0.4, window)

    prove(batched, by_slicing(window), (q, keys, values))


def test_what_is_masked_must_be_finite(seed):
    """A masked row weighs 0, and 0 · NaN is NaN. So a pool begins with zeros."""
    q, keys, values = torch.randn(2, 2, 6), torch.randn(2, 8, 1, 6), torch.randn(2, 8, 1, 6)
    lens = torch.tensor([3, 8])
    values[0, 5] = float("nan")
    out = batched_decode_attention(q, keys, values, lens, 0.4)
    assert out[0].isnan().all() and out[1].isfinite().all()
    pool = new_pool(2, 3)
    assert not pool.k_slots.any() and not pool.v_slots.any()


@pytest.mark.parametrize("ops", [LOCKSTEP.stand_ins, LOCKSTEP.kernels], ids=["torch", "kernels"])
def test_slots(ops, seed):
    """Each token goes to its slot, -1 to none that counts. A sequence that moves takes its slots
    along, in every layer.
    """
    pool = KVPool(CONFIG, 3, 4, ops, device=DEVICE)
    k, v = torch.randn(2, 3, 2, 6, device=DEVICE)
    # At position 0 nothing turns.
    batch = decode_batch(torch.tensor([[0] * 3, [0] * 3, [9, -1, 2], [0] * 3], device=DEVICE), 4)
    for layer in range(2):
        q = torch.randn(3, 4, 6, device=DEVICE)
        slots = pool.k_slots[layer], pool.v_slots[layer]
        ops.write(q, k, v, *slots, batch, pool.cos_sin_cache)
    for buffer, rows in ((pool.k_slots, k), (pool.v_slots, v)):
        assert torch.equal(buffer[:, [9, 2]], rows[[0, 2]].expand(2, -1, -1, -1))
        assert not buffer[:, [0, 1, 3, 4, 5, 6, 7, 8, 10, 11]].any()
    pool.move(2, 0, 2)
    assert torch.equal(pool.k_slots[:, 1], pool.k_slots[:, 9])
    assert torch.equal(pool.k_slots[:, 2], k[2].expand(2, -1, -1))


def test_a_decode_batch_is_what_new_batch_makes(seed):
    """One new token a sequence, from one tensor of four rows; every field, and the tables apart."""
    made = decode_batch(torch.tensor([[7, 3], [4, 2], [4, 8], [5, 3]]), 5)
    wanted = new_batch([([7], 4), ([3], 2)], 6)
    for name in ("tokens", "positions", "slot_mapping", "cu_seqlens_q", "context_lens"):
        assert getattr(made, name).tolist() == getattr(wanted, name).tolist(), name
    assert made.logits_at.tolist() == wanted.logits_at.tolist()
    assert (made.max_seqlen_q, made.max_context_len) == (1, wanted.max_context_len)
