"""Suffix decoding in the engine: which answers its proposer keeps, for how long, what it reads, and
that later requests profit. That it changes no token is proved beside the other methods, in
tests/test_speculative_engine.py, test_speculative_histories.py and test_composition.py.
"""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from lessons.l16_speculative_sampling.more.suffixes import Limits
from reference import SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.speculation.suffix_proposer import SuffixProposer
from tests.engine_cases import LONGEST, new_model, random_prompts, run

GREEDY = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)


@pytest.fixture(autouse=True)
def same_prompts():
    """Because how many passes an answer takes depends on its text."""
    random.seed(7)


@pytest.fixture(scope="module")
def model():
    return new_model()


def new_engine(model, cached: int = 2, blocks: int = 60):
    config = dict(method="suffix", suffix_decoding_max_cached_requests=cached)
    small = dict(max_num_seqs=4, block_size=4, max_model_len=LONGEST)
    args = EngineArgs(num_gpu_blocks_override=blocks, speculative_config=config, **small)
    return engine_over(model, None, args, None)


def ask(engine, prompts, params=GREEDY) -> list[list[int]]:
    """The answers, all asked at once."""
    found = run(engine, prompts, [params] * len(prompts))
    return [found[str(at)][0] for at in range(len(prompts))]


def kept(engine) -> list[list[int]]:
    return [text.tokens for text in engine.speculation.proposer.cache.kept]


def check_memory(model) -> None:
    """Raises AssertionError if more is kept than the answers of the last two requests that ended
    by themselves.
    """
    engine, ended = new_engine(model), []
    for prompt in random_prompts(5):
        ended += ask(engine, [prompt[:20]])
        engine.add_request("half", prompt[:20], replace(GREEDY, max_tokens=40))
        while not engine.speculation.proposer.cache.own:
            engine.step()
        assert engine.abort_request("half").outputs[0].token_ids
        assert kept(engine) == ended[-2:]
        assert not engine.speculation.proposer.cache.own
    tree = engine.speculation.proposer.cache.answers
    assert 0 < tree.num_nodes <= 25 * sum(map(len, ended[-2:]))


def test_the_last_answers_are_kept_and_no_aborted_one(model):
    check_memory(model)


def keeps_the_aborted(self, sequence):
    self.cache.end(sequence.row, sequence.output)


def forgets_the_answers(self, sequence):
    self.cache.forget(sequence.row)


def never_forgets(self, sequence):
    """An own tree stays when its request has gone."""


@pytest.mark.parametrize("slip", [keeps_the_aborted, forgets_the_answers, never_forgets])
def test_a_planted_slip_is_found(model, slip):
    with patch.object(SuffixProposer, "forget", slip), pytest.raises(AssertionError):
        check_memory(model)


def test_an_answer_that_ended_before_its_request_was_aborted_is_kept_once(model):
    engine = new_engine(model, cached=9)
    stops = list(range(9))
    params = replace(GREEDY, n=3, max_tokens=40, seed=1, temperature=1.0, stop_token_ids=stops)
    engine.add_request("0", random_prompts(1)[0][:20], params)
    while not any(s.finished for s in engine.requests["0"].sequences):
        engine.step()
    done = [s.output for s in engine.requests["0"].sequences if s.finished and len(s.output) > 2]
    assert 1 <= len(done) < 3
    engine.abort_request("0")
    assert kept(engine) == done


def test_a_repeated_request_takes_fewer_passes(model):
    """With as many tokens; without a cache of answers it takes as many again."""
    prompts, taken = random_prompts(4), {}
    for cached in (0, 9):
        engine = new_engine(model, cached)
        want = ask(engine, prompts)
        before = engine.speculation.counts.passes
        assert ask(engine, prompts) == want
        taken[cached] = before, engine.speculation.counts.passes - before
        assert len(kept(engine)) == min(8, cached)
    assert taken[0][0] == taken[0][1] and taken[9][1] < 0.6 * taken[9][0]


def places_are_text(self, sequence, count):
    return self.cache.draft(sequence.row, sequence.all_tokens, count)


def check_what_is_read(model) -> None:
    """Prompt and answer so far, no place for a drafted token, also after a preemption. Raises
    AssertionError.
    """
    engine, prompts = new_engine(model, blocks=12), random_prompts(4, shared=9)
    cache, under_way = engine.speculation.proposer.cache, {}
    true_draft, read = cache.draft, []

    def draft(row, tokens, count):
        read.append(tokens == under_way[row].prompt + under_way[row].output)
        return true_draft(row, tokens, count)

    cache.draft = draft
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt[:20], GREEDY)
    under_way |= {s.row: s for request in engine.requests.values() for s in request.sequences}
    while engine.has_unfinished_requests:
        engine.step()
    assert read and all(read)
    assert any(s.preemptions for s in under_way.values())


def test_what_is_read(model):
    check_what_is_read(model)
    with (
        patch.object(SuffixProposer, "lookup", places_are_text),
        pytest.raises(AssertionError),
    ):
        check_what_is_read(model)


def test_the_longest_draft():
    assert SuffixProposer().most(None) == 12
    for depth in range(1, 40):
        for factor in (0, 0.3, 0.7, 1.0, 2.0, 3.3, 100.0):
            limits = Limits(max_tree_depth=depth, max_spec_factor=factor)
            longest = max(limits.room(matched) for matched in range(1 + depth))
            assert SuffixProposer(limits).most(None) == longest, limits
