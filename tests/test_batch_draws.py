"""The draws of the batched sampler: the tokens of sampling.sample for the same seeds, and unbiased.

False alarms: each χ² test below fails a right sampler with probability 1e-11 at most, and there are
fewer than fifty of them, so all together below 1e-9.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lessons.l02_naive_attention import sampling
from lessons.l02_naive_attention.batched import batch_sampling
from lessons.l02_naive_attention.batched.batch_math import BLOCK, draw_tokens
from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    batch_probabilities,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.batched.fused import sample_fused
from lessons.l02_naive_attention.random_streams import mix64, uniform
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities, sample
from lessons.toolbox.measure.device import default_device, has_gpu
from tests.batch_sampling_cases import KINDS, Case
from tests.test_sampling import p_value

pytestmark = pytest.mark.usefixtures("seed")

FALSE_ALARM = 1e-11
DRAWS = 200_000


# ---------------------------------------------------------------- the tokens of `sample`


def unlike(case: Case, dtype: torch.dtype) -> int:
    """How many rows get another token in the batch than from sampling.sample."""
    logits = case.logits.to(dtype)
    expected = sample(logits, case.params, case.prompts, case.outputs)
    got = read_tokens(sample_batch(logits, case.batch()))
    return sum(a != b for a, b in zip(got, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_token_of_one_row_alone(kind):
    """Whatever is cut and penalized: in float64 both samplers always take the same token."""
    for vocab in (1, 7, 257, 3000):
        assert unlike(Case(66, vocab, kind), torch.float64) == 0


@pytest.mark.parametrize("wrong_module", [sampling, batch_sampling])
@pytest.mark.parametrize(
    "wrong_place", [lambda drawn: drawn * 0, lambda drawn: drawn + 1, lambda drawn: drawn // 2]
)
def test_a_wrong_place_in_the_stream_is_found(wrong_module, wrong_place, monkeypatch):
    """A place that does not advance, is one too far, or is used twice, in one of the samplers."""
    monkeypatch.setattr(
        wrong_module, "uniform", lambda stream, drawn: uniform(stream, wrong_place(drawn))
    )
    assert unlike(Case(200, 257, temperature=1.0, top_k=0, top_p=1.0), torch.float64) > 0


def numbers_apart(p: Tensor, q: Tensor) -> Tensor:
    """The share of [0, 1) whose numbers draw different tokens from p and from q: [B, V] -> [B].

    A token owns an interval as long as its probability. Counted is what two intervals do not share.
    """
    p, q = p / p.sum(dim=1, keepdim=True), q / q.sum(dim=1, keepdim=True)
    p_end, q_end = p.cumsum(dim=1), q.cumsum(dim=1)
    shared = torch.minimum(p_end, q_end) - torch.maximum(p_end - p, q_end - q)
    return 1 - shared.clamp(min=0).sum(dim=1)


def test_in_float32_few_tokens_differ():
    """The batch computes in float32 then, and a number near the border of two tokens may take the
    other one: about one in a million at 3000 tokens, five in a million at 131072.

    Fixed seeds, and bounds a hundred times as wide: of these 1000 rows none differs.
    """
    torch.manual_seed(1)
    random.seed(1)
    for kind in KINDS:
        case = Case(250, 3000, kind)
        assert unlike(case, torch.float32) <= 2
        case.logits = case.logits.float()
        got = batch_probabilities(case.logits, case.batch()).double()
        assert numbers_apart(got, case.expected()).mean() < 1e-4


# ---------------------------------------------------------------- from a number to a token


def test_each_token_has_its_interval():
    """The middle of a token's share of [0, 1) draws it, even if it is a billionth of the
    largest.
    """
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
@pytest.mark.sample(1)
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
@pytest.mark.sample(1)
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


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.sample(1)
def test_a_million_draws_of_the_kernels(parameters, request):
    """On a GPU; in the interpreter, where a draw takes 0.1 s, 400 in the long form."""
    if not has_gpu() and not request.config.getoption("--all"):
        pytest.skip("NOT RUN: needs a CUDA device, or the long form")
    count, device = 1_000_000 if has_gpu() else 400, default_device()
    params = SamplingParams(**parameters, seed=random.randrange(2**40))
    case = Case(1, 23)
    batch = SamplingBatch.of([params], case.prompts, case.outputs, device, room=1)
    batch = batch.select([0] * count)
    batch = replace(batch, drawn=torch.arange(count, device=device))
    logits = case.logits.float().to(device).expand(count, -1)
    p = probabilities(case.logits[0].float(), params, case.prompts[0], case.outputs[0])
    tokens = sample_fused(logits, batch, part=16)
    assert p_value(tokens.tolist(), p) > FALSE_ALARM
