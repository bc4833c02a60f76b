"""Proves that the two kernels compute what PyTorch's indexing and lesson 2's attention define."""

import random

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.lab.testing import (
    DEVICE,
    append_by_indexing,
    decode_by_slicing,
    decode_inputs,
    heads_first,
    padded,
)
from lessons.l03_kv_cache.optimized import (
    append_kernel,
    append_rows,
    decode_attention,
    decode_kernel,
)
from lessons.l03_kv_cache.stand_ins import decode_attention_torch
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    attention_inputs,
    draw,
    edge_lengths,
    floor_for,
    poisoned,
    prove,
    with_canaries,
)

# ---------------------------------------------------------------- decode_kernel


def in_tiles_of(block_n, **options):
    """decode_attention with these options, as `prove` calls it."""
    return lambda *inputs: decode_attention(*inputs, block_n=block_n, **options)


def sliced(**options):
    """The definition with these options."""
    return lambda *inputs: decode_by_slicing(*inputs, **options)


SHAPES = [  # Hq, Hkv, D, dtype
    (4, 4, 16, torch.float32),
    (6, 1, 16, torch.float32),
    (4, 2, 80, torch.float32),
    (2, 1, 64, torch.bfloat16),
    (4, 2, 128, torch.float16),
]


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim, dtype", SHAPES)
@pytest.mark.sample(3)
def test_decode_kernel(num_heads, num_kv_heads, head_dim, dtype, seed, proof):
    """A ragged batch with an empty sequence; lengths around the tile size; with and without a
    window.
    """
    lengths = [0, 1, 15, 16, 17, 33, 50]
    inputs = decode_inputs("normal", lengths, 50, num_heads, num_kv_heads, head_dim, seed, dtype)
    for window in (None, 16):
        optimized, naive = in_tiles_of(16, window=window), sliced(window=window)
        proof.record(decode_kernel, prove(optimized, naive, inputs))


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.sample(3)
def test_decode_kernel_on_hard_inputs(name, seed, proof):
    inputs = decode_inputs(name, [2, 40, 65], 70, 4, 2, 16, seed)
    floor = floor_for(torch.float32, name)
    proof.record(decode_kernel, prove(in_tiles_of(16), decode_by_slicing, inputs, floor=floor))
    scaled = in_tiles_of(32, softmax_scale=0.4)
    proof.record(decode_kernel, prove(scaled, sliced(softmax_scale=0.4), inputs, floor=floor))


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_decode_kernel_at_every_tile_size(block_n, seed, proof):
    lengths = edge_lengths(block_n, at_most=130)
    inputs = decode_inputs("ascending", lengths, max(lengths), 2, 1, 16, seed)
    proof.record(decode_kernel, prove(in_tiles_of(block_n), decode_by_slicing, inputs))


LAYOUTS = {
    "V heads first": (lambda k: k, heads_first),
    "K heads first": (heads_first, lambda v: v),
    "V between NaN": (lambda k: k, padded),
    "K between NaN": (padded, lambda v: v),
}


@pytest.mark.parametrize("v_head_dim", [8, 16, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(4)
def test_decode_kernel_reads_v_by_its_own_strides(layout, v_head_dim, seed, proof):
    """K and V lie in different storage, in different order; V's heads may be narrower or wider."""
    lay_k, lay_v = LAYOUTS[layout]
    q, k_cache, _, lens = decode_inputs("normal", [1, 20, 33], 40, 4, 2, 16, seed)
    v_cache = draw("normal", (3, 40, 2, v_head_dim), seed=seed + 9, device=DEVICE)
    inputs = (q, lay_k(k_cache), lay_v(v_cache), lens)
    assert inputs[1].stride() != inputs[2].stride()
    proof.record(decode_kernel, prove(in_tiles_of(16), decode_by_slicing, inputs))


def test_k_and_v_may_be_halves_of_one_buffer(seed, proof):
    """[B, capacity, Hkv, 2, D]: a head's key and value beside each other."""
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33], 40, 4, 2, 16, seed)
    both = torch.stack([k_cache, v_cache], dim=3)
    inputs = (q, both[:, :, :, 0], both[:, :, :, 1], lens)
    proof.record(decode_kernel, prove(in_tiles_of(16), decode_by_slicing, inputs))


def test_a_sequence_does_not_depend_on_the_batch(seed):
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33, 20], 40, 4, 2, 16, seed)
    together = decode_attention(q, k_cache, v_cache, lens)
    for b in range(3):
        one = slice(b, b + 1)
        alone = decode_attention(q[one], k_cache[one], v_cache[one], lens[one])
        assert torch.equal(together[one], alone)


