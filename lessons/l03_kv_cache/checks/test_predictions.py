"""Proves that the numbers, quiz answers and excerpts of the README are those of the code, and that
the counted work of an answer is what the decoder really runs.
"""

import math
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l01_roofline.planner.models import MODELS
from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.generate import generate
from lessons.l03_kv_cache.lab import testing, traffic
from lessons.l03_kv_cache.lab.work import flops, pairs_run, tokens_run
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
README = pages(ROOM)
LLAMA = MODELS["llama-3-8b"]


@pytest.mark.parametrize("prompt, answer", [(3, 4), (1, 1), (1, 6), (9, 2), (5, 5)])
def test_the_counted_work_is_what_runs(prompt, answer, monkeypatch):
    """Tokens and pairs, counted while real generations run."""
    model = Decoder(testing.CONFIG).eval()
    ran = []
    monkeypatch.setattr(
        model.embed_tokens,
        "forward",
        lambda tokens: ran.append(len(tokens)) or model.embed_tokens.weight[tokens],
    )
    ways = {
        False: lambda prompts: lesson2.generate(model, prompts, answer),
        True: lambda prompts: generate(model, prompts, answer, rung=PREALLOCATED),
    }
    for cached, run in ways.items():
        ran.clear()
        run([list(range(prompt))])
        assert sum(ran) == tokens_run(prompt, answer, cached)
        held, pairs = 0, 0
        for new in ran:  # without a cache every pass begins at its first token again
            first = held if cached else 0
            pairs += sum(range(first + 1, first + new + 1))
            held += new
        assert pairs == pairs_run(prompt, answer, cached)


def test_the_example_of_the_derivation():
    toy = ModelConfig("llama", 11, 8, 2, 2, 1, 4, 8, 64)
    cache = ConcatCache(toy, max_tokens=6)
    traffic.store(cache, [3, 1, 1, 1], dtype=torch.float16)
    assert (toy.kv_bytes_per_token(2), cache.written_bytes, cache.growth_copy_bytes) == (
        32,
        192,
        384,
    )
    assert (tokens_run(3, 4, False), tokens_run(3, 4, True)) == (18, 6)
    assert (pairs_run(3, 4, False), pairs_run(3, 4, True)) == (52, 21)


def test_the_example_of_the_running_maximum():
    """Tiles of one score, 0 and then ln 2, by the lines of decode_kernel."""
    m, l = 0.0, 1.0
    m_new = math.log(2)
    alpha = math.exp(m - m_new)
    l = l * alpha + 1
    assert (alpha, l) == pytest.approx((1 / 2, 3 / 2))
    assert l == pytest.approx(math.exp(0 - m_new) + math.exp(m_new - m_new))
    assert "alpha = 1/2, l = 1 · 1/2 + 1 = 3/2" in README


def test_the_numbers_of_the_readme():
    many, few = tokens_run(1000, 7000, False), tokens_run(1000, 7000, True)
    for quoted in (
        f"{many / 1e6:.1f} million tokens through the model, where {few} are enough",
        f"That is {many / few:.0f} times as many",
        f"says {2 * 32 * 4096 * 2 // 1024} KiB instead of {kv_bytes_per_token(LLAMA) / 1024:.0f}",
    ):
        assert quoted in README, quoted
    assert "weights at 53,248 tokens" in README
    for answer, is_more in ((53_247, False), (53_248, True)):
        weights, attention = flops(LLAMA, 1, answer, cached=True)
        assert (attention > weights) == is_more
    cache = 32 * 4096 * kv_bytes_per_token(LLAMA)
    assert cache > 2 * LLAMA.params > 15 * 4096 * kv_bytes_per_token(LLAMA)


def test_the_cache_takes_one_power_from_both():
    for cached, powers in ((True, (2, 4)), (False, (4, 8))):
        one, two = (flops(LLAMA, 1, answer, cached) for answer in (2**20, 2**21))
        growth = [after / before for before, after in zip(one, two)]
        assert growth == pytest.approx(powers, rel=1e-4)


def test_the_answers_of_the_quiz():
    assert 8192 * kv_bytes_per_token(LLAMA) == 2**30
    assert sum(range(4001, 4005)) == 16010 and 4 * 4004 == 16016
    right, wrong = (2**30 + 16e9) / 4.8e12 * 1e3, (1e9 + 16e9) / 4.8e12 * 1e3
    assert f"from {right:.2f} to {wrong:.2f} ms" in README and f"= {right:.2f} ms" in README
    assert f"is {2**30 / 1e9:.3f} GB" in README and f"{(1 - 1e9 / 2**30) * 100:.0f} %" in README


def test_the_excerpts_of_the_readme_are_the_code():
    code = "".join((ROOM / name).read_text("utf-8") for name in ("naive.py", "optimized.py"))
    excerpts = README.split("```python\n")[1:]
    assert len(excerpts) == 3
    for excerpt in excerpts:
        assert excerpt.split("```")[0] in code
