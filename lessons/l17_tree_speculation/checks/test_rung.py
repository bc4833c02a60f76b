"""Proves that tokens are those of plain decoding, whatever the heads and the tree; that a request
ends where it should; and what is refused.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.lab.testing import CONFIG, new_deepseek, new_model, new_prompts
from lessons.l17_tree_speculation import naive
from lessons.l17_tree_speculation.generate import Counts, generate
from lessons.l17_tree_speculation.heads.heads import KINDS
from lessons.l17_tree_speculation.lab.testing import BRANCHES, TREES, perfect, random_heads
from lessons.l17_tree_speculation.runner import TreeRunner
from lessons.l17_tree_speculation.trees.accept import FromDraft, Typical
from lessons.l17_tree_speculation.trees.tree import Tree, chain, full_tree

LENGTHS, LIMITS = (3, 1, 12, 7, 5), [6, 11, 1, 0, 14]
TREE = full_tree([3, 2, 1])


def sampled(rows: int) -> list[SamplingParams]:
    """Settings that use everything, a seed for each row."""
    return [
        SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.3, seed=row)
        for row in range(rows)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.sample(2)
def test_tokens_are_those_of_plain_decoding(kind, way, seed):
    """In float64, where nothing ties. Sampled tokens too, because each place has its own number."""
    model, prompts = new_model(), new_prompts(*LENGTHS)
    settings = None if way == "greedy" else sampled(len(prompts))
    expected = one_at_a_time.generate(model, prompts, LIMITS, settings)
    heads = random_heads(model, kind)
    for memory in (dict(), dict(max_num_seqs=2, block_size=3), dict(block_size=1)):
        seen = [[] for _ in prompts]
        got = generate(
            model,
            prompts,
            LIMITS,
            settings,
            lambda row, token, seen=seen: seen[row].append(token),
            heads=heads,
            tree=TREE,
            **memory,
        )
        assert got == seen == expected


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_with_drawn_siblings(kind, seed):
    model, prompts = new_model(), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    heads = random_heads(model, kind)
    got = generate(model, prompts, LIMITS, heads=heads, tree=TREE, rule=FromDraft())
    assert got == expected


def test_a_seeded_request_gets_the_same_tokens_in_any_batch(seed):
    """Also with drawn siblings, whose random numbers are those of the node."""
    model, prompts, settings = new_model(), new_prompts(4, 2, 7), sampled(3)
    heads = random_heads(model, "eagle")
    options = dict(heads=heads, tree=TREE, rule=FromDraft())
    together = generate(model, prompts, 12, settings, **options)
    for row in range(3):
        assert generate(model, [prompts[row]], 12, settings[row], **options) == [together[row]]


def test_the_naive_loop(seed):
    model, prompts, settings = new_model(), new_prompts(3, 6), sampled(2)
    for params in (None, settings):
        expected = one_at_a_time.generate(model, prompts, 7, params)
        for draft in (model, new_model()):
            assert naive.generate(model, prompts, 7, params, draft=draft, tree=BRANCHES) == expected


def test_one_pass_gives_the_logits_of_every_path(seed):
    """The runner's tree against naive.path_logits: positions by depth, slots by order."""
    model, (text,) = new_model(), new_prompts(6)
    for tree in TREES.values():
        tokens = [text[-1], *random.choices(range(CONFIG.vocab_size), k=len(tree) - 1)]
        runner = TreeRunner.for_trees(model, 40, 2, 40)
        runner.run_trees({0: text[:-1]}, {})
        run = runner.run_trees({0: tokens}, {0: tree})
        want = naive.path_logits(model, text[:-1], tree, tokens)
        torch.testing.assert_close(model.logits(run.hidden), want)


def test_a_window_counts_along_the_path(seed):
    config = replace(CONFIG, sliding_windows=(4,) * CONFIG.num_hidden_layers)
    model = Decoder(config).double().eval().requires_grad_(False)
    (text,) = new_prompts(9)
    tokens = [text[-1], *random.choices(range(config.vocab_size), k=len(TREE) - 1)]
    runner = TreeRunner.for_trees(model, 40, 4, 40)
    runner.run_trees({0: text[:-1]}, {})
    run = runner.run_trees({0: tokens}, {0: TREE})
    want = naive.path_logits(model, text[:-1], TREE, tokens)
    torch.testing.assert_close(model.logits(run.hidden), want)


