"""Proves that a cached step equals recomputing everything, that copies are counted exactly, and
that the kernels are right.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.cache import SMALLEST_BUCKET, KVCache, bucket, decode_attention_torch
from lessons.l03_kv_cache.lab.specs import KERNELS
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.optimized import (
    KernelKVCache,
    append_kernel,
    append_rows,
    decode_attention,
    decode_kernel,
)
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import MLAConfig, ModelConfig
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    attention_inputs,
    draw,
    edge_lengths,
    poison_,
    poisoned,
    prove,
    with_canaries,
)
from lessons.toolbox.proof.refusals import KINDS, assert_refused

# NumPy, the interpreter's engine, warns of what is meant: an empty sequence divides 0 by 0, a probe
# is all NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
CONFIG = ModelConfig(
    "llama",
    vocab_size=11,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=4,
    max_position_embeddings=512,
    sliding_windows=(None, 5),
)
BYTES_PER_TOKEN = CONFIG.kv_bytes_per_token(4)
CACHES = {"concat": ConcatCache, "preallocated": KVCache, "kernels": KernelKVCache}


def new_cache(kind):
    return kind(CONFIG) if kind is ConcatCache else kind(CONFIG, 3, device=DEVICE)


# ---------------------------------------------------------------- caches


def check_cache(cache, steps: list[int], seed: int) -> None:
    """Feed `steps` tokens at a time through two layers; each output must equal attention over
    everything so far.
    """
    total = sum(steps)
    streams = [
        attention_inputs("normal", total, total, 6, 2, 8, seed=seed + layer, device=DEVICE)
        for layer in range(2)
    ]
    start = 0
    for step in steps:
        assert cache.length == start
        for layer, (q, k, v) in enumerate(streams):
            rows = slice(start, start + step)
            out = cache.attend(layer, q[rows].clone(), k[rows].clone(), v[rows].clone())
            whole = attention(q, k, v, CONFIG.softmax_scale, window=CONFIG.sliding_window(layer))
            torch.testing.assert_close(out, whole[rows], atol=1e-5, rtol=1e-5)
        start += step


@pytest.mark.parametrize(
    "steps", [[1, 1, 1, 1, 1, 1, 1, 1], [7, 1, 1], [5, 3, 1, 4, 1], [1, 70, 1]]
)
@pytest.mark.parametrize("name", CACHES)
def test_cached_steps_equal_recomputing(name, steps, seed):
    """One by one, prefill then decode, chunks (fewer queries than keys), and across a growth; one
    layer has a window of 5.
    """
    check_cache(new_cache(CACHES[name]), steps, seed)


@pytest.mark.parametrize("kind", [KVCache, KernelKVCache])
def test_rows_not_in_use_are_never_read(kind, seed):
    cache = kind(CONFIG, 40, device=DEVICE)
    poison_(cache.keys)
    poison_(cache.values)
    check_cache(cache, [3, 1, 4, 1], seed)
    assert cache.keys[:, 9:].isnan().all() and cache.keys[:, :9].isfinite().all()


@pytest.mark.parametrize(
    "name", ["window off by one", "overwrites the last row", "forgets on growth", "top-left chunk"]
)
def test_a_wrong_cache_is_rejected(name, seed):
    class Wrong(KVCache):
        def decode(self, layer, q, end):
            window = self.config.sliding_window(layer)
            if name == "window off by one" and window:
                return decode_attention_torch(
                    q, self.keys[layer, :end], self.values[layer, :end], 8**-0.5, window - 1
                )
            return super().decode(layer, q, end)

        def write(self, layer, k, v):
            if name == "overwrites the last row" and self.length:
                self.keys[layer, self.length - 1 : self.length - 1 + len(k)] = k
            super().write(layer, k, v)

        def reserve(self, tokens):
            grown = tokens > self.capacity
            super().reserve(tokens)
            if name == "forgets on growth" and grown:
                self.keys.zero_()

        def attend(self, layer, q, k, v):
            if name == "top-left chunk" and len(q) > 1 and self.length:
                end = self.append(layer, k, v)
                padded = torch.cat([q, q.new_zeros(end - len(q), *q.shape[1:])])
                return attention(padded, self.keys[layer, :end], self.values[layer, :end])[: len(q)]
            return super().attend(layer, q, k, v)

    check_cache(KVCache(CONFIG, 3, device=DEVICE), [6, 1, 3, 1, 60], seed)
    with pytest.raises(AssertionError):
        check_cache(Wrong(CONFIG, 3, device=DEVICE), [6, 1, 3, 1, 60], seed)


# ---------------------------------------------------------------- counters


def feed(cache, steps):
    for step in steps:
        for layer in range(CONFIG.num_hidden_layers):
            cache.append(layer, torch.zeros(step, 2, 8), torch.zeros(step, 2, 8))
    return cache


def test_concat_copies_quadratically():
    prompt = random.randint(1, 40)
    for n in (1, 10, 100):
        cache = feed(ConcatCache(CONFIG), [prompt] + [1] * n)
        assert cache.length == prompt + n
        assert cache.written_bytes == BYTES_PER_TOKEN * (prompt + n)
        assert cache.growth_copy_bytes == BYTES_PER_TOKEN * sum(range(prompt, prompt + n))


def test_preallocated_never_copies():
    cache = feed(KVCache(CONFIG, 130), [30] + [1] * 100)
    assert (cache.length, cache.capacity, cache.growth_copy_bytes) == (130, 130, 0)
    assert cache.written_bytes == cache.used_bytes == cache.allocated_bytes == BYTES_PER_TOKEN * 130


def test_buckets_copy_linearly():
    cache = feed(KVCache(CONFIG), [1] * 300)
    assert cache.capacity == 512
    assert cache.growth_copy_bytes == BYTES_PER_TOKEN * (64 + 128 + 256) < 2 * cache.used_bytes
    assert (
        cache.allocated_bytes == BYTES_PER_TOKEN * 512 and cache.used_bytes == BYTES_PER_TOKEN * 300
    )


def test_growth_copies_only_the_rows_in_use():
    cache = feed(KVCache(CONFIG, 10), [4, 20])
    assert (cache.capacity, cache.growth_copy_bytes) == (64, BYTES_PER_TOKEN * 4)


def test_a_bucket_is_the_next_power_of_two():
    assert [bucket(n) for n in (1, 63, 64, 65, 128, 129, 1000)] == [64, 64, 64, 128, 128, 256, 1024]
    assert SMALLEST_BUCKET == 64


# ---------------------------------------------------------------- kernels


def decode_by_slicing(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """The definition of decode_attention: lesson 2's attention on the rows in use, one sequence at
    a time.
    """
    return torch.stack(
        [
            attention(q[b : b + 1], k_cache[b, :n], v_cache[b, :n], softmax_scale, window=window)[0]
            for b, n in enumerate(context_lens.tolist())
        ]
    )


def decode_inputs(
    name, lengths, capacity, num_heads, num_kv_heads, head_dim, seed, dtype=torch.float32
):
    """q: [B, Hq, D], caches: [B, capacity, Hkv, D] whose unused rows are NaN, context_lens: [B]
    int32.
    """
    q = torch.empty(len(lengths), num_heads, head_dim, dtype=dtype, device=DEVICE)
    k_cache, v_cache = (
        poisoned((len(lengths), capacity, num_kv_heads, head_dim), dtype, DEVICE) for _ in range(2)
    )
    for b, n in enumerate(lengths):
        one, k, v = attention_inputs(
            name, 1, max(n, 1), num_heads, num_kv_heads, head_dim, dtype=dtype, seed=seed + b
        )
        q[b], k_cache[b, :n], v_cache[b, :n] = one[0], k[:n], v[:n]
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, dtype",
    [
        (4, 4, 16, torch.float32),
        (6, 1, 16, torch.float32),
        (4, 2, 80, torch.float32),
        (2, 1, 64, torch.bfloat16),
        (4, 2, 128, torch.float16),
    ],
)
def test_decode_kernel(num_heads, num_kv_heads, head_dim, dtype, seed, proof):
    """A ragged batch with an empty sequence; lengths around the tile size; with and without a
    window.
    """
    lengths = [0, 1, 15, 16, 17, 33, 50]
    inputs = decode_inputs("normal", lengths, 50, num_heads, num_kv_heads, head_dim, seed, dtype)
    for window in (None, 16):
        proof.record(
            decode_kernel,
            prove(
                lambda *x, w=window: decode_attention(*x, window=w, block_n=16),
                lambda *x, w=window: decode_by_slicing(*x, window=w),
                inputs,
            ),
        )


@pytest.mark.parametrize("v_head_dim", [8, 24])
def test_heads_of_v_may_have_another_width(v_head_dim, seed, proof):
    """As in DeepSeek's latent attention, lesson 6: every cache and both kernels."""
    q, k_cache, _, lens = decode_inputs("normal", [1, 20], 20, 4, 2, 16, seed)
    v_cache = draw("normal", (2, 20, 2, v_head_dim), seed=seed + 9, device=DEVICE)
    k_cache.nan_to_num_(0)
    inputs = (q, k_cache, v_cache, lens)
    proof.record(
        decode_kernel, prove(lambda *x: decode_attention(*x, block_n=16), decode_by_slicing, inputs)
    )
    slots, rows = (
        torch.tensor([4, -1], device=DEVICE),
        (k_cache[0, :2].clone(), v_cache[0, :2].clone()),
    )
    proof.record(
        append_kernel,
        prove(
            append_rows, append_by_indexing, [*rows, k_cache[1], v_cache[1], slots], mutates=(2, 3)
        ),
    )
    q, k, v = draw("normal", (9, 4, 16), seed=seed, device=DEVICE), k_cache[1, :9], v_cache[1, :9]
    whole = attention(q, k, v)
    mla = MLAConfig(None, 8, 8, 8, v_head_dim)
    config = replace(
        CONFIG,
        num_attention_heads=4,
        head_dim=16,
        v_head_dim=v_head_dim,
        mla=mla,
        sliding_windows=(),
    )
    for kind in CACHES.values():
        cache = kind(config) if kind is ConcatCache else kind(config, 3, device=DEVICE)
        for rows in torch.arange(9).split([5, 1, 3]):
            out, _ = (
                cache.attend(layer, q[rows], k[rows].clone(), v[rows].clone()) for layer in range(2)
            )
            torch.testing.assert_close(out, whole[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
def test_decode_kernel_on_hard_inputs(name, seed, proof):
    inputs = decode_inputs(name, [2, 40, 65], 70, 4, 2, 16, seed)
    proof.record(
        decode_kernel, prove(lambda *x: decode_attention(*x, block_n=16), decode_by_slicing, inputs)
    )
    proof.record(
        decode_kernel,
        prove(
            lambda *x: decode_attention(*x, 0.4, block_n=32),
            lambda *x: decode_by_slicing(*x, 0.4),
            inputs,
        ),
    )


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_decode_kernel_at_every_tile_size(block_n, seed, proof):
    lengths = edge_lengths(block_n, at_most=130)
    inputs = decode_inputs("ascending", lengths, max(lengths), 2, 1, 16, seed)
    proof.record(
        decode_kernel,
        prove(lambda *x: decode_attention(*x, block_n=block_n), decode_by_slicing, inputs),
    )


def test_a_sequence_does_not_depend_on_the_batch(seed):
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33, 20], 40, 4, 2, 16, seed)
    together = decode_attention(q, k_cache, v_cache, lens)
    for b in range(3):
        assert torch.equal(
            together[b],
            decode_attention(q[b : b + 1], k_cache[b : b + 1], v_cache[b : b + 1], lens[b : b + 1])[
                0
            ],
        )


