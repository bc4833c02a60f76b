"""Proves that one path of a tree stays in the cache, in one piece, and that all blocks come
back.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l03_kv_cache.batch import new_batch
from lessons.l12_paged_kv.lab.testing import DEVICE, new_model, new_prompts
from lessons.l17_tree_speculation import generate as rung
from lessons.l17_tree_speculation import runner as running
from lessons.l17_tree_speculation.generate import Counts, generate
from lessons.l17_tree_speculation.heads.heads import KINDS
from lessons.l17_tree_speculation.lab.testing import BRANCHES, Oracle, random_heads
from lessons.l17_tree_speculation.optimized import LESSON_17
from lessons.l17_tree_speculation.runner import TreeRunner, with_trees
from lessons.l17_tree_speculation.stand_ins import LESSON_17_TORCH
from lessons.l17_tree_speculation.trees.tree import Tree, chain, full_tree

LENGTHS, LIMITS = (3, 1, 12, 7, 5), [6, 11, 1, 0, 14]
TREE = full_tree([3, 2, 1])


def test_a_kept_path_lies_in_one_piece(seed):
    """After a tree of which one path stays, the next step computes what it would without a tree."""
    model, (text,) = new_model(), new_prompts(6)
    tokens = [text[-1], 5, 6, 7, 8, 9]
    for path in ([0], [0, 2], [0, 2, 5], [0, 1, 4]):
        runner = TreeRunner.for_trees(model, 40, 2, 40)
        runner.run_trees({0: text[:-1]}, {})
        runner.run_trees({0: tokens}, {0: BRANCHES})
        runner.keep(0, 5, path)
        kept = [tokens[node] for node in path]
        assert runner.held[0] == 5 + len(path)
        assert len(runner.blocks.tables[0]) == -(-runner.held[0] // 2)
        got = runner.step({0: [3]})
        fresh = TreeRunner.for_trees(model, 40, 2, 40)
        torch.testing.assert_close(got, fresh.step({0: [*text[:-1], *kept, 3]}))


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_come_back(kind, seed, monkeypatch):
    """Of the target's pool and of EAGLE's, which hold NaN where nothing was written."""
    runners = []

    def new_runner(self, model, pool):
        super(TreeRunner, self).__init__(model, pool)
        for slots in (pool.k_slots, pool.v_slots):
            slots.fill_(torch.nan)
        runners.append(self)

    monkeypatch.setattr(TreeRunner, "__init__", new_runner, raising=False)
    model, prompts = new_model(), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    heads = random_heads(model, kind)
    assert generate(model, prompts, LIMITS, heads=heads, tree=TREE, block_size=2) == expected
    assert len(runners) == (1 if kind == "medusa" else 2)
    for runner in runners:
        assert not runner.held and runner.blocks.num_free == runner.blocks.num_blocks


def test_slips_of_the_cache_are_found(seed, monkeypatch):
    """Positions by order, a path that is not moved, and siblings that see each other."""
    monkeypatch.setattr(rung.Ranked, "children", second_best_children)
    cases = [slip_case() for _ in range(4)]  # because one model may say the same in spite of a slip
    for model, prompt, answer, options in cases:
        counts = Counts()
        assert generate(model, [prompt], 20, counts=counts, **options) == [answer]
        assert counts.kept > 4

    def by_order(batch, trees, pool):
        made = with_trees(batch, trees)
        # Not beyond the deepest node's, because the table of rotations ends with the longest
        # answer.
        deepest = int(made.positions.max())
        return replace(made, positions=batch.positions.clamp(max=deepest))

    def seen_by_all(batch, trees, pool):
        made = with_trees(batch, trees)
        return replace(made, tree=None)

    for name, slip in (
        ("with_trees", by_order),
        ("with_trees", seen_by_all),
        ("compact", lambda *_: None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(running, name, slip)
            assert any(
                generate(model, [prompt], 20, **options) != [answer]
                for model, prompt, answer, options in cases
            ), name


def slip_case():
    """A model, a prompt, its 20 tokens, and how to guess them: the right guess is never the first,
    so that it has to move.
    """
    model, (prompt,) = new_model(), new_prompts(6)
    (answer,) = one_at_a_time.generate(model, [prompt], 24)
    heads = Oracle(model, [*prompt, *answer], 2)
    return model, prompt, answer[:20], dict(heads=heads, tree=Tree((-1, 0, 0, 2, 2)))


def second_best_children(self, logits, parents):
    """Ranked, but with the two likeliest tokens exchanged."""
    best = logits.topk(2, dim=-1).indices.flip(-1).tolist()
    return [tokens[: parent.count] for parent, tokens in zip(parents, best)]


# New tokens of each sequence, or its tree; how many are taken apart from what follows.
STEPS = {
    "trees in front": ([BRANCHES, 1, chain(2), 7, 1], 3),
    "a prompt in front": ([7, BRANCHES, 1], 0),
    "a tree behind a prompt": ([BRANCHES, 5, BRANCHES], 0),
    "no prompt": ([1, BRANCHES, BRANCHES], 0),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("window", [None, 3])
def test_trees_and_prompts_in_one_step(name, window, seed):
    """The kernels, each over its part, against PyTorch over all; pages that nobody owns hold
    NaN.
    """
    kinds, in_front = STEPS[name]
    counts = [kind if isinstance(kind, int) else len(kind) for kind in kinds]
    held = [random.randint(0, 6) for _ in kinds]
    pages = random.sample(range(40), 40)
    tables = [[pages.pop() for _ in range(-(-(n + h) // 4))] for n, h in zip(counts, held)]
    chunks = [([0] * count, before) for count, before in zip(counts, held)]
    trees = [None if isinstance(kind, int) else kind for kind in kinds]
    batch = with_trees(new_batch(chunks, 4, DEVICE, tables), trees)
    assert (batch.num_decodes, batch.num_decode_tokens) == (in_front, sum(counts[:in_front]))
    q = torch.randn(sum(counts), 4, 16, device=DEVICE)
    caches = [torch.full((40, 4, 2, 16), torch.nan, device=DEVICE) for _ in range(2)]
    for cache in caches:
        for table in tables:
            cache[table] = torch.randn(len(table), 4, 2, 16, device=DEVICE)
    got = LESSON_17.prefill(q, *caches, batch, 0.25, window)
    want = LESSON_17_TORCH.prefill(q, *caches, batch, 0.25, window)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
