"""The cache of the open task: a query sees what lesson 19's caches show it, in as many bytes."""

import itertools

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.rope import rotation
from lessons.l19_kv_quantization.formats import FORMATS, kv_bytes_per_token
from lessons.l19_kv_quantization.kivi import kivi
from lessons.l19_kv_quantization.kivi.kivi import GROUP, KiviCache
from lessons.toolbox.model.config import ModelConfig
from reference.bench.open_tasks.coded_cache import NAMES, Choice, CodedCache, cache_bytes

CONFIG = ModelConfig("llama", 64, 48, 2, 4, 2, 64, 64, 512)  # two layers, heads 4 / 2 of 64


def drawn(tokens: int) -> list[torch.Tensor]:
    """q, k, v: [tokens, H, D]."""
    return [torch.randn(tokens, heads, CONFIG.head_dim) for heads in (4, 2, 2)]


def choice_of(k: str, v: str, **wide) -> Choice:
    return Choice((k,) * 2, (v,) * 2, **wide)


def turned(q, k):
    """As the model rotates them, k as it is stored."""
    rotate = rotation(CONFIG, torch.arange(len(q)), q.dtype)
    return rotate(q), rotate(k).bfloat16()


@pytest.mark.parametrize("recent", [1, 5, 32, 40])
def test_kivi_is_lesson_19_s(recent, monkeypatch):
    """Token after token in KiviCache, and all at once in ours."""

    def in_float32(codes, scales, dequantize=kivi.dequantize_keys):
        """Lesson 19's rounds code · scale to bfloat16 before it adds the low."""
        return dequantize(codes, scales.float()).bfloat16()

    monkeypatch.setattr(kivi, "dequantize_keys", in_float32)
    q, k, v = drawn(120)
    got = CodedCache(CONFIG, choice_of("kivi4", "kivi4", recent=recent)).attend(1, q, k, v)
    (q, k), v, cache = turned(q, k), v.bfloat16(), KiviCache(recent)
    for place in range(len(q)):
        cache.append(k[place : place + 1], v[place : place + 1])
        numbers = (x.float() for x in cache.numbers())
        want = attention(q[place : place + 1], *numbers)
        torch.testing.assert_close(got[place : place + 1], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*FORMATS, "auto"])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (3, 0), (0, 7), (3, 7)])
def test_rows_become_codes_when_they_are_old(name, sinks, recent):
    """K in one format, V in 16 bits."""
    q, k, v = drawn(30)
    got = CodedCache(CONFIG, choice_of(name, "auto", sinks=sinks, recent=recent)).attend(0, q, k, v)
    (q, k), v = turned(q, k), v.bfloat16().float()
    for place in range(len(q)):
        keys, end = k[: place + 1].float(), max(sinks, place + 1 - recent)
        if name != "auto":
            codes = FORMATS[name].quantize(k[sinks:end])
            keys[sinks:end] = FORMATS[name].dequantize(*codes).float()[: len(keys[sinks:end])]
        want = attention(q[place : place + 1], keys, v[: place + 1])
        torch.testing.assert_close(got[place : place + 1], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_text_give_what_the_whole_gives(name):
    q, k, v = drawn(100)
    choice = choice_of(name, "kivi2", sinks=2, recent=9)
    whole = CodedCache(CONFIG, choice).attend(0, q, k, v)
    cache, ends = CodedCache(CONFIG, choice), [0, 41, 42, 77, 100]
    pieces = [cache.attend(0, q[a:b], k[a:b], v[a:b]) for a, b in itertools.pairwise(ends)]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_rows_are_lesson_19_s(name):
    per_token = kv_bytes_per_token(CONFIG, FORMATS[name], 2)
    assert cache_bytes(choice_of(name, name), CONFIG, 100, 3) == 3 * 100 * per_token
    wide = CONFIG.kv_bytes_per_token(2)
    found = cache_bytes(choice_of(name, name, sinks=4, recent=16), CONFIG, 100, 3)
    assert found == 3 * (80 * per_token + 20 * wide)
    short = cache_bytes(choice_of(name, name, sinks=4, recent=200), CONFIG, 100, 3)
    assert short == 3 * 100 * wide == cache_bytes(choice_of("auto", "auto"), CONFIG, 100, 3)


@pytest.mark.parametrize("tokens", [31, 64, 100, 129])
def test_bytes_of_kivi_are_those_that_it_stores(tokens):
    _, k, v = drawn(tokens)
    cache = KiviCache(GROUP)
    cache.append(k.bfloat16(), v.bfloat16())
    stored = sum(
        x.nbytes for x in (*(x for group in cache.groups for x in group), cache.k, cache.v)
    )
    choice = choice_of("kivi4", "kivi4", recent=GROUP)
    assert cache_bytes(choice, CONFIG, tokens, 1) == CONFIG.num_hidden_layers * stored


def test_two_bits_lose_more_than_four():
    q, k, v = drawn(100)
    exact = CodedCache(CONFIG, choice_of("auto", "auto")).attend(0, q, k, v)
    off = {
        name: (CodedCache(CONFIG, choice_of(name, name)).attend(0, q, k, v) - exact).norm()
        for name in NAMES
    }
    assert 0 == off["auto"] < off["int8"] < off["fp8"] < off["kivi4"] < off["kivi2"]
