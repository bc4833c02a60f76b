"""Token trees in the engine: no tokens change, drawn siblings keep the distribution, and
heads guess what lesson 17 says.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l16_speculative_sampling.lab.chi_squared import (
    chance_of,
    chi_squared,
    sequences,
    tables_of,
)
from lessons.l16_speculative_sampling.lab.enumeration import largest_difference, random_table
from lessons.l17_tree_speculation import runner as tree_runner
from lessons.l17_tree_speculation.heads.drafts import HeadDrafter
from lessons.l17_tree_speculation.heads.heads import MedusaHeads, tapped_features
from lessons.l17_tree_speculation.lab.enumeration import emitted_together
from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.l17_tree_speculation.runner import with_trees
from lessons.l17_tree_speculation.trees import accept
from lessons.l17_tree_speculation.trees.tree import Tree, full_tree, ranks_of
from reference import SamplingParams
from reference.engine.request import EngineSequence
from reference.speculation import verification
from reference.speculation.protocol import Draft
from reference.speculation.speculative_config import ALIASES
from reference.speculation.verification import Verifier, rows_of
from tests.engine_cases import greedy, new_model, random_prompts, run
from tests.test_speculative_engine import EVERY_WISH, HOUSES, LONGEST, new_engine, wishes

pytestmark = pytest.mark.usefixtures("seed")
TREE = Tree((-1, 0, 0, 1, 1, 2, 4))
PROBABILISTIC = dict(draft_sample_method="probabilistic")


@pytest.fixture(scope="module")
def model():
    return new_model()


class NearTheTarget(HeadDrafter):
    """The target's own logits, computed anew for each node, and some noise: right now and then. It
    reads nothing of what the engine keeps.
    """

    depth = 3

    def __init__(self, target, choice):
        super().__init__(target, choice)
        self.behind = cache(self.behind)

    def level_logits(self, depth, level, trees, tokens):
        texts = [(*one.request.prompt, *one.request.output, *one.behind) for one in level]
        return torch.cat([self.behind(text) for text in texts])

    @torch.inference_mode()
    def behind(self, text):
        """[1, V], the same for the same text."""
        hidden = self.target(torch.tensor(text), whole_sequence(self.target, len(text)))
        logits = self.target.logits(hidden[-1:])
        return logits + 0.7 * logits.std() * torch.randn(logits.shape)


class SecondIsRight(NearTheTarget):
    """Among siblings the second is the target's own token, so that each path has to move; a single
    child is it, too.
    """

    def level_logits(self, depth, level, trees, tokens):
        logits = super().level_logits(depth, level, trees, tokens)
        for row, parent in enumerate(level):
            best, second = logits[row].topk(2).indices.tolist()
            if parent.count > 1:
                logits[row, [best, second]] = logits[row, [second, best]]
        return logits

    @torch.inference_mode()
    def behind(self, text):
        """[1, V], without noise."""
        hidden = self.target(torch.tensor(text), whole_sequence(self.target, len(text)))
        return self.target.logits(hidden[-1:])


def tree_engine(
    model, tree=TREE, method="medusa", heads=None, sample=None, guesses=NearTheTarget, **house
):
    """An engine whose trees are filled by `guesses`, or by `heads`."""
    config = dict(speculative_token_tree=str(ranks_of(tree))) | (sample or {})
    drafter = heads or MedusaHeads(model.config.hidden_size, 3).eval().requires_grad_(False)
    engine = new_engine(model, method, drafter, len(tree) - 1, config, **house)
    if heads is None:
        engine.speculation.proposer.drafter = guesses(
            model, engine.speculation.proposer.drafter.choice
        )
    return engine


def asked_for():
    """Prompts and wishes of all kinds."""
    prompts = [prompt[: LONGEST - 16] for prompt in random_prompts(len(EVERY_WISH), shared=9)]
    return prompts, [wishes(index) for index in range(len(prompts))]


ARRIVALS = [0, 0, 1, 2, 2, 4]


def room_for_trees(house, tree=TREE):
    least = 4 * len(tree)
    small = house.get("max_num_batched_tokens", least)
    return house | dict(max_num_batched_tokens=max(small, least))


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.sample(2)
def test_every_wish_is_served_as_without_speculation(model, house):
    """Greedy or sampled, in a small house or a large one: token for token."""
    prompts, params = asked_for()
    want = run(new_engine(model), prompts, params)
    engine = tree_engine(model, **room_for_trees(house))
    assert run(engine, prompts, params, ARRIVALS) == want
    assert engine.speculation.counts.accepted


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.sample(1)
def test_trees_over_a_cache_of_codes(model, kv_cache_dtype):
    prompts = random_prompts(3)
    params = [greedy(8)] * 3
    want = run(new_engine(model, kv_cache_dtype=kv_cache_dtype), prompts, params)
    engine = tree_engine(model, kv_cache_dtype=kv_cache_dtype)
    assert run(engine, prompts, params) == want and engine.speculation.counts.accepted


def test_greedy_requests_of_an_engine_that_draws_get_the_same_tokens(model):
    prompts = random_prompts(4)
    params = [greedy(9), wishes(2), greedy(7), wishes(4)]
    want = run(new_engine(model), prompts, params)
    got = run(tree_engine(model, sample=PROBABILISTIC), prompts, params)
    assert [got[at] for at in "02"] == [want[at] for at in "02"]


@pytest.mark.parametrize("kind", ["medusa", "eagle", "mtp"])
def test_seeds_give_drawn_trees_the_same_tokens_alone_and_in_any_batch(model, kind):
    """Where nothing spares the heads what they read: no prefix cache, no fork, no preemption."""
    heads, prompts = random_heads(model, kind), random_prompts(4)
    params = [replace(wishes(at), temperature=1.0, n=1) for at in range(4)]
    how = dict(method=kind, heads=heads, sample=PROBABILISTIC, enable_prefix_caching=False)
    want = {
        str(at): run(tree_engine(model, **how), [prompts[at]], [params[at]])["0"] for at in range(4)
    }
    assert run(tree_engine(model, **how), prompts, params, [0, 0, 1, 3]) == want


def test_a_tree_takes_no_more_room_than_its_answer(model):
    """The longest answer that fits ends at max_model_len; the pool has no block more."""
    house = dict(num_gpu_blocks_override=4, max_model_len=16, max_num_seqs=1)
    engine = tree_engine(model, **house)
    got = run(engine, [[1, 2, 3]], [SamplingParams(temperature=0, ignore_eos=True, max_tokens=99)])
    assert len(got["0"][0]) == 13


# ---------------------------------------------------------------- who guesses what


def medusa_guess(model, heads, text: list[int], behind: list[int]):
    """[V] after a text without its newest token: head i for the guess after i others."""
    hidden = model(torch.tensor(text[:-1]), whole_sequence(model, len(text) - 1))
    return (heads.lm_head or model.logits)(heads.heads[len(behind)](hidden[-1:]))[0]


def eagle_guess(model, heads, text: list[int], behind: list[int]):
    """[V]: the layer over the whole text of pairs, then over its own features."""
    tokens, attend = torch.tensor(text[:-1]), whole_sequence(model, len(text) - 1)
    features = heads.features(tapped_features(model, tokens, attend, heads.taps)[1])
    for end in range(len(behind) + 1):
        pairs = model.embed_tokens(torch.tensor([*text, *behind[:end]][1:]))
        attend = whole_sequence(model, len(pairs))
        made = heads(pairs, features, lambda q, k, v, attend=attend: attend(0, q, k, v))
        features = torch.cat([features, made[-1:]])
    return (heads.lm_head or model.logits)(heads.hidden(features[-1:]))[0]


GUESSES = dict(medusa=medusa_guess, eagle=eagle_guess, mtp=eagle_guess, eagle3=eagle_guess)


@pytest.mark.parametrize("kind", GUESSES)
@pytest.mark.parametrize("house", HOUSES[:3])
@pytest.mark.parametrize("guessed", [None, range(5, 25)], ids=["all tokens", "20 tokens"])
@pytest.mark.sample(5)
@torch.inference_mode()
def test_heads_guess_what_lesson_17_says(model, kind, guessed, house):
    """Every node of every step, over blocks that come and go, against whole texts."""
    heads, seen = random_heads(model, kind, guessed=guessed), 0
    method = ALIASES.get(kind, kind)
    # No prefix cache, because it may hand out the pair of another continuation.
    engine = tree_engine(model, method=method, heads=heads, enable_prefix_caching=False, **house)
    propose = engine.speculation.proposer.propose

    def watched(sequences, counts, tables):
        nonlocal seen
        drafts = propose(sequences, counts, tables)
        for sequence, draft in zip(sequences, drafts):
            text, tree = [*sequence.prompt, *sequence.output], draft.tree
            if tree is None:
                continue
            for node, children in enumerate(tree.children):
                if not children:
                    continue
                behind = [draft.tokens[n - 1] for n in tree.path_to(node)[1:]]
                best = GUESSES[kind](model, heads, text, behind).topk(len(children))
                found = [draft.tokens[child - 1] for child in children]
                assert found == best.indices.tolist()
                seen += len(found)
        return drafts

    engine.speculation.proposer.propose = watched
    prompts = random_prompts(3)
    got = run(engine, prompts, [greedy(9)] * 3, [0, 0, 1])
    assert seen and got == run(new_engine(model), prompts, [greedy(9)] * 3)


# ---------------------------------------------------------------- the distribution


def engines_rule(tree: Tree):
    """The engine's verifier for cells of lesson 17's enumeration."""

    def verified(p, q, filled, u):
        owner = EngineSequence(0, [0], 9, RowParams(seed=0), frozenset())
        count, size = len(filled), len(tree)
        drafts = [
            Draft(tokens[1:], rows.float(), tree) for tokens, rows in zip(filled, q.split(size))
        ]
        verifier, logits = Verifier(), p.log().float()
        patched = pytest.MonkeyPatch()
        purposes = {verification.ACCEPTS: 0, verification.DRAWS: 1}
        patched.setattr(
            verification, "node_numbers", lambda rows, purpose, _: u[:, purposes[purpose]].float()
        )
        with patched.context():
            rows = [row for draft in drafts for row in rows_of(owner, draft)]
            found = verifier.accept_in_trees(logits, rows, drafts)
        patched.undo()
        assert len(found) == count
        return [list(path) for _, path in found], [tokens[-1] for tokens, _ in found]

    return verified


@pytest.mark.parametrize("tree", [full_tree([3]), Tree((-1, 0, 0, 1)), Tree((-1, 0, 0, 2, 2))])
def test_the_distribution_by_enumeration(tree):
    """Every way to draw the siblings, every outcome of the engine's verifier: to 1e-12."""
    target, draft = (random_table(3, tree.depth, RowParams(), seed) for seed in (1, 2))
    steps = emitted_together(engines_rule(tree), target, draft, tree, 3)
    assert largest_difference(steps, target, tree.depth + 1) < 1e-12