def test_decode_probes_with_known_answers(seed):
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33], 40, 4, 2, 16, seed)
    ones = torch.ones_like(v_cache)
    out = decode_attention(q, k_cache, ones, lens)
    torch.testing.assert_close(out, torch.ones_like(q), atol=1e-6, rtol=0)

    means = [v_cache[b, :n].mean(0) for b, n in enumerate(lens.tolist())]
    mean = torch.stack(means).repeat_interleave(2, dim=1)
    out = decode_attention(q, torch.zeros_like(k_cache), v_cache, lens)
    torch.testing.assert_close(out, mean, atol=1e-6, rtol=1e-5)

    q[1, 2] = float("nan")
    hit = decode_attention(q, k_cache, v_cache, lens).isnan().any(-1)
    assert hit.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_decode_in_torch(dtype, length, seed):
    shape = (1, length, 6, 2, 20)
    inputs = attention_inputs("large_logits", *shape, dtype=dtype, seed=seed, device=DEVICE)
    for window in (None, 1, 5, 40):
        prove(
            lambda q, k, v, w=window: decode_attention_torch(q, k, v, 0.2, w),
            lambda q, k, v, w=window: attention(q, k, v, 0.2, window=w),
            inputs,
            floor=floor_for(dtype, "large_logits" if dtype == torch.float32 else "normal"),
        )


SLIPS = {
    "scale": lambda q, k, v, lens: decode_attention(q, k, v, lens, 1.01 * 16**-0.5),
    "window off by one": lambda q, k, v, lens: decode_attention(q, k, v, lens, window=32),
    "one key short": lambda q, k, v, lens: decode_attention(q, k, v, lens - 1),
    "repeat instead of repeat_interleave": lambda q, k, v, lens: decode_attention(
        q.view(-1, 2, 2, 16).transpose(1, 2).reshape(q.shape), k, v, lens
    ),
    "V in K's order": lambda q, k, v, lens: decode_attention(
        q, k, heads_first(v).transpose(1, 2).reshape(v.shape), lens
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_decode_is_rejected(slip, seed):
    inputs = decode_inputs("normal", [7, 33], 40, 4, 2, 16, seed)
    with pytest.raises(NotEquivalent):
        prove(SLIPS[slip], decode_by_slicing, inputs)


# ---------------------------------------------------------------- append_kernel


def some_slots(num_tokens, num_slots):
    """Distinct slots in any order, every fourth token left out: [num_tokens] int64."""
    slots = random.sample(range(num_slots), num_tokens)
    slots[3::4] = [-1] * len(slots[3::4])
    return torch.tensor(slots, dtype=torch.int64, device=DEVICE)


def rows_of(shape, seed, dtype=torch.float32):
    return draw("normal", shape, dtype=dtype, seed=seed, device=DEVICE)


APPENDED = [(1, torch.float32), (9, torch.float32), (6, torch.bfloat16)]


@pytest.mark.parametrize("num_tokens, dtype", APPENDED)
def test_append_kernel(num_tokens, dtype, seed, proof):
    """Slots in any order, some skipped; everything else stays; nothing beside the caches is
    written.
    """
    k, v = (rows_of((num_tokens, 3, 20), seed + i, dtype) for i in range(2))
    caches = [rows_of((12, 3, 20), seed + i, dtype) for i in (2, 3)]
    slots = some_slots(num_tokens, 12)
    inputs = [k, v, *caches, slots]
    proof.record(append_kernel, prove(append_rows, append_by_indexing, inputs, mutates=(2, 3)))

    k_cache, check_k = with_canaries((12, 3, 20), dtype, DEVICE)
    v_cache, check_v = with_canaries((12, 3, 20), dtype, DEVICE)
    append_rows(k, v, k_cache, v_cache, slots)
    check_k()
    check_v()
    for cache in (k_cache, v_cache):
        assert cache.isfinite().any(-1).sum() == 3 * (slots >= 0).sum()


@pytest.mark.parametrize("v_head_dim", [8, 20, 24])
def test_append_kernel_writes_v_by_its_own_strides(v_head_dim, seed, proof):
    """Tokens and slots of K and of V lie at four different distances; V's heads have any width."""
    k = rows_of((5, 7, 20), seed)[:, 2:5]
    v = rows_of((5, 4, v_head_dim), seed + 1)[:, 1:]
    k_cache = rows_of((9, 5, 20), seed + 2)[:, :3]
    v_cache = rows_of((9, 8, v_head_dim), seed + 3)[:, 4:7]
    inputs = [k, v, k_cache, v_cache, some_slots(5, 9)]
    proof.record(append_kernel, prove(append_rows, append_by_indexing, inputs, mutates=(2, 3)))


def test_append_from_a_strided_projection(seed):
    """k and v as slices of one fused qkv projection: rows dense, tokens far apart."""
    qkv = rows_of((5, 10, 8), seed)
    k_cache, v_cache = (poisoned((5, 2, 8), device=DEVICE) for _ in range(2))
    append_rows(qkv[:, 6:8], qkv[:, 8:], k_cache, v_cache, torch.arange(5, device=DEVICE))
    assert torch.equal(k_cache, qkv[:, 6:8]) and torch.equal(v_cache, qkv[:, 8:])


@pytest.mark.parametrize("num_tokens, num_kv_heads", [(0, 2), (3, 0)])
def test_nothing_new_changes_nothing(num_tokens, num_kv_heads):
    k, v = torch.zeros(2, num_tokens, num_kv_heads, 8, device=DEVICE)
    caches = [torch.ones(4, num_kv_heads, 8, device=DEVICE) for _ in range(2)]
    append_rows(k, v, *caches, torch.arange(num_tokens, device=DEVICE))
    assert all((cache == 1).all() for cache in caches)
