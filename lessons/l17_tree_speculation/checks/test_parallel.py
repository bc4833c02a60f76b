"""Parallel drafting: one pass of the draft says what K passes over masks would, masks leave nothing
in its cache, and the output is the target's, whatever is drafted.
"""

from functools import partial

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.lab.testing import MODELS, new_model, new_prompts
from lessons.l16_speculative_sampling import naive
from lessons.l16_speculative_sampling.drafts import ModelDrafter, distributions
from lessons.l16_speculative_sampling.generate import Counts, generate
from lessons.l16_speculative_sampling.lab.chi_squared import (
    chance_of,
    chi_squared,
    sequences,
    tables_of,
)
from lessons.l16_speculative_sampling.lab.enumeration import (
    emitted,
    largest_difference,
    random_table,
)
from lessons.l17_tree_speculation.heads.parallel import (
    MaskDrafter,
    load_parallel,
    place_logits,
    read_mask_token,
)
from lessons.l17_tree_speculation.lab import parallel_counts
from lessons.l17_tree_speculation.lab.experiments import WAYS
from lessons.l17_tree_speculation.lab.workload import MODELS as FOLDERS
from lessons.l17_tree_speculation.lab.workload import embedded_pair, is_there
from lessons.toolbox.model.config_json import CheckpointError

MASK = 3  # of the small models; a text may well have it, and nothing goes wrong
FALSE_ALARM = 1e-10
PENALTIES = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.3, seed=0)


def drafter_over(draft, kind=MaskDrafter, **mask):
    """A drafter over a pool that holds NaN where nothing was written."""
    drafter = kind(draft, 40, 2, 60, **(mask or dict(mask_token=MASK)))
    for slots in drafter.runner.pool.tensors:
        slots.fill_(torch.nan)
    return drafter


def largest_error(draft, kind=MaskDrafter) -> float:
    """Between what is drafted from with a cache and without one, over a few steps in which none,
    some or all guesses stay. In float64.
    """
    drafter, worst = drafter_over(draft, kind), 0.0
    requests = read_requests(draft.config, new_prompts(3, 1, 8), 40, PENALTIES)
    for counts, kept in (([3, 4, 1], (0, 4, 1)), ([5, 2, 0], (2, 0, 0)), ([2, 2, 2], (2, 1, 0))):
        drafts = drafter.propose(requests, counts)
        row = 0
        for request, tokens, count in zip(requests, drafts.tokens, counts):
            assert len(tokens) == count
            if count:
                logits = place_logits(draft, request.tokens, count, MASK)
                ahead = [tokens[:seen] for seen in range(count)]
                want = distributions(logits, [request] * count, ahead)
                found = drafts.q[row : row + count]
                worst = max(worst, float((found - want).abs().nan_to_num(1).max()))
            row += count + 1
        for request, tokens, stay in zip(requests, drafts.tokens, kept):
            request.output += [*tokens[:stay], 7]  # and the target's own token
    return worst


def test_one_pass_over_a_cache_says_what_a_pass_over_the_whole_text_says(seed):
    assert largest_error(new_model()) < 1e-6


class KeepsMasks(MaskDrafter):
    """K and V of masks are taken for those of the tokens that came in their places."""

    def propose(self, requests, counts):
        rewind, self.runner.rewind = self.runner.rewind, lambda row, tokens: None
        drafts = super().propose(requests, counts)
        self.runner.rewind = rewind
        return drafts


class AMaskTooMany(MaskDrafter):
    """The newest token predicts nothing: a mask is in front of the first guess, too."""

    def lacking(self, request, drafted):
        return [*super().lacking(request, drafted), self.mask_token]


class OneForAll(MaskDrafter):
    """All places are filled from the newest token's logits."""

    def next_logits(self, requests, drafted):
        return super().next_logits(requests, [[] for _ in drafted])


@pytest.mark.parametrize("slip", [KeepsMasks, AMaskTooMany, OneForAll])
def test_slips_of_the_masks_are_found(slip, seed):
    assert largest_error(new_model(), slip) > 1e-3


def test_a_step_is_one_pass_of_the_draft(seed, monkeypatch):
    """A chain takes as many as it has guesses."""
    passes = {}
    for kind, mask in ((MaskDrafter, dict(mask_token=MASK)), (ModelDrafter, {})):
        drafter = kind(new_model(), 40, 4, 60, **mask)
        run = drafter.runner.run
        passes[kind] = 0

        def counting(new, kind=kind, run=run):
            passes[kind] += 1
            return run(new)

        monkeypatch.setattr(drafter.runner, "run", counting)
        requests = read_requests(drafter.runner.model.config, new_prompts(3, 5), 20, None)
        drafter.propose(requests, [5, 3])
    assert passes == {MaskDrafter: 1, ModelDrafter: 5}


# ---------------------------------------------------------------- the output is the target's


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("count, block_size", [(1, 1), (4, 3), (7, 16)])
@pytest.mark.sample(3)
def test_greedy_tokens_are_those_of_plain_decoding(kind, count, block_size, seed):
    """In float64, where nothing ties."""
    model, prompts, limits = MODELS[kind](), new_prompts(3, 1, 12, 7, 5), [6, 11, 1, 0, 14]
    expected = one_at_a_time.generate(model, prompts, limits)
    for draft in (model, new_model()):
        how = dict(num_speculative_tokens=count, block_size=block_size, max_num_seqs=2)
        how["new_drafter"] = partial(MaskDrafter, mask_token=MASK)
        assert generate(model, prompts, limits, draft=draft, **how) == expected


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("way", [SamplingParams(), SamplingParams(top_k=2)], ids=["all", "top-k"])
def test_the_distribution_is_the_targets(way, count):
    """Enumerated to 1e-12: a draft that says the same of a place whatever was guessed before it."""
    target, draft = (random_table(3, count, way, seed) for seed in (1, 2))
    at_place = {prefix: draft[(0,) * len(prefix)] for prefix in draft}
    steps = emitted(naive.verify, target, at_place, 3, count)
    assert abs(sum(steps.values()) - 1) < 1e-12
    assert largest_difference(steps, target, count + 1) < 1e-12