def test_a_residual_that_is_not_updated_is_found(monkeypatch):
    """After a rejected sibling the next one is held against the same p."""
    monkeypatch.setattr(accept, "residual_rows", lambda p, q: p)
    target, draft = (random_table(3, 1, RowParams(), seed) for seed in (1, 2))
    steps = emitted_together(engines_rule(full_tree([3])), target, draft, full_tree([3]), 3)
    assert largest_difference(steps, target, 2) > 1e-3


def chance_of_outputs(model, total=900) -> float:
    """How likely a deviation as large as that of the engine's outputs is."""
    params = dict(temperature=1.0, top_k=4)
    prompt, length = [7, 8, 9, 7, 8], 3
    tables = tables_of(model, model, prompt, RowParams(**params), length)
    house = dict(max_num_seqs=50, num_gpu_blocks_override=400)
    tree = full_tree([2, 1])
    engine = tree_engine(model, tree, sample=PROBABILISTIC, **house)
    first, outputs = random.randrange(2**40), []
    # So many tokens are asked for, because the first comes before any tree, and then a whole one
    # fits.
    longest = len(tree) + 1
    for start in range(0, total, 50):
        wish = SamplingParams(
            **params,
            n=50,
            seed=first + start,
            max_tokens=longest,
            ignore_eos=True,
            detokenize=False,
        )
        outputs += run(engine, [prompt], [wish])["0"]
    assert 0 < engine.speculation.counts.accepted < engine.speculation.counts.drafted
    counts = sequences(tables, [output[:length] for output in outputs])
    return chance_of(*chi_squared(counts, tables.expected * total))


