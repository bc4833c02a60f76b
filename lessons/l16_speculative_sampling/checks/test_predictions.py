"""Proves that the numbers and excerpts of the README are those of the code, and that the formula of
the speed-up is the average of what can happen.
"""

import json
from pathlib import Path

import pytest

from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l16_speculative_sampling.generate import Counts, generate
from lessons.l16_speculative_sampling.lab import pictures, repeats
from lessons.l16_speculative_sampling.lab.experiments import (
    ALPHAS,
    COUNT,
    TARGET,
    WAYS,
    counted,
    predicted_cost_ratio,
    predicted_pass_s,
    predicted_speedup,
    tokens_a_step,
)
from lessons.l16_speculative_sampling.lab.workload import (
    MODELS,
    TIMED_TOKENS,
    embedded_pair,
    held_out_prompts,
)
from lessons.l16_speculative_sampling.more.adaptive import AdaptiveCount
from lessons.l16_speculative_sampling.more.speed import best_count, expected_tokens, speedup
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
README = pages(ROOM)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_table_of_the_readme(alpha):
    tokens, gain = expected_tokens(alpha, COUNT), speedup(alpha, COUNT, 0.1)
    assert f"| {alpha} | {tokens:.2f} | {gain:.2f}× |" in README


@pytest.mark.parametrize("alpha", [0.6, 0.8, 0.9])
def test_the_predictions_of_the_readme(alpha):
    batches = (1, 16, 64, 128, 256, 512)
    row = " | ".join(f"{predicted_speedup(alpha, batch):.2f}" for batch in batches)
    assert f"| α = {alpha} | {row} |" in README
    assert f"c is {predicted_cost_ratio():.3f}" in README


def test_a_long_context_moves_the_batch_at_which_it_loses():
    batch, context = 256, 8192
    gains = [predicted_speedup(0.8, batch, context=context), predicted_speedup(0.8, batch)]
    assert "predicts {:.2f} for α = 0.8, where it says {:.2f} above".format(*gains) in README
    cache_bytes = batch * context * kv_bytes_per_token(TARGET)
    assert f"such a cache holds {cache_bytes / 1e9:.0f} GB" in README


@pytest.mark.parametrize("who", ["tiny-draft", "n-grams"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(2)
def test_the_counted_acceptance_of_the_readme(way, who, request):
    """To the last digit with --all; else a quarter of the requests, near it."""
    if not (MODELS / "tiny" / "model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {way} | {who} |")]
    alpha, tokens = (float(cell) for cell in row.split("|")[3:5])
    if request.config.getoption("--all"):
        counts = counted(way, who == "tiny-draft")
        # Another machine may round a tie the other way.
        assert counts.alpha == pytest.approx(alpha, abs=0.02)
        assert tokens_a_step(counts) == pytest.approx(tokens, abs=0.08)
    else:
        counts = counted(way, who == "tiny-draft", requests=4)
        assert counts.alpha == pytest.approx(alpha, abs=0.25)
        assert 1 <= tokens_a_step(counts) <= COUNT + 1


@pytest.mark.parametrize("name", repeats.DRAFTERS)
@pytest.mark.parametrize("title", repeats.WORKLOADS)
def test_the_counted_repeats(title, name, request):
    """Only with --all, because a part of the requests says little about all of them."""
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: takes minutes, try --all")
    recorded = json.loads(repeats.FILE.read_text(encoding="utf-8"))[title][name]
    # Another machine may round a tie the other way.
    assert repeats.counted(repeats.WORKLOADS[title], name) == pytest.approx(recorded, rel=0.05)


def test_a_few_repeats():
    """A repeated request's answer is drafted nearly whole, an n-gram draft knows nothing of it."""
    if not (MODELS / "tiny" / "model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    again = repeats.WORKLOADS["again"]
    found = {name: repeats.counted(again, name, requests=3) for name in ("ngram_16", "suffix")}
    assert found["suffix"]["kept"] > 3 * found["ngram_16"]["kept"]
    assert found["suffix"]["kept"] > 0.8 * found["suffix"]["drafted"]


def test_what_one_prompt_emits_in_a_pass():
    """The one of the benchmark, whose times are under Measured."""
    if not (MODELS / "tiny" / "model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    target, draft, _ = embedded_pair()
    found = []
    for drafter in (draft, None):
        counts = Counts()
        options = dict(draft=drafter, num_speculative_tokens=COUNT, counts=counts)
        generate(target, held_out_prompts(1), TIMED_TOKENS, WAYS["greedy"], **options)
        found.append(tokens_a_step(counts))
    assert "emits {:.1f} tokens with the draft model, {:.1f} with n-grams".format(*found) in README


def test_where_a_draft_costs_more_than_it_brings():
    """At c = 0.1 an α below about 0.3; at c = 0.5 even α = 1 gains less than two. And on an H100 a
    pass over five tokens takes as long as one over one.
    """
    assert speedup(0.27, COUNT, 0.1) < 1 < speedup(0.3, COUNT, 0.1)
    assert speedup(1.0, COUNT, 0.5) == pytest.approx(5 / 3)
    five, one = (predicted_pass_s(TARGET, 1, new) for new in (COUNT + 1, 1))
    assert five == pytest.approx(one, rel=1e-3)
    assert f"Step 8 gives {expected_tokens(0.777, COUNT):.1f} tokens for the first row" in README


def test_the_best_count_grows_with_the_acceptance():
    counts = [best_count(alpha, 0.1, 10) for alpha in (0.05, 0.5, 0.8, 0.95)]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 10
    assert best_count(0.8, 0.1, 0) == 0


def test_a_request_that_drafts_nothing_tries_again():
    class Asked:
        row = 0

    choice = AdaptiveCount(4, cost_ratio=0.4, every=3)
    for _ in range(30):
        choice.note(Asked, drafted=1, kept=0)
    assert choice.count_for(Asked) == 0
    for _ in range(3):
        choice.note(Asked, drafted=0, kept=0)
    assert choice.count_for(Asked) == 1


def test_the_excerpts_of_the_readme_are_the_code():
    names = ("naive.py", "optimized.py", "runner.py")
    code = "".join((ROOM / name).read_text(encoding="utf-8") for name in names)
    for excerpt in README.split("```python\n")[1:]:
        assert excerpt.split("```")[0] in code


@pytest.mark.parametrize("name", ["rule", "speed", "batches"])
@pytest.mark.sample(4, of="pictures")
def test_pictures_fit_their_frame(name):
    from lessons.toolbox.draw.figure import overlapping_texts, texts_outside

    figure = getattr(pictures, f"draw_{name}")()
    assert not texts_outside(figure) and not overlapping_texts(figure)
