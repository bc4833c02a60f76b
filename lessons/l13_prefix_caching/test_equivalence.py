"""Proves that a shared prefix read once gives what it gives when every sequence reads it, and
counts the bytes of both.
"""

import itertools
import random
from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.lab.testing import DEVICE
from lessons.l10_flash_decoding.optimized import split_decode_kernel
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH, paged_batch
from lessons.l13_prefix_caching import cascade
from lessons.l13_prefix_caching.cascade import (
    attend_separately,
    cascade_attention,
    prefix_partial,
    shared_blocks,
)
from lessons.l13_prefix_caching.cascade_kernels import (
    cascade_decode,
    prefix_splits,
    sequences_in_a_tile,
)
from lessons.l13_prefix_caching.lab.cascade_traffic import Shared, cascade_bytes, separate_bytes
from lessons.l13_prefix_caching.lab.launches import KERNELS
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    attention_inputs,
    floor_for,
    poisoned,
    prove,
)


def by_slicing(q, k_prefix, v_prefix, k_suffix, v_suffix, suffix_lens, softmax_scale=None):
    """The definition: lesson 2's attention over the prefix and the rows in use after it."""
    outs = []
    for b, length in enumerate(suffix_lens.tolist()):
        k, v = (
            torch.cat([k_prefix, k_suffix[b, :length]]),
            torch.cat([v_prefix, v_suffix[b, :length]]),
        )
        outs.append(attention(q[b : b + 1], k, v, softmax_scale)[0])
    return torch.stack(outs)


def shared_inputs(name, prefix, lengths, capacity, heads, seed, dtype=torch.float32):
    """A prefix of so many keys and suffixes of these lengths, whose unused rows are NaN. heads:
    (Hq, Hkv, D).
    """
    num_heads, num_kv_heads, head_dim = heads
    _, k, v = attention_inputs(name, 1, max(prefix, 1), *heads, dtype=dtype, seed=seed)
    k_prefix, v_prefix = k[:prefix].to(DEVICE), v[:prefix].to(DEVICE)
    q = torch.empty(len(lengths), num_heads, head_dim, dtype=dtype, device=DEVICE)
    k_suffix, v_suffix = (
        poisoned((len(lengths), capacity, num_kv_heads, head_dim), dtype, DEVICE) for _ in range(2)
    )
    for b, length in enumerate(lengths):
        one, k, v = attention_inputs(name, 1, length, *heads, dtype=dtype, seed=seed + 1 + b)
        q[b], k_suffix[b, :length], v_suffix[b, :length] = one[0], k, v
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return q, k_prefix, v_prefix, k_suffix, v_suffix, lens


# ---------------------------------------------------------------- PyTorch


@pytest.mark.parametrize("function", [attend_separately, cascade_attention])
@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.parametrize("prefix", [0, 1, 40])
def test_one_product_over_the_prefix(function, name, prefix, seed):
    inputs = shared_inputs(name, prefix, [1, 7, 3], 9, (6, 2, 16), seed)
    floor = floor_for(torch.float32, name)
    prove(
        partial(function, softmax_scale=0.4),
        partial(by_slicing, softmax_scale=0.4),
        inputs,
        floor=floor,
    )


@pytest.mark.parametrize("prefix, lengths", [(33, [1]), (5, [64, 1, 9, 2, 30])])
def test_float64_agrees_to_rounding(prefix, lengths, seed):
    inputs = shared_inputs("normal", prefix, lengths, 64, (4, 1, 8), seed, torch.float64)
    expected = by_slicing(*inputs)
    for function in (attend_separately, cascade_attention):
        torch.testing.assert_close(function(*inputs), expected, atol=1e-12, rtol=1e-12)


# ---------------------------------------------------------------- the kernels


@pytest.mark.parametrize(
    "batch, heads, dtype",
    [
        (1, (2, 2, 64), torch.float32),
        (5, (6, 1, 16), torch.float32),
        (33, (4, 2, 16), torch.float32),
        (9, (8, 1, 128), torch.bfloat16),
        (3, (4, 2, 80), torch.float16),
        (2, (3, 1, 256), torch.float32),
    ],
)
@pytest.mark.sample(2)
def test_cascade_decode(batch, heads, dtype, seed, proof):
    """Batches that fill a tile of rows, overflow it by one sequence, and leave most of it empty."""
    lengths = [random.randint(1, 20) for _ in range(batch)]
    inputs = shared_inputs("normal", 50, lengths, 20, heads, seed, dtype)
    proof.record(split_decode_kernel, prove(cascade_decode, by_slicing, inputs))


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.sample(2)
def test_hard_inputs(name, seed, proof):
    inputs = shared_inputs(name, 70, [1, 40, 17], 40, (4, 2, 16), seed)
    proof.record(
        split_decode_kernel,
        prove(
            partial(cascade_decode, softmax_scale=0.4),
            partial(by_slicing, softmax_scale=0.4),
            inputs,
            floor=floor_for(torch.float32, name),
        ),
    )


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 200])
@pytest.mark.sample(2)
def test_prefixes_around_a_tile(prefix, seed, proof):
    inputs = shared_inputs("ascending", prefix, [3, 1], 5, (4, 2, 16), seed)
    proof.record(split_decode_kernel, prove(cascade_decode, by_slicing, inputs))