def test_right_guesses_are_kept(seed):
    """13 tokens: one from the prompt's pass, then 4 of each of 3 passes."""
    model, (prompt,) = new_model(), new_prompts(4)
    heads, answer = perfect(model, prompt, 13)
    counts = Counts()
    assert generate(model, [prompt], 13, heads=heads, tree=TREE, counts=counts) == [answer]
    assert counts.passes == 3 and counts.tokens_a_pass == 4
    assert counts.acceptance(3, 2) == [[1.0, 0.0], [1.0, 0.0], [1.0]]


@pytest.mark.parametrize("rule", [None, Typical()])
def test_an_answer_never_has_more_tokens_than_asked_for(rule, seed):
    model, (prompt,) = new_model(), new_prompts(4)
    heads, answer = perfect(model, prompt, 9)
    for limit in range(1, 10):
        got = generate(model, [prompt], limit, heads=heads, tree=TREE, rule=rule)
        assert len(got[0]) == limit and (rule or got == [answer[:limit]])


def test_a_stop_token_inside_an_accepted_path_ends_the_answer(seed):
    model, (prompt,) = new_model(), new_prompts(4)
    heads, answer = perfect(model, prompt, 12)
    for place in range(12):
        stop = SamplingParams(temperature=0, stop_token_ids=[answer[place]])
        told = []
        got = generate(
            model,
            [prompt],
            12,
            stop,
            lambda _, t, told=told: told.append(t),
            heads=heads,
            tree=TREE,
        )
        assert got == [told] == [answer[: answer.index(answer[place]) + 1]]


# ---------------------------------------------------------------- refusals


def test_what_is_refused(seed):
    model, prompts = new_model(), new_prompts(3)
    heads = random_heads(model, "medusa", depth=2)
    with pytest.raises(ValueError, match="tree: got one of depth 3; accepted: at most 2"):
        generate(model, prompts, 3, heads=heads, tree=TREE)
    with pytest.raises(ValueError, match="tree: got"):
        generate(model, prompts, 3, heads=heads, tree=[-1, 0])
    with pytest.raises(ValueError, match="rule: got"):
        generate(model, prompts, 3, heads=heads, tree=chain(1), rule="typical")
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, prompts, -1, heads=heads, tree=chain(1))
    with pytest.raises(ValueError, match="epsilon"):
        Typical(epsilon=0)
    deepseek = new_deepseek()
    with pytest.raises(ValueError, match="model: got a deepseek_v2; accepted: one without latents"):
        generate(deepseek, prompts, 3, heads=heads, tree=chain(1))
    with pytest.raises(ValueError, match="trees: got one of 3 nodes for 2 new tokens"):
        TreeRunner.for_trees(model, 4, 4, 9).run_trees({0: [1, 2]}, {0: chain(2)})
    assert generate(model, prompts, 0, heads=heads, tree=chain(1)) == [[]]


def test_logits_that_are_not_finite_are_refused(seed):
    model = new_model()
    heads = random_heads(model, "medusa")
    model.lm_head.weight.fill_(torch.nan)
    for rule in (None, FromDraft(), Typical()):
        with pytest.raises(ValueError, match="finite"):
            generate(model, new_prompts(3), 3, heads=heads, tree=TREE, rule=rule)


def test_many_random_loads(seed, request):
    model = new_model()
    heads = [random_heads(model, kind) for kind in KINDS]
    heads += [random_heads(model, kind, guessed=list(range(9))) for kind in KINDS]
    for _ in range(60 if request.config.getoption("--all") else 6):
        count = random.randint(1, 6)
        prompts = new_prompts(*(random.randint(1, 12) for _ in range(count)))
        limits = [random.randint(0, 12) for _ in prompts]
        settings = random.choice([None, sampled(count)])
        nodes = random.randint(1, 12)
        tree = Tree((-1, *(random.randrange(node) for node in range(1, nodes)))).cut(3)
        options = dict(
            max_num_seqs=random.randint(1, 4),
            block_size=random.randint(1, 6),
            heads=random.choice(heads),
            tree=tree,
        )
        expected = one_at_a_time.generate(model, prompts, limits, settings)
        assert generate(model, prompts, limits, settings, **options) == expected
