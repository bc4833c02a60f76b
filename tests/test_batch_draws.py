"""The batched sampler's random numbers and draws: uniform, independent, and mapped to tokens as
sampling.draw maps them.

False alarms: each χ² test below fails a right sampler with probability 1e-11 at most, and there are
fewer than fifty of them, so all together below 1e-9.
"""

import random
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from lessons.l02_naive_attention import batch_sampling, sampling
from lessons.l02_naive_attention.batch_math import (
    BLOCK,
    GOLDEN,
    draw_tokens,
    mix64,
    uniform,
)
from lessons.l02_naive_attention.batch_sampling import SamplingBatch, sample_batch
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from tests.batch_sampling_cases import KINDS, Case
from tests.test_sampling import p_value

pytestmark = pytest.mark.usefixtures("seed")

FALSE_ALARM = 1e-11
DRAWS = 200_000
MASK = 2**64 - 1


# ---------------------------------------------------------------- random numbers


def splitmix64(state: int) -> int:
    """The published finalizer on Python's integers, unsigned."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_mix64_is_splitmix64():
    """The first outputs of SplitMix64 for seed 1234567, and random states, as unsigned numbers."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = 1234567 + torch.arange(1, 4) * GOLDEN
    assert [x & MASK for x in mix64(states).tolist()] == published
    states = [random.randrange(2**64) for _ in range(1000)]
    signed = torch.tensor([x - 2**64 if x >= 2**63 else x for x in states])
    assert [x & MASK for x in mix64(signed).tolist()] == [splitmix64(x) for x in states]


def numbers(kind: str) -> Tensor:
    """2^18 random numbers: of one seed, of neighbouring seeds, or of seeds a golden step apart."""
    counter = torch.arange(2**18)
    start = random.randrange(2**40)
    if kind == "one stream":
        return uniform(mix64(torch.tensor(start)), counter)
    step = GOLDEN if kind == "seeds a golden step apart" else 1
    return uniform(mix64(start + counter * step), torch.full_like(counter, 5))


@pytest.mark.parametrize("kind", ["one stream", "neighbours", "seeds a golden step apart"])
def test_numbers_are_uniform_and_independent(kind):
    u = numbers(kind)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert len(u.unique()) == len(u)
    # single numbers, their lowest bits, and pairs of neighbours
    expect_uniform((u * 1024).long(), 1024)
    expect_uniform((u * 2**53).long() % 1024, 1024)
    expect_uniform((u[:-1] * 64).long() * 64 + (u[1:] * 64).long(), 4096)


def expect_uniform(cells: Tensor, count: int) -> None:
    expected = len(cells) / count
    seen = torch.bincount(cells, minlength=count).double()
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, count - 1) > FALSE_ALARM


def test_streams_do_not_overlap():
    """Without mix64 the stream of seed s + GOLDEN would be that of s, one number later."""
    position = torch.arange(100)
    streams = [uniform(mix64(torch.tensor(seed)), position) for seed in (7, 7 + GOLDEN, 8, 0)]
    assert len(torch.cat(streams).unique()) == 400
    shifted = [uniform(torch.tensor(seed), position) for seed in (7, 7 + GOLDEN)]
    assert torch.equal(shifted[0][1:], shifted[1][:-1])


# ---------------------------------------------------------------- from a number to a token


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_draws_the_same_token_as_one_row_alone(kind, monkeypatch):
    """Whatever is cut and penalized: given the same u, sampling.draw takes the same token."""
    for vocab in (1, 7, 257, 3000):
        case = Case(33, vocab, kind)
        batch = case.batch()
        u = uniform(batch.stream, batch.drawn)
        tokens = sample_batch(case.logits, batch).tolist()
        for row, (token, number) in enumerate(zip(tokens, u)):
            monkeypatch.setattr(torch, "rand", lambda *_, number=number, **__: number.view(1))
            expected = sampling.draw(case.expected()[row], None)
            monkeypatch.undo()
            assert token == int(expected)


