"""Proves that greedy tokens are those of plain decoding, for any draft; that caches are rewound
and blocks given back; that a request ends where it should; and what is refused.
"""

import json
import random
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.lab.testing import MODELS, new_model, new_prompts
from lessons.l16_speculative_sampling import drafts, naive
from lessons.l16_speculative_sampling import generate as rung
from lessons.l16_speculative_sampling.drafts import load_pair, lookup
from lessons.l16_speculative_sampling.generate import Counts, generate
from lessons.l16_speculative_sampling.more.adaptive import AdaptiveCount
from lessons.l16_speculative_sampling.more.suffixes import SuffixDrafter
from lessons.l16_speculative_sampling.runner import RewindingRunner

ROOT = Path(__file__).resolve().parents[3]
LENGTHS, LIMITS = (3, 1, 12, 7, 5), [6, 11, 1, 0, 14]
MEMORIES = [
    dict(),
    dict(num_speculative_tokens=0),
    dict(num_speculative_tokens=1, block_size=1),
    dict(num_speculative_tokens=7, block_size=2, max_num_seqs=2),
    dict(num_speculative_tokens=AdaptiveCount(6, 0.1), block_size=3),
]


def noisy(model, share: float):
    """A draft that is the model with some noise in its weights: right often, but not always."""
    twin = new_model(model.dtype)
    for ours, theirs in zip(twin.parameters(), model.parameters()):
        ours.copy_(theirs + share * theirs.std() * torch.randn_like(theirs))
    return twin


def teller(seen):
    """An on_token that notes what it is told."""
    return lambda row, token: seen[row].append(token)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.sample(3)
def test_greedy_tokens_are_those_of_plain_decoding(kind, memory, seed):
    """In float64, where nothing ties. The draft: the target, a stranger, the request's own text,
    and earlier answers.
    """
    model, prompts = MODELS[kind](), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    for draft in (model, new_model(), None, SuffixDrafter()):
        seen = [[] for _ in prompts]
        got = generate(model, prompts, LIMITS, None, teller(seen), draft=draft, **memory)
        assert got == seen == expected


def test_some_sequences_go_further_than_others(seed):
    model, prompts = new_model(), new_prompts(5, 5, 5, 5, 5, 5)
    counts = Counts()
    got = generate(model, prompts, 20, draft=noisy(model, 0.1), counts=counts)
    assert got == one_at_a_time.generate(model, prompts, 20)
    assert 0 < counts.kept < counts.tested and counts.emitted == 6 * 20


def test_the_loop_of_the_paper(seed):
    model, prompts = new_model(), new_prompts(3, 6)
    expected = one_at_a_time.generate(model, prompts, 7)
    for draft in (model, new_model()):
        assert naive.generate(model, prompts, 7, draft=draft) == expected


def test_a_perfect_draft_is_always_kept(seed):
    """K + 1 tokens a step: 20 tokens in 4 steps of 5."""
    model, counts = new_model(), Counts()
    generate(model, new_prompts(4), 20, draft=model, counts=counts)
    assert counts.steps == 4 and counts.alpha == 1


@pytest.mark.parametrize("params", [dict(temperature=0), dict(temperature=0.8, top_p=0.9)])
def test_penalties_count_the_drafted_tokens_in_front(params, seed):
    """Greedy with penalties: the same tokens. Sampled: the naive loop's, from the same numbers."""
    model, draft, prompts = new_model(), new_model(), new_prompts(4, 2, 7)
    settings = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, seed=row, **params)
        for row in range(3)
    ]
    got = generate(model, prompts, 12, settings, draft=draft, num_speculative_tokens=3)
    if params["temperature"] == 0:
        assert got == one_at_a_time.generate(model, prompts, 12, settings)
    slow = naive.generate(model, prompts, 12, settings, draft=draft, num_speculative_tokens=3)
    assert got == slow


