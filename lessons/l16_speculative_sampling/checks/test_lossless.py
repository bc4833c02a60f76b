"""Proves that speculation changes no distribution: by enumeration for small vocabularies, then by
chi-squared tests on the embedded pair, whose probability of a false alarm is below 1e-9.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l16_speculative_sampling import naive, optimized
from lessons.l16_speculative_sampling.drafts import load_pair
from lessons.l16_speculative_sampling.generate import generate
from lessons.l16_speculative_sampling.lab import slips
from lessons.l16_speculative_sampling.lab.chi_squared import (
    chance_of,
    chi_squared,
    drawn_steps,
    sequences,
    tables_of,
    z_of_acceptance,
)
from lessons.l16_speculative_sampling.lab.enumeration import (
    emitted,
    largest_difference,
    random_table,
)
from lessons.l16_speculative_sampling.more.speed import acceptance, expected_tokens
from lessons.l16_speculative_sampling.stand_ins import verify_torch

ROOT = Path(__file__).resolve().parents[3]
WAYS = {
    "all tokens": SamplingParams(),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.7),
    "temperature and penalties": SamplingParams(
        temperature=0.6, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "greedy": SamplingParams(temperature=0),
}
FALSE_ALARM = 1e-10  # of a test; a run has fewer than ten of them


def pair(way: str, count: int, vocab_size: int = 3) -> tuple[dict, dict]:
    """Two tiny models, sampled alike."""
    return tuple(random_table(vocab_size, count, WAYS[way], seed) for seed in (1, 2))


def narrow(verify):
    """A verification in float32 for cells whose numbers are float64."""

    def verified(p, q, drafted, u, cu_rows):
        rows = int(cu_rows.diff().max())
        return verify(p.float(), q.float(), drafted, u.float(), cu_rows, rows)

    return verified


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_distribution_is_the_targets(way, count):
    """Every draft, every outcome: the target's own distribution to 1e-12."""
    target, draft = pair(way, count)
    steps = emitted(naive.verify, target, draft, 3, count)
    assert abs(sum(steps.values()) - 1) < 1e-12
    assert largest_difference(steps, target, count + 1) < 1e-12


@pytest.mark.parametrize("verify", [optimized.verify, verify_torch], ids=["kernel", "stand-in"])
@pytest.mark.parametrize("way", ["all tokens", "top-k"])
@pytest.mark.sample(1)
def test_the_distribution_of_the_batched_ones_is_the_same(way, verify):
    target, draft = pair(way, 2)
    steps = emitted(narrow(verify), target, draft, 3, 2)
    assert largest_difference(steps, target, 3) < 1e-12


@pytest.mark.parametrize("vocab_size, count", [(2, 4), (5, 1)])
def test_other_sizes(vocab_size, count):
    target, draft = pair("all tokens", count, vocab_size)
    steps = emitted(naive.verify, target, draft, vocab_size, count)
    assert largest_difference(steps, target, count + 1) < 1e-12


def test_a_sure_draft_loses_nothing_either():
    """An n-gram is a draft whose whole probability is on one token."""
    target, _ = pair("all tokens", 2)
    drafts = {prefix: torch.eye(3, dtype=torch.float64)[sum(prefix) % 3] for prefix in target}
    steps = emitted(naive.verify, target, drafts, 3, 2)
    assert largest_difference(steps, target, 3) < 1e-12


def test_acceptance_is_the_sum_of_minima():
    """And the tokens of a step are 1 + α + α² + … where α is the same everywhere."""
    target, draft = pair("all tokens", 0)
    target = {key: target[()] for size in range(4) for key in product(range(3), repeat=size)}
    draft = dict.fromkeys(target, draft[()])
    alpha = float(acceptance(target[()], draft[()]))
    steps = emitted(naive.verify, target, draft, 3, 3)
    length = sum(len(prefix) * chance for prefix, chance in steps.items())
    assert length == pytest.approx(expected_tokens(alpha, 3), abs=1e-12)


def test_an_equal_draft_is_always_accepted():
    target, _ = pair("all tokens", 2)
    assert {len(prefix) for prefix in emitted(naive.verify, target, target, 3, 2)} == {3}


@pytest.mark.parametrize("slip", slips.VERIFICATIONS)
def test_a_slip_of_the_museum_is_found(slip):
    target, draft = pair("all tokens", 2)
    steps = emitted(slip, target, draft, 3, 2)
    assert largest_difference(steps, target, 3) > 1e-9


def test_an_epsilon_in_the_ratio_rejects_rare_tokens():
    """p / (q + 1e-8) is 0.09 where both are 1e-9, and the rule says that such a token stays."""
    p = torch.tensor([[1 - 1e-9, 1e-9]] * 2, dtype=torch.float64)
    u = torch.full((2, 2), 0.5, dtype=torch.float64)
    rows = p, p, torch.tensor([1, -1]), u, torch.tensor([0, 2])
    assert naive.verify(*rows)[1].tolist() == [1]
    assert slips.epsilon_in_the_ratio(*rows)[1].tolist() == [0]


# ---------------------------------------------------------------- the embedded pair


@pytest.fixture(scope="module")
def models():
    if not (ROOT / "models/tiny/model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    return load_pair(str(ROOT / "models/tiny"), str(ROOT / "models/tiny-draft"))


PARAMS = SamplingParams(temperature=0.8, top_k=4)
PROMPT = "def read"


@pytest.fixture(scope="module")
def tables(models):
    """What both models sample after every prefix of two tokens, and all sequences of three."""
    target, draft, tokenizer = models
    return tables_of(target, draft, tokenizer(PROMPT)["input_ids"], PARAMS, 3)


@pytest.fixture
def count(request) -> int:
    """Steps to draw. The slips are found by far fewer; more of them see a smaller difference."""
    return 200_000 if request.config.getoption("--all") else 50_000


@pytest.mark.sample(1, of="the embedded pair")
def test_the_embedded_pair(tables, count, seed):
    """Steps with two drafted tokens, then the target alone: chi-squared and z-test."""
    steps = drawn_steps(tables, verify_torch, count, seed)
    statistic, freedom = chi_squared(steps.counts, tables.expected * count)
    assert chance_of(statistic, freedom) > FALSE_ALARM
    assert abs(z_of_acceptance(steps, tables)) < 6.5  # beyond it: 8e-11


@pytest.mark.parametrize("slip", slips.BATCHED)
@pytest.mark.sample(1, of="the embedded pair")
def test_a_slip_on_the_embedded_pair_is_found(slip, tables, count, seed):
    steps = drawn_steps(tables, slip, count, seed)
    statistic, freedom = chi_squared(steps.counts, tables.expected * count)
    assert chance_of(statistic, freedom) < FALSE_ALARM


def test_the_rung_on_the_embedded_pair(models, tables, seed, request):
    """The whole loop, with caches and rewinding: three tokens each of many requests."""
    target, draft, tokenizer = models
    count = 20_000 if request.config.getoption("--all") else 500
    prompts = [tokenizer(PROMPT)["input_ids"]] * count
    options = dict(draft=draft, num_speculative_tokens=2, max_num_seqs=250)
    outputs = generate(target, prompts, 3, PARAMS, **options)
    counts = sequences(tables, outputs)
    statistic, freedom = chi_squared(counts, tables.expected * count)
    assert chance_of(statistic, freedom) > FALSE_ALARM