def test_decode_probes_with_known_answers(seed):
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33], 40, 4, 2, 16, seed)
    ones = torch.ones_like(v_cache)
    torch.testing.assert_close(
        decode_attention(q, k_cache, ones, lens), torch.ones_like(q), atol=1e-6, rtol=0
    )
    mean = torch.stack(
        [v_cache[b, :n].mean(0) for b, n in enumerate(lens.tolist())]
    ).repeat_interleave(2, dim=1)
    torch.testing.assert_close(
        decode_attention(q, torch.zeros_like(k_cache), v_cache, lens), mean, atol=1e-6, rtol=1e-5
    )
    q[1, 2] = float("nan")
    assert decode_attention(q, k_cache, v_cache, lens).isnan().any(-1).nonzero().tolist() == [
        [1, 2]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_decode_in_torch(dtype, length, seed):
    q, k, v = attention_inputs(
        "large_logits", 1, length, 6, 2, 20, dtype=dtype, seed=seed, device=DEVICE
    )
    for window in (None, 1, 5, 40):
        prove(
            lambda q, k, v, w=window: decode_attention_torch(q, k, v, 0.2, w),
            lambda q, k, v, w=window: attention(q, k, v, 0.2, window=w),
            (q, k, v),
        )


@pytest.mark.parametrize(
    "slip", ["scale", "window off by one", "one key short", "repeat instead of repeat_interleave"]
)
def test_a_wrong_decode_is_rejected(slip, seed):
    def slipped(q, k_cache, v_cache, lens):
        if slip == "scale":
            return decode_attention(q, k_cache, v_cache, lens, 1.01 * 16**-0.5)
        if slip == "window off by one":
            return decode_attention(q, k_cache, v_cache, lens, window=32)
        if slip == "one key short":
            return decode_attention(q, k_cache, v_cache, lens - 1)
        return decode_attention(
            q.view(-1, 2, 2, 16).transpose(1, 2).reshape(q.shape), k_cache, v_cache, lens
        )

    with pytest.raises(NotEquivalent):
        prove(slipped, decode_by_slicing, decode_inputs("normal", [7, 33], 40, 4, 2, 16, seed))


def append_by_indexing(k, v, k_cache, v_cache, slot_mapping):
    kept = slot_mapping >= 0
    k_cache[slot_mapping[kept]], v_cache[slot_mapping[kept]] = k[kept], v[kept]


@pytest.mark.parametrize(
    "num_tokens, dtype", [(1, torch.float32), (9, torch.float32), (6, torch.bfloat16)]
)
def test_append_kernel(num_tokens, dtype, seed, proof):
    """Slots in any order, some skipped; everything else stays; nothing beside the caches is
    written.
    """
    k, v = (
        draw("normal", (num_tokens, 3, 20), dtype=dtype, seed=seed + i, device=DEVICE)
        for i in range(2)
    )
    slots = random.sample(range(12), num_tokens)
    slots = torch.tensor(
        [-1 if i % 4 == 3 else slot for i, slot in enumerate(slots)],
        dtype=torch.int64,
        device=DEVICE,
    )
    caches = [
        draw("normal", (12, 3, 20), dtype=dtype, seed=seed + i, device=DEVICE) for i in (2, 3)
    ]
    proof.record(
        append_kernel,
        prove(append_rows, append_by_indexing, [k, v, *caches, slots], mutates=(2, 3)),
    )
    (k_cache, check_k), (v_cache, check_v) = (
        with_canaries((12, 3, 20), dtype, DEVICE) for _ in range(2)
    )
    append_rows(k, v, k_cache, v_cache, slots)
    check_k()
    check_v()
    assert k_cache.isfinite().any(-1).sum() == 3 * (slots >= 0).sum()


def test_no_new_token_changes_nothing():
    caches = [torch.ones(4, 2, 8, device=DEVICE) for _ in range(2)]
    append_rows(
        *torch.zeros(2, 0, 2, 8, device=DEVICE),
        *caches,
        torch.zeros(0, dtype=torch.int64, device=DEVICE),
    )
    assert all((cache == 1).all() for cache in caches)


def test_append_from_a_strided_projection(seed):
    """k and v as slices of one fused qkv projection: rows dense, tokens far apart."""
    qkv = draw("normal", (5, 10, 8), seed=seed, device=DEVICE)
    k_cache, v_cache = (poisoned((5, 2, 8), device=DEVICE) for _ in range(2))
    append_rows(qkv[:, 6:8], qkv[:, 8:], k_cache, v_cache, torch.arange(5, device=DEVICE))
    assert torch.equal(k_cache, qkv[:, 6:8]) and torch.equal(v_cache, qkv[:, 8:])


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        # a row of 128 values: one for each of a program's threads
        wide = "2x64" not in report.name or "decode" in report.name
        assert bool(report.loads_128bit) == wide, (
            f"{report.name} on sm_{report.chip}: {report.loads_128bit} loads of 16 bytes"
        )


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(v=torch.zeros(3, 2, 4)), "k, v, k_cache, v_cache: got"),
        (dict(k_cache=torch.zeros(9, 1, 8), v_cache=torch.zeros(9, 1, 8)), "slots, Hkv, D"),
        (dict(v_cache=torch.zeros(9, 2, 4)), "slots, Hkv, Dv"),
        (dict(v_cache=torch.zeros(8, 2, 8)), "slots, Hkv, Dv"),
        (dict(v=torch.zeros(3, 2, 8).half()), "one dtype"),
        (dict(slot_mapping=torch.arange(3, dtype=torch.int32)), "slot_mapping: got torch.int32"),
        (dict(slot_mapping=torch.arange(4)), "accepted: int64 .3,"),
        (dict(k=torch.zeros(3, 8, 2).transpose(1, 2)), "got strides"),
    ],
)
def test_append_refuses(change, message):
    arguments = dict(
        k=torch.zeros(3, 2, 8),
        v=torch.zeros(3, 2, 8),
        k_cache=torch.zeros(9, 2, 8),
        v_cache=torch.zeros(9, 2, 8),
        slot_mapping=torch.arange(3),
    )
    with pytest.raises(ValueError, match=message) as error:
        append_rows(**arguments | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(2, 3, 8)), "Hq a multiple of Hkv"),
        (dict(q=torch.zeros(1, 4, 8)), "q, k_cache, v_cache, context_lens: got"),
        (
            dict(context_lens=torch.ones(3, dtype=torch.int32)),
            "q, k_cache, v_cache, context_lens: got",
        ),
        (dict(v_cache=torch.zeros(2, 9, 2, 8).double()), "accepted: all three float32"),
        (dict(v_cache=torch.zeros(2, 9, 1, 8)), "Hkv, Dv"),
        (dict(v_cache=torch.zeros(1, 2, 9, 2, 8)), "Hkv, Dv"),
        (dict(q=torch.zeros(2, 8, 4).transpose(1, 2)), "stride 1"),
    ],
)
def test_decode_refuses(change, message):
    arguments = dict(
        q=torch.zeros(2, 4, 8),
        k_cache=torch.zeros(2, 9, 2, 8),
        v_cache=torch.zeros(2, 9, 2, 8),
        context_lens=torch.ones(2, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match=message) as error:
        decode_attention(**arguments | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "context_lens"])
def test_decode_refuses_every_kind_of_wrong_tensor(name):
    arguments = dict(
        q=torch.zeros(2, 4, 8),
        k_cache=torch.zeros(2, 9, 2, 8),
        v_cache=torch.zeros(2, 9, 2, 8),
        context_lens=torch.ones(2, dtype=torch.int32),
    )
    # V may have another width
    kinds = {"context_lens": ("dtype", "device", "shape"), "v_cache": ("dtype", "device", "stride")}
    assert_refused(decode_attention, arguments, name, kinds.get(name, KINDS))


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "slot_mapping"])
def test_append_refuses_every_kind_of_wrong_tensor(name):
    arguments = dict(
        k=torch.zeros(3, 2, 8),
        v=torch.zeros(3, 2, 8),
        k_cache=torch.zeros(9, 2, 8),
        v_cache=torch.zeros(9, 2, 8),
        slot_mapping=torch.arange(3),
    )
    assert_refused(
        append_rows,
        arguments,
        name,
        KINDS if name != "slot_mapping" else ("dtype", "device", "shape"),
    )


def test_a_cache_needs_room():
    with pytest.raises(ValueError, match="capacity: got 0; accepted: 1 or more tokens"):
        KVCache(CONFIG, 0)
