"""Proves that a tree changes no distribution: by enumeration for small vocabularies, then by
chi-squared tests on the embedded model, whose probability of a false alarm is below 1e-9. And that
typical acceptance does change it.
"""

import pytest
import torch

from lessons.l02_naive_attention.request import Request
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l16_speculative_sampling.lab.chi_squared import (
    chance_of,
    chi_squared,
    sequences,
    tables_of,
)
from lessons.l16_speculative_sampling.lab.enumeration import largest_difference, random_table
from lessons.l17_tree_speculation import naive
from lessons.l17_tree_speculation.generate import generate
from lessons.l17_tree_speculation.lab import slips
from lessons.l17_tree_speculation.lab.enumeration import emitted, emitted_together
from lessons.l17_tree_speculation.lab.workload import embedded_heads, is_there
from lessons.l17_tree_speculation.trees.accept import (
    Asked,
    FromDraft,
    Typical,
    threshold,
    verify_trees,
)
from lessons.l17_tree_speculation.trees.tree import Tree, chain, full_tree

WAYS = {
    "all tokens": SamplingParams(),
    "top-k": SamplingParams(top_k=2),
    "temperature and penalties": SamplingParams(
        temperature=0.6, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "greedy": SamplingParams(temperature=0),
}
TREES = {
    "a chain": chain(2),
    "three siblings": full_tree([3]),
    "a branch": Tree((-1, 0, 0, 1)),
    "two below one": Tree((-1, 0, 0, 2, 2)),
}
FALSE_ALARM = 1e-10  # of a test; a run has fewer than ten of them


def pair(way: str, depth: int, vocab_size: int) -> tuple[dict, dict]:
    """Two tiny models, sampled alike."""
    return tuple(random_table(vocab_size, depth, WAYS[way], seed) for seed in (1, 2))


def together(tree: Tree):
    """verify_trees in float32 for cells whose numbers are float64."""

    def verified(p, q, filled, u):
        request = Request(0, [0], 9, SamplingParams(seed=0), frozenset())
        asked = [Asked(request, tree, tokens) for tokens in filled]
        return verify_trees(p.float(), q.float(), asked, u.float())

    return verified


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("way", ["all tokens", "top-k"])
def test_the_distribution_is_the_targets(way, shape):
    """Every way to draw the siblings, every outcome: the target's own distribution to 1e-12."""
    tree = TREES[shape]
    target, draft = pair(way, tree.depth, 3)
    steps = emitted(naive.verify_tree, target, draft, tree, 3)
    assert abs(sum(steps.values()) - 1) < 1e-12
    assert largest_difference(steps, target, tree.depth + 1) < 1e-12


@pytest.mark.parametrize("way", ["temperature and penalties", "greedy"])
def test_the_distribution_with_settings(way):
    tree = TREES["a branch"]
    target, draft = pair(way, tree.depth, 3)
    steps = emitted(naive.verify_tree, target, draft, tree, 3)
    assert largest_difference(steps, target, tree.depth + 1) < 1e-12


def test_more_siblings_than_the_draft_has_tokens():
    """q has two tokens, three siblings are wanted: what was never drawn is asked for nothing."""
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    place, rest = naive.accept_among(p, q, [0, 1, -1], [0.9, 0.99, 0.0])
    assert place == -1 and torch.equal(rest, torch.tensor([0, 0, 1], dtype=torch.float64))


@pytest.mark.parametrize("shape", TREES)
def test_the_distribution_of_the_batched_one_is_the_same(shape):
    tree = TREES[shape]
    target, draft = pair("all tokens", tree.depth, 3)
    steps = emitted_together(together(tree), target, draft, tree, 3)
    assert largest_difference(steps, target, tree.depth + 1) < 1e-12


def test_an_equal_draft_always_goes_to_a_leaf():
    tree = Tree((-1, 0, 0, 1, 2))
    target, _ = pair("all tokens", 2, 3)
    steps = emitted(naive.verify_tree, target, target, tree, 3)
    assert {len(text) for text in steps} == {3}


@pytest.mark.parametrize("slip", slips.VERIFICATIONS)
def test_a_slip_of_the_museum_is_found(slip):
    tree = TREES["two below one"]
    target, draft = pair("all tokens", 2, 3)
    steps = emitted(slip, target, draft, tree, 3)
    assert largest_difference(steps, target, 3) > 1e-3


def test_the_bound_of_typical_acceptance():
    """epsilon where one token is nearly sure, delta · exp(-H) where nothing is."""
    p = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4])
    bound = threshold(p, epsilon=0.09, delta=0.3)
    assert bound.tolist() == pytest.approx([0.09, 0.3 / 4])
    assert threshold(p, 0.5, 0.3).tolist() == pytest.approx([0.3, 0.3 / 4])


# ---------------------------------------------------------------- the embedded model

PARAMS = SamplingParams(temperature=0.8, top_k=4)
PROMPT = "def read"


@pytest.fixture(scope="module")
def tables():
    """What the target samples behind every prefix, and all sequences of three tokens."""
    if not is_there("eagle"):
        pytest.skip("NOT RUN: models/tiny-eagle is not there")
    target, _, tokenizer = embedded_heads("eagle")
    return tables_of(target, target, tokenizer(PROMPT)["input_ids"], PARAMS, 3)


def chance(tables, rule, kind: str, count: int) -> float:
    """The probability of what the loop emits, or of something further off, if all is right."""
    target, heads, tokenizer = embedded_heads(kind)
    prompts = [tokenizer(PROMPT)["input_ids"]] * count
    # Four tokens are asked for, because the first comes before any tree, and a cut tree is no tree.
    outputs = generate(
        target, prompts, 4, PARAMS, heads=heads, tree=full_tree([3, 2]), rule=rule, max_num_seqs=250
    )
    counts = sequences(tables, [output[:3] for output in outputs])
    return chance_of(*chi_squared(counts, tables.expected * count))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.sample(1)
def test_the_rung_on_the_embedded_model(kind, tables, request):
    """The whole loop with drawn siblings, caches and compaction: three tokens of many requests."""
    is_thorough = request.config.getoption("--all")
    if kind == "medusa" and not is_thorough:
        pytest.skip("NOT RUN: another drafter of the same rule, --all runs it")
    assert chance(tables, FromDraft(), kind, 20_000 if is_thorough else 500) > FALSE_ALARM


def test_typical_acceptance_is_found_out(tables):
    assert chance(tables, Typical(), "eagle", 250) < FALSE_ALARM
