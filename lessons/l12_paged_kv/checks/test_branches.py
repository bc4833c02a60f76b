"""Proves that branches answer as sequences of their own, and how little they copy."""

import itertools

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv import runner
from lessons.l12_paged_kv.lab.testing import MODELS, new_model, new_prompts
from lessons.l12_paged_kv.more import branches
from lessons.l12_paged_kv.more.branches import Beam, beam_search, parallel_sample, search, survivors
from lessons.l12_paged_kv.runner import PagedRunner


def logprobs(model, tokens):
    """log p of every token after each: [len(tokens), V]."""
    logits = model.logits(model(torch.tensor(tokens), whole_sequence(model, len(tokens))))
    return logits.double().log_softmax(-1)


def score(model, prompt, answer):
    """The sum of an answer's log probabilities, from one pass over all of it."""
    rows = logprobs(model, prompt + answer)[len(prompt) - 1 : -1]
    return float(rows[torch.arange(len(answer)), torch.tensor(answer)].sum())


def by_recomputing(model, prompt, width, steps):
    """Beam search without a cache: every beam is computed from its first token at every step."""
    beams = [Beam(0.0, [])]
    for _ in range(steps):
        found = []
        for beam in beams:
            row = logprobs(model, prompt + beam.tokens)[-1]
            found += [Beam(beam.logprob + float(p), [*beam.tokens, t]) for t, p in enumerate(row)]
        beams = sorted(found, key=lambda beam: -beam.logprob)[:width]
    return beams


def same_beams(got, want):
    assert [beam.tokens for beam in got] == [beam.tokens for beam in want]
    for mine, right in zip(got, want):
        assert mine.logprob == pytest.approx(right.logprob, abs=1e-6)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.sample(3)
def test_beam_search_is_the_search_without_a_cache(kind, block_size, seed):
    model = MODELS[kind]()
    for length in (1, 4, 7):
        (prompt,) = new_prompts(length)
        for width in (1, 3, 60):
            got = beam_search(model, prompt, width, 4, block_size)
            same_beams(got, by_recomputing(model, prompt, width, 4))


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_a_beam_wide_enough_finds_the_likeliest_of_all(block_size, seed):
    """Five tokens, three steps: 25 beams forget nobody, so all 125 answers are compared."""
    model = new_model(vocab_size=5)
    prompt = [1, 4, 2]
    answers = [list(answer) for answer in itertools.product(range(5), repeat=3)]
    want = sorted((Beam(score(model, prompt, a), a) for a in answers), reverse=True)[:25]
    same_beams(beam_search(model, prompt, 25, 3, block_size), want)


def test_one_beam_is_greedy(seed):
    model, prompts = new_model(), new_prompts(6)
    (beam,) = beam_search(model, prompts[0], 1, 7)
    assert [beam.tokens] == one_at_a_time.generate(model, prompts, 7)


def test_blocks_are_shared_and_all_come_back(seed):
    """A prompt of 40 blocks and 4 beams: the pool holds 40 blocks and a few, not 160."""
    model, (prompt,) = new_model(max_position_embeddings=128), new_prompts(80)
    paged = PagedRunner.for_model(model, 56, 2, 90)
    beams = search(paged, prompt, 4, 6)
    same_beams(beams, by_recomputing(model, prompt, 4, 6))
    assert paged.blocks.num_free == 56 and not paged.held
    assert paged.copied_blocks <= 4 * 6


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_parallel_samples_are_those_of_requests_alone(kind, block_size, seed):
    model, prompts = MODELS[kind](), new_prompts(7)
    sampling = [SamplingParams(temperature=1.0, seed=n) for n in range(4)]
    expected = one_at_a_time.generate(model, prompts * 4, 9, sampling)
    paged = PagedRunner.for_model(model, 64, block_size, 16)
    assert parallel_sample(paged, prompts[0], sampling, 9) == expected
    assert paged.blocks.num_free == 64
    # Three of four copy the prompt's last block, if it was not full.
    assert paged.copied_blocks == (3 if 7 % block_size else 0)


def test_survivors_by_hand():
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]).log()
    beams = [Beam(-1.0, [7]), Beam(-1.5, [8])]
    parents, found = survivors(beams, logits, 3)
    assert parents == [0, 1, 0] and [b.tokens for b in found] == [[7, 0], [8, 2], [7, 1]]
    assert found[0].logprob == pytest.approx(-1.5108, abs=1e-4)


# ---------------------------------------------------------------- wrong versions


def test_a_fork_that_never_copies_is_found(seed, monkeypatch):
    model, prompts = new_model(), new_prompts(7)
    sampling = [SamplingParams(temperature=1.0, seed=n) for n in range(4)]
    expected = one_at_a_time.generate(model, prompts * 4, 9, sampling)
    monkeypatch.setattr(runner, "copy_blocks", lambda pool, copies: None)
    paged = PagedRunner.for_model(model, 64, 4, 16)
    assert parallel_sample(paged, prompts[0], sampling, 9) != expected


def best_of_each(beams, logits, width):
    """survivors that keeps the best heir of each beam, so a good beam has one heir only."""
    total = torch.tensor([b.logprob for b in beams])[:, None] + logits.double().log_softmax(-1)
    if len(beams) == 1:
        return survivors(beams, logits, width)
    best = total.max(-1)
    found = [Beam(float(p), [*b.tokens, int(t)]) for b, p, t in zip(beams, *best)]
    return list(range(len(beams))), found


def forgets_the_past(beams, logits, width):
    """survivors by the newest token alone."""
    return survivors([Beam(0.0, beam.tokens) for beam in beams], logits, width)


def mixes_up_parents(beams, logits, width):
    parents, found = survivors(beams, logits, width)
    return parents[::-1], found


@pytest.mark.parametrize("wrong", [best_of_each, forgets_the_past, mixes_up_parents])
def test_a_wrong_beam_search_is_found(wrong, seed, monkeypatch):
    model, (prompt,) = new_model(), new_prompts(5)
    want = by_recomputing(model, prompt, 4, 6)
    monkeypatch.setattr(branches, "survivors", wrong)
    got = beam_search(model, prompt, 4, 6, 2)
    different = [b.tokens for b in got] != [b.tokens for b in want]
    assert different or any(abs(a.logprob - b.logprob) > 1e-6 for a, b in zip(got, want))


def test_bad_input_is_one_line(seed):
    message = "prompt, width, steps: got 2 tokens, 0 and 3; accepted: 1 or more"
    with pytest.raises(ValueError, match=message) as error:
        beam_search(new_model(), [1, 2], 0, 3)
    assert "\n" not in str(error.value)