def test_a_seeded_request_gets_the_same_tokens_in_any_batch(seed):
    model, prompts = new_model(), new_prompts(4, 2, 7)
    draft = noisy(model, 0.1)
    settings = [SamplingParams(temperature=0.9, top_k=20, seed=row) for row in range(3)]
    together = generate(model, prompts, 15, settings, draft=draft)
    for row in range(3):
        assert generate(model, [prompts[row]], 15, settings[row], draft=draft) == [together[row]]


def test_an_answer_never_has_more_tokens_than_asked_for(seed):
    model, prompts = new_model(), new_prompts(4, 4, 4)
    for limit in range(1, 8):
        got = generate(model, prompts, limit, draft=model, num_speculative_tokens=5)
        assert [len(output) for output in got] == [limit] * 3


def test_a_stop_token_among_the_drafted_ends_the_answer(seed):
    model, (prompt,) = new_model(), new_prompts(4)
    plain = one_at_a_time.generate(model, [prompt], 12)[0]
    stop = SamplingParams(temperature=0, stop_token_ids=[plain[6]])
    told = []
    got = generate(model, [prompt], 12, stop, lambda _, t: told.append(t), draft=model)
    assert got == [told] == [plain[: plain.index(plain[6]) + 1]]


# ---------------------------------------------------------------- caches


def test_all_blocks_come_back(seed, monkeypatch):
    """Of the target's pool and of the draft's, which hold NaN where nothing was written."""
    runners = []

    def new_runner(self, model, pool):
        super(RewindingRunner, self).__init__(model, pool)
        for slots in (pool.k_slots, pool.v_slots):
            slots.fill_(torch.nan)
        runners.append(self)

    monkeypatch.setattr(RewindingRunner, "__init__", new_runner, raising=False)
    model, prompts = new_model(), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    got = generate(model, prompts, LIMITS, draft=noisy(model, 0.1), block_size=2)
    assert got == expected and len(runners) == 2
    for runner in runners:
        assert not runner.held and runner.blocks.num_free == runner.blocks.num_blocks


def test_rewinding_gives_back_only_what_is_not_needed(seed):
    runner = RewindingRunner.for_model(new_model(), 10, 4, 40)
    (prompt,) = new_prompts(6)
    runner.step({0: prompt})
    rows = runner.run_rows({0: [1, 2, 3, 4, 5]}, {0: 5})
    assert len(rows) == 5 and runner.held[0] == 11 and runner.blocks.num_free == 7
    runner.rewind(0, 8)
    assert runner.blocks.num_free == 8
    again = runner.run_rows({0: [3, 4, 5]}, {0: 3})
    torch.testing.assert_close(again, rows[2:])


def test_rewinding_a_fork_leaves_the_other_as_it_is(seed):
    model, (prompt,) = new_model(), new_prompts(6)
    runner = RewindingRunner.for_model(model, 10, 4, 40)
    runner.step({0: prompt})
    runner.fork(0, 1)
    runner.run_rows({1: [1, 2, 3, 4]}, {1: 4})
    runner.rewind(1, 5)
    runner.run_rows({1: [9, 9]}, {1: 1})
    logits = runner.step({0: [7]})
    fresh = RewindingRunner.for_model(model, 10, 4, 40)
    torch.testing.assert_close(logits, fresh.step({0: [*prompt, 7]}))


class GivesBackTooMuch(RewindingRunner):
    """One token of the last block is needed still."""

    def rewind(self, sequence, tokens):
        super().rewind(sequence, tokens - 1)
        self.held[sequence] = tokens


def test_a_wrong_rewind_is_found(seed, monkeypatch):
    model, prompts = new_model(), new_prompts(5, 8)
    expected = one_at_a_time.generate(model, prompts, 20)
    monkeypatch.setattr(rung, "RewindingRunner", GivesBackTooMuch)
    assert generate(model, prompts, 20, draft=noisy(model, 0.1), block_size=1) != expected


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize(
    "text, count, found",
    [
        ("abcXabc", 3, "Xab"),
        ("abXcbXab", 2, "Xc"),  # "ab" stood at the begin
        ("aXbaYba", 1, "Y"),  # the newest place counts
        ("abcd", 4, ""),
        ("aa", 4, "a"),
        ("a", 4, ""),
        ("abab", 0, ""),
    ],
)
def test_lookup(text, count, found):
    assert lookup([ord(c) for c in text], count) == [ord(c) for c in found]