def test_each_token_has_its_interval():
    """The middle of a token's share of [0, 1) draws it, even if it is a billionth of the largest."""
    p = (torch.rand(4096) + 0.1) * 10.0 ** -torch.randint(0, 10, (4096,))
    p[torch.rand(4096) < 0.1] = 0
    reached = p.double().cumsum(0)
    middles = (reached - p.double() / 2) / reached[-1]
    rows = p.view(1, -1, BLOCK).expand(4096, -1, -1)
    tokens = draw_tokens(rows, middles)
    expected = torch.arange(4096)
    assert torch.equal(tokens[p > 0], expected[p > 0])


def test_never_a_token_of_probability_zero():
    numbers = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    for _ in range(200):
        p = (torch.rand(3 * BLOCK) + 0.1) * (torch.rand(3 * BLOCK) < random.choice([0.01, 0.5]))
        p[: BLOCK * random.randrange(3)] = 0
        p[random.randrange(3 * BLOCK)] = 1
        tokens = draw_tokens(p.view(1, 3, BLOCK).expand(4, -1, -1), numbers)
        support = p.nonzero().squeeze(1)
        assert (p[tokens] > 0).all()
        assert tokens[0] == support[0] and tokens[-1] == support[-1]


# ---------------------------------------------------------------- many draws


def many_draws(params: SamplingParams, case: Case, kind: str) -> list[int]:
    """DRAWS tokens of the case's one row: along one stream, or the first of as many seeds."""
    logits, prompt, output = case.logits.float(), case.prompts, case.outputs
    batch = SamplingBatch.of([params], prompt, output, room=1).select([0] * DRAWS)
    counter = torch.arange(DRAWS)
    if kind == "one stream":
        batch = replace(batch, drawn=counter)
    else:
        batch = replace(batch, stream=mix64(params.seed + counter))
    return sample_batch(logits.expand(DRAWS, -1), batch).tolist()


PARAMETERS = [
    dict(),
    dict(top_p=0.7013, temperature=1.3),
    dict(top_k=7),
    dict(min_p=0.0513, top_k=12, top_p=0.9117, repetition_penalty=1.3, frequency_penalty=0.3),
]


@pytest.mark.parametrize("kind", ["one stream", "many seeds"])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_draws_follow_the_distribution(parameters, kind):
    params = SamplingParams(**parameters, seed=random.randrange(2**40))
    case = Case(1, 23)
    p = probabilities(case.logits[0].float(), params, case.prompts[0], case.outputs[0])
    assert p_value(many_draws(params, case, kind), p) > FALSE_ALARM


def biased(p: Tensor, u: Tensor) -> Tensor:
    return draw_tokens(p, u**1.05)


def one_id_further(p: Tensor, u: Tensor) -> Tensor:
    return (draw_tokens(p, u) + 1) % 23


def never_the_end(p: Tensor, u: Tensor) -> Tensor:
    return draw_tokens(p, u * 0.97)


@pytest.mark.parametrize("mistake", [biased, one_id_further, never_the_end])
def test_a_biased_draw_is_found(mistake, monkeypatch):
    params = SamplingParams(seed=random.randrange(2**40))
    case = Case(1, 23)
    p = probabilities(case.logits[0].float(), params, case.prompts[0], case.outputs[0])
    monkeypatch.setattr(batch_sampling, "draw_tokens", mistake)
    try:
        found = p_value(many_draws(params, case, "one stream"), p) < FALSE_ALARM
    except AssertionError:  # a token of probability zero
        found = True
    assert found


def test_a_number_used_twice_is_found(monkeypatch):
    """A position that does not advance gives each request one token for ever."""
    params = SamplingParams(seed=random.randrange(2**40))
    case = Case(1, 23)
    p = probabilities(case.logits[0].float(), params, case.prompts[0], case.outputs[0])
    monkeypatch.setattr(batch_sampling, "uniform", lambda s, drawn: uniform(s, drawn * 0))
    assert p_value(many_draws(params, case, "one stream"), p) < FALSE_ALARM