def test_the_prefix_alone_beside_lesson_8(seed):
    """Merged splits of the prefix are the Partial that one product gives: result and
    log-sum-exp.
    """
    q, k, v, *_ = shared_inputs("normal", 90, [1] * 40, 1, (6, 2, 16), seed)
    from lessons.l08_online_softmax.naive import finish
    from lessons.l10_flash_decoding.optimized import combine

    for got, expected in zip(
        combine(*prefix_splits(q, k, v)), finish(prefix_partial(q, k, v, 0.25))
    ):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_a_slip_between_heads_and_sequences_is_rejected(seed, monkeypatch):
    """Rows handed over sequence by sequence instead of KV head by KV head."""
    from lessons.l13_prefix_caching import cascade_kernels

    monkeypatch.setattr(cascade_kernels, "rows_of_kv_heads", lambda q, heads: q)
    inputs = shared_inputs("normal", 50, [3, 9, 4], 9, (4, 2, 16), seed)
    with pytest.raises(NotEquivalent):
        prove(cascade_decode, by_slicing, inputs)


def test_a_prefix_that_does_not_fit_is_refused():
    q, k_prefix, v_prefix, *rest = shared_inputs("normal", 6, [2], 3, (4, 2, 16), 0)
    for wrong in ((k_prefix[:, :1], v_prefix[:, :1]), (k_prefix, v_prefix[:3]), (k_prefix[0],) * 2):
        with pytest.raises(ValueError, match="k_prefix, v_prefix, k_suffix: got"):
            cascade_decode(q, *wrong, *rest)


# ---------------------------------------------------------------- bytes


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: accesses are counted in the interpreter")
@pytest.mark.parametrize("batch", [1, 4, 33])
def test_the_prefix_is_read_once_for_each_tile_of_rows(batch, seed):
    """What the formula counts is what the kernels load.."""
    inputs = shared_inputs("normal", 48, [5] * batch, 5, (4, 2, 16), seed)
    with Accesses() as accesses:
        cascade_decode(*inputs)
    _, k_prefix, v_prefix, k_suffix, _, _ = inputs
    tiles = -(-batch // sequences_in_a_tile(2, 16))
    assert set(accesses.loads(k_prefix).flatten().tolist()) == {tiles}
    assert set(accesses.loads(v_prefix).flatten().tolist()) == {tiles}
    assert set(accesses.loads(k_suffix).flatten().tolist()) == {1}
    shape = Shared(batch, 48, 5, 4, 2, 16, itemsize=4)
    kv = sum(int(accesses.loads(x).sum()) * 4 for x in inputs[1:5])
    assert kv == cascade_bytes(shape).keys_and_values
    assert separate_bytes(shape).keys_and_values == 2 * batch * 53 * 2 * 16 * 4


# ---------------------------------------------------------------- over the pool's blocks


def test_blocks_that_all_have_in_common():
    for tables, count in (
        ([[3, 1, 4], [3, 1, 5]], 2),
        ([[3, 1], [4, 1]], 0),
        ([[7]], 1),
        ([[3, 1, 4], [3, 2, 4]], 1),
    ):
        assert shared_blocks(torch.tensor(tables)) == count


@pytest.mark.parametrize("window", [None, 3])
def test_decode_over_blocks_as_lesson_12(window, seed, monkeypatch):
    """Sequences of other lengths after two shared blocks; free blocks hold NaN."""
    monkeypatch.setattr(cascade, "SHORTEST_SHARED", 1)
    tables = [[5, 2, 7], [5, 2, 0, 4], [5, 2, 6]]
    chunks = [([1], held) for held in (8, 14, 11)]
    batch = paged_batch(chunks, 4, tables)
    k_cache, v_cache = (torch.full((9, 4, 2, 8), torch.nan) for _ in range(2))
    for (_, held), table in zip(chunks, tables):
        for at in range(held + 1):
            k_cache[table[at // 4], at % 4] = torch.randn(2, 8)
            v_cache[table[at // 4], at % 4] = torch.randn(2, 8)
    q = torch.randn(3, 6, 8)
    got, expected = (
        decode(q, k_cache, v_cache, batch, 0.3, window)
        for decode in (cascade.decode, LESSON_12_TORCH.decode)
    )
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_who_shares_nothing_decodes_as_before(seed):
    tables = [[0, 1], [2, 3]]
    batch = paged_batch([([1], 5), ([1], 6)], 4, tables)
    assert new_batch([([1], 5), ([1], 6)], 4, block_tables=tables).block_table is not None
    q, cache = torch.randn(2, 4, 8), torch.randn(4, 4, 2, 8)
    got = cascade.decode(q, cache, cache, batch, 0.3, None)
    assert torch.equal(got, LESSON_12_TORCH.decode(q, cache, cache, batch, 0.3, None))


# ---------------------------------------------------------------- what the compiler says


@pytest.mark.compiler
@pytest.mark.sample(1, of="compiler")
def test_the_compiler_spills_nothing_and_uses_matrix_units(request, seed):
    """Two launches in any order of runs, all of them by `make test-all`: they take a minute."""
    is_all = request.config.getoption("--all")
    for report in check_all(KERNELS if is_all else random.sample(KERNELS, 2)):
        if not report.was_run:
            pytest.skip(report.error)
        assert not report.spill_bytes and report.fits, report
        assert bool(report.matrix_instruction) == ("bf16" in report.name and report.chip >= 80)


def test_formulas_on_paper():
    """32 sequences of 200 own tokens after 2000 shared ones: 6.8 times fewer keys and values."""
    shape = Shared(32, 2000, 200, 32, 8, 128)
    separate, together = separate_bytes(shape), cascade_bytes(shape)
    assert separate.keys_and_values == 32 * 2200 * 4096
    assert together.keys_and_values == (2 * 2000 + 32 * 200) * 4096
    for one, more in itertools.pairwise(Shared(b, 2000, 200, 32, 8, 128) for b in (1, 2, 4, 8)):
        gain = separate_bytes(one).total / cascade_bytes(one).total
        assert separate_bytes(more).total / cascade_bytes(more).total > gain
    alone = Shared(1, 2000, 200, 32, 8, 128)
    assert cascade_bytes(alone).total > separate_bytes(alone).total
