"""Proves KIVI's groups, its residual and its kernel, and shows why its cache depends on who reads
when.
"""

from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l12_paged_kv.kernels.paged import decode_kernel
from lessons.l12_paged_kv.lab.testing import DEVICE
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kernels import hooks
from lessons.l19_kv_quantization.kivi import kivi_kernel
from lessons.l19_kv_quantization.kivi.kivi import (
    GROUP,
    KiviCache,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)
from lessons.l19_kv_quantization.kivi.kivi_kernel import KiviPages, kivi_decode
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug


def loud_keys(tokens: int, seed: int, heads: int = 2, head_dim: int = 32):
    """K with three channels that are large for every token, as models have, and V without."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, heads, head_dim, generator=generator)
    k[..., [1, 9, 20]] = 20 + 3 * k[..., [1, 9, 20]]
    return k.to(DEVICE), v.to(DEVICE)


def cache_of(tokens: int, seed: int, step: int = 13, residual: int = GROUP) -> KiviCache:
    cache, (k, v) = KiviCache(residual), loud_keys(tokens, seed)
    for start in range(0, tokens, step):
        cache.append(k[start : start + step], v[start : start + step])
    return cache


def test_by_hand():
    """A channel of the numbers 0 … 31 has scale 31 / 15; code 15 means 31 again."""
    k = torch.arange(32.0)[:, None, None].expand(32, 1, 32)
    codes, scales = quantize_keys(k)
    assert codes.shape == (32, 1, 16) and scales.shape == (1, 1, 32, 2)
    torch.testing.assert_close(scales[0, 0, 0], torch.tensor([31 / 15, 0.0]))
    want = torch.arange(32.0).mul(15 / 31).round() * 31 / 15
    torch.testing.assert_close(dequantize_keys(codes, scales)[:, 0, 7], want)


def test_each_number_is_wrong_by_half_a_step_of_its_own_scale(seed):
    k, v = loud_keys(2 * GROUP, seed)
    codes, scales = quantize_keys(k)
    steps = scales[..., 0].repeat_interleave(GROUP, 0)
    assert ((dequantize_keys(codes, scales) - k).abs() <= 0.5001 * steps).all()
    codes, scales = quantize_values(v)
    steps = scales[..., 0].repeat_interleave(GROUP, -1)
    assert ((dequantize_values(codes, scales) - v).abs() <= 0.5001 * steps).all()


def test_loud_channels_cost_a_token_s_scale_its_bits(seed):
    """K with a scale a channel is several times nearer than with a scale a token; so is V with a
    scale a token, if it is a token that is loud.
    """
    k, _ = loud_keys(4 * GROUP, seed)
    by_token = FORMATS["int4"].dequantize(*FORMATS["int4"].quantize(k))
    by_channel = dequantize_keys(*quantize_keys(k))
    quiet = torch.ones(32, dtype=torch.bool, device=DEVICE)
    quiet[[1, 9, 20]] = False

    def error(x):
        return float((x - k)[..., quiet].norm() / k[..., quiet].norm())

    assert error(by_channel) < 0.15 and error(by_token) > 2.5 * error(by_channel)


def test_who_becomes_codes_when():
    """A group, once it is complete and 32 tokens have come after it."""
    cache = KiviCache(residual=32)
    k, v = loud_keys(1, 0)
    coded = []
    for _ in range(130):
        cache.append(k, v)
        coded.append(cache.coded)
    assert coded[62:65] == [0, 32, 32] and coded[94:97] == [32, 64, 64] and coded[-1] == 96


@pytest.mark.parametrize("residual", [1, 16, 32, 40])
def test_chunks_of_any_size_leave_the_same_cache(residual, seed):
    one, other = (cache_of(101, seed, step, residual) for step in (101, 7))
    assert one.coded == other.coded
    for x, y in zip(one.numbers(), other.numbers()):
        assert torch.equal(x, y)
    k, v = loud_keys(101, seed)
    assert torch.equal(one.numbers()[0][one.coded :], k[one.coded :])
    assert torch.equal(one.numbers()[1][one.coded :], v[one.coded :])


def test_but_a_query_in_the_middle_saw_another_cache(seed):
    """Token 40 saw the first group in full precision when it came. A prompt of 101 tokens that is
    computed again, or found by its prefix, would show it codes.
    """
    k, _ = loud_keys(101, seed)
    then = cache_of(40, seed).numbers()[0]
    now = cache_of(101, seed).numbers()[0][:40]
    assert torch.equal(then, k[:40]) and not torch.equal(now, then)


def test_a_draft_that_completes_a_group_leaves_a_trace(seed):
    """66 tokens and 5 rejected ones: nothing changes. With 70 the draft moves the border: tokens 32
    to 63 are codes before their time, and stay so.
    """
    for tokens, coded in ((66, 32), (70, 64)):
        cache = cache_of(tokens, seed, residual=8)
        before = [x.clone() for x in cache.numbers()]
        cache.append(*loud_keys(5, seed + 1))
        cache.rewind(tokens)
        assert cache.coded == coded
        same = [torch.equal(x, y) for x, y in zip(cache.numbers(), before)]
        assert same == [coded == 32] * 2


def test_what_is_code_cannot_be_taken_back(seed):
    cache = cache_of(70, seed, residual=8)
    cache.append(*loud_keys(40, seed + 1))
    with pytest.raises(
        ValueError, match="tokens: got 70; accepted: 96 to 110: older ones are codes"
    ):
        cache.rewind(70)


# ---------------------------------------------------------------- the kernel


def attend_each(q, caches, **options):
    """The definition: each sequence over its numbers. q: [B, Hq, D] -> [B, Hq, D]."""
    rows = []
    for own, cache in zip(q, caches):
        numbers = [x.to(q.dtype) for x in cache.numbers()]
        rows.append(attention(own[None], *numbers, **options))
    return torch.cat(rows)


def inputs_of(seed):
    """Sequences with no group, one, and two, in pages in random order."""
    caches = [cache_of(tokens, seed + tokens, residual=16) for tokens in (30, 60, 90)]
    count = sum(len(cache.groups) for cache in caches)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    q = torch.randn(3, 4, 32, device=DEVICE)
    return caches, KiviPages.of(caches, order), q


def test_the_kernel_reads_channels_of_k_and_tokens_of_v(seed, proof):
    caches, pages, q = inputs_of(seed)
    fast, plain = partial(kivi_decode, pages=pages), partial(attend_each, caches=caches)
    # K of 20 and more makes scores of 100, whose rounding the exponential amplifies.
    proof.record(decode_kernel, prove(fast, plain, (q,), floor=2e-5))


@pytest.mark.parametrize(
    "hook, old, new",
    [
        ("kivi_key_load", "(slot // GROUP_TOKENS)[:, None] * (2 * WIDTH) + column",
         "(slot // GROUP_TOKENS)[:, None] * (2 * WIDTH) + 0 * column"),
        ("kivi_key_load", "(slot // GROUP_TOKENS)[:, None] * (2 * WIDTH) + column",
         "slot[:, None] * 0 + column"),
        ("kivi_value_load", "slot[:, None] * (2 * PARTS) + column // GROUP_TOKENS",
         "(slot // GROUP_TOKENS)[:, None] * (2 * PARTS) + column // GROUP_TOKENS"),
    ],
)  # fmt: skip
def test_a_wrong_hook_is_found(hook, old, new, seed, tmp_path, monkeypatch):
    """One scale for all channels; the first group's scales for all; V's scales as if they were
    K's.
    """
    caches, pages, q = inputs_of(seed)
    buggy = with_bug(hooks, tmp_path, old, new)
    monkeypatch.setattr(kivi_kernel, hook, getattr(buggy, hook))
    with pytest.raises(NotEquivalent):
        prove(partial(kivi_decode, pages=pages), partial(attend_each, caches=caches), (q,))


def test_bad_input(seed):
    with pytest.raises(
        ValueError, match="k, v: got \\(24, 24\\); accepted: heads of a multiple of 32"
    ):
        KiviCache().append(torch.randn(3, 1, 24), torch.randn(3, 1, 24))
    with pytest.raises(ValueError, match="residual"):
        KiviCache(0)
    _, pages, _ = inputs_of(seed)
    with pytest.raises(ValueError, match="q: got 24; accepted: a head size that is a power of two"):
        kivi_decode(torch.randn(3, 4, 24, device=DEVICE), pages)