def test_a_row_of_another_place_is_found():
    """If q is not what a token was drawn from, the distribution is another one."""
    target, draft = (random_table(3, 2, SamplingParams(), seed) for seed in (1, 2))
    at_place = {prefix: draft[(0,) * len(prefix)] for prefix in draft}

    def shifted(p, q, drafted, u, cu_rows):
        q = q.view(-1, 3, 3)
        wrong = torch.stack([q[:, 0], q[:, 0], q[:, 2]], 1).flatten(0, 1)  # row 0 twice
        return naive.verify(p, wrong, drafted, u, cu_rows)

    steps = emitted(shifted, target, at_place, 3, 2)
    assert largest_difference(steps, target, 3) > 1e-9


# ---------------------------------------------------------------- the embedded draft


@pytest.fixture(scope="module")
def embedded():
    if not is_there("pard"):
        pytest.skip("NOT RUN: models/tiny-pard is not there")
    target, _, tokenizer = embedded_pair()
    return target, load_parallel(FOLDERS / "tiny-pard"), tokenizer


def test_the_rung_on_the_embedded_model(embedded, seed, request):
    """Three tokens each of many requests: chi-squared against the target alone."""
    target, draft, tokenizer = embedded
    count = 20_000 if request.config.getoption("--all") else 500
    params = SamplingParams(temperature=0.8, top_k=4)
    prompt = tokenizer("def read")["input_ids"]
    tables = tables_of(target, draft.model, prompt, params, 3)
    options = dict(draft=draft.model, new_drafter=draft.drafter, num_speculative_tokens=2)
    counts = Counts()
    options |= dict(max_num_seqs=250, counts=counts)
    found = sequences(tables, generate(target, [prompt] * count, 3, params, **options))
    statistic, freedom = chi_squared(found, tables.expected * count)
    assert chance_of(statistic, freedom) > FALSE_ALARM
    assert counts.kept > count / 4, "a trained draft is right now and then"


def test_no_text_has_the_mask(embedded):
    """Byte 255 is in no text of UTF-8. And a draft that meets it nevertheless changes nothing."""
    target, draft, tokenizer = embedded
    assert tokenizer.convert_ids_to_tokens(draft.mask_token) == "ÿ"
    texts = ["".join(map(chr, range(1, 2000))), "🙂 ÿ þ"]
    assert draft.mask_token not in {token for text in texts for token in tokenizer(text).input_ids}
    prompt = [draft.mask_token, 300, draft.mask_token]
    expected = one_at_a_time.generate(target, [prompt], 8)
    how = dict(draft=draft.model, new_drafter=draft.drafter)
    assert generate(target, [prompt], 8, **how) == expected


def test_a_model_without_a_mask_is_refused():
    if not is_there("pard"):
        pytest.skip("NOT RUN: the embedded models are not there")
    with pytest.raises(
        CheckpointError, match=r"tiny-draft: got pard_token None.*accepted"
    ) as error:
        load_parallel(FOLDERS / "tiny-draft")
    assert "\n" not in str(error.value)
    assert read_mask_token(FOLDERS / "tiny-pard") == 188


@pytest.mark.parametrize("name", ["chain", "parallel"])
def test_the_counted_tokens(name, embedded, request):
    """To the last digits with --all; else with four of the prompts, near it."""
    draft = embedded[1]
    found = parallel_counts.recorded()["ways"]["greedy"][name]["4"]
    how = (embedded_pair()[1], ModelDrafter) if name == "chain" else (draft.model, draft.drafter)
    prompts = parallel_counts.PROMPTS if request.config.getoption("--all") else 4
    counted = parallel_counts.counted_model(*how, 4, WAYS["greedy"], prompts)
    assert sum(one.tokens for one in counted) == prompts * parallel_counts.NEW_TOKENS
    tokens = parallel_counts.tokens_a_pass(counted)
    # Another machine may round a tie the other way.
    near = 0.1 if prompts == parallel_counts.PROMPTS else 0.9
    assert tokens == pytest.approx(found["tokens_a_pass"]["mean"], abs=near)
    passes = sum(one.draft for one in counted) / sum(one.target for one in counted)
    # The last passes of an answer have room for fewer guesses, or for none.
    assert passes == pytest.approx(1 if name == "parallel" else 4, abs=0.5)


def test_an_interval_holds_the_mean_and_narrows_with_prompts():
    rows = [parallel_counts.Counted(32, passes, passes) for passes in (8, 16, 20, 11)]
    few, many = (parallel_counts.summary(rows * times)["tokens_a_pass"] for times in (1, 16))
    assert few["mean"] == many["mean"] == pytest.approx(4 * 32 / 55)
    assert few["low"] < many["low"] < many["mean"] < many["high"] < few["high"]
    same = parallel_counts.gap(rows, rows)
    assert same == dict(mean=0, low=0, high=0), "over the same prompts"


def test_the_even_cost_is_where_both_take_the_same_time():
    chain, parallel = ([parallel_counts.Counted(120, *passes)] for passes in ((40, 160), (60, 60)))
    even = parallel_counts.even_cost(chain, parallel)
    assert even == pytest.approx(0.2)
    assert 40 + 160 * even == pytest.approx(60 + 60 * even)