@pytest.mark.sample(1, of="distributions of trees")
def test_sampled_outputs_follow_the_targets_distribution(model):
    """False alarm: 1e-9."""
    assert chance_of_outputs(model) > 1e-9


@pytest.mark.sample(1, of="distributions of trees")
def test_outputs_without_a_residual_are_found(model, monkeypatch):
    monkeypatch.setattr(accept, "residual_rows", lambda p, q: p)
    assert chance_of_outputs(model) < 1e-9


# ---------------------------------------------------------------- planted slips


def siblings_see_each_other(batch, trees, pool):
    """A causal mask in the place of the tree's."""
    batch = with_trees(batch, trees)
    if batch.tree is not None:
        causal = torch.arange(batch.tree.shape[1])
        for tree, first in zip(trees, batch.cu_seqlens_q.tolist()):
            if tree is not None:
                rows = (causal[: len(tree), None] - causal + 1).clamp(min=0)
                batch.tree[first : first + len(tree)] = rows.to(torch.int8)
    return batch


def positions_by_order(batch, trees, pool):
    """Node i is i places after the root."""
    return replace(batch, tree=with_trees(batch, trees).tree)


@pytest.mark.parametrize("slip", [with_trees, siblings_see_each_other, positions_by_order])
def test_a_slip_of_the_pass_is_found(model, monkeypatch, slip):
    """And without a slip all is well, and every path has moved."""
    monkeypatch.setattr(tree_runner, "with_trees", slip)
    prompts = random_prompts(6)
    params = [replace(greedy(12), ignore_eos=True)] * 6
    want = run(new_engine(model), prompts, params)
    engine = tree_engine(model, Tree((-1, 0, 0, 2)), guesses=SecondIsRight)
    assert (run(engine, prompts, params) == want) is (slip is with_trees)
    assert engine.speculation.counts.tokens_per_pass > 2 or slip is not with_trees
