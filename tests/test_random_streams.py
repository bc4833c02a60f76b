"""The random numbers of sampling: SplitMix64's, uniform, independent, and those of the seed.

False alarms: each χ² test below fails right numbers with probability 1e-11 at most.
"""

import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch, sample_batch
from lessons.l02_naive_attention.random_streams import GOLDEN, mix64, streams_of, uniform
from lessons.l02_naive_attention.sampling import SamplingParams, sample

pytestmark = pytest.mark.usefixtures("seed")

FALSE_ALARM = 1e-11
MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The published finalizer on Python's integers, unsigned."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def number_of(seed: int, position: int) -> float:
    """The random number of a token by the definition, on Python's integers."""
    state = splitmix64(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return (splitmix64(state & MASK) >> 11) / 2**53


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


def test_the_number_of_a_token():
    """Both samplers draw with the seed's number at the place that the output's length says. Of 1024
    equally likely tokens it takes number floor(1024 u), without a rounding.
    """
    seeds = [0, 1, 2**63 - 1, *(random.randrange(2**63) for _ in range(197))]
    lengths = [index % 40 for index in range(200)]
    expected = [number_of(*pair) for pair in zip(seeds, lengths)]
    assert uniform(streams_of(seeds), torch.tensor(lengths)).tolist() == expected
    logits = torch.zeros(200, 1024)
    params = [SamplingParams(seed=seed) for seed in seeds]
    prompts, outputs = [[3, 5]] * 200, [[7] * length for length in lengths]
    tokens = [int(1024 * u) for u in expected]
    assert sample(logits, params, prompts, outputs) == tokens
    assert sample_batch(logits, SamplingBatch.of(params, prompts, outputs)).tolist() == tokens