def test_adaptive_counts_follow_the_acceptance(seed):
    """A perfect draft is asked for much, a stranger for little."""
    model, prompts = new_model(), new_prompts(4, 4)
    drafted = {}
    for name, draft in (("itself", model), ("a stranger", new_model())):
        counts = Counts()
        choice = AdaptiveCount(6, cost_ratio=0.3)
        generate(model, prompts, 40, draft=draft, num_speculative_tokens=choice, counts=counts)
        drafted[name] = counts.drafted / counts.steps
        assert not choice.seen, "another call begins anew"
    assert drafted["itself"] > 3 * drafted["a stranger"]


def test_the_embedded_pair_in_float32():
    """Real weights, real prompts, both drafters."""
    if not (ROOT / "models/tiny/model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    model, draft, tokenizer = load_pair(str(ROOT / "models/tiny"), str(ROOT / "models/tiny-draft"))
    requests = json.loads((ROOT / "models/prompts.json").read_text())[:4]
    prompts = [tokenizer(request["prompt"])["input_ids"][:60] for request in requests]
    limits, counts = [12, 9, 16, 1], Counts()
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits, draft=draft, counts=counts) == expected
    assert counts.alpha > 0.2
    assert generate(model, prompts, limits) == expected


# ---------------------------------------------------------------- refusals


def test_what_is_refused(seed, monkeypatch):
    model, prompts = new_model(), new_prompts(3)
    with pytest.raises(ValueError, match="draft: got a model of 54 tokens; accepted: the target's"):
        generate(model, prompts, 3, draft=new_model(vocab_size=54))
    with pytest.raises(ValueError, match="draft: got 'models/tiny'; accepted: None, a decoder, or"):
        generate(model, prompts, 3, draft="models/tiny")
    with pytest.raises(ValueError, match="num_speculative_tokens: got -1"):
        generate(model, prompts, 3, num_speculative_tokens=-1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, prompts, -1)
    assert generate(model, prompts, 0) == [[]]

    class Tokenizer:
        def __init__(self, last):
            self.last = last

        def get_vocab(self):
            return {"a": 0, self.last: 1}

    monkeypatch.setattr(drafts, "load_tokenizer", lambda name: Tokenizer(name[-1]))
    with pytest.raises(ValueError, match=r"differs from the target.s in 2 entries"):
        load_pair("one/b", "two/c")


def test_logits_that_are_not_finite_are_refused(seed):
    model = new_model()
    model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        generate(model, new_prompts(3), 3)


def test_many_random_loads(seed, request):
    model = new_model()
    draft = noisy(model, 0.1)
    for _ in range(100 if request.config.getoption("--all") else 6):
        count = random.randint(1, 6)
        prompts = new_prompts(*(random.randint(1, 12) for _ in range(count)))
        limits = [random.randint(0, 12) for _ in prompts]
        options = dict(
            num_speculative_tokens=random.randint(0, 6),
            max_num_seqs=random.randint(1, 4),
            block_size=random.randint(1, 6),
            draft=random.choice([None, draft]),
        )
        expected = one_at_a_time.generate(model, prompts, limits)
        assert generate(model, prompts, limits, **options) == expected


def test_a_repeated_request_is_drafted_from_its_first_answer(seed):
    model, prompts = new_model(), new_prompts(5, 9)
    drafter, passes = SuffixDrafter(), []
    expected = generate(model, prompts, 30)
    for _ in range(2):
        counts = Counts()
        options = dict(draft=drafter, num_speculative_tokens=12, counts=counts)
        assert generate(model, prompts, 30, **options) == expected
        passes.append(counts.steps)
    assert not drafter.cache.own and len(drafter.cache.kept) == 4
    assert passes[1] < passes[0] / 2
