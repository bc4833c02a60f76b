"""Sampling: exact distributions against a plain reference and transformers' processors, unbiased
draws, rows that stay apart.
"""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lessons.l02_naive_attention import sampling
from lessons.l02_naive_attention.random_streams import streams_of, uniform
from lessons.l02_naive_attention.sampling import (
    GREEDY,
    SamplingParams,
    draw,
    keep_top_p,
    probabilities,
    sample,
)

VOCAB = 23


pytestmark = pytest.mark.usefixtures("seed")


def random_params(**fixed) -> SamplingParams:
    choices = dict(
        temperature=[0.3, 0.8, 1.0, 1.7],
        top_k=[-1, 0, 1, 3, 10, VOCAB, 1000],
        top_p=[1.0, 0.95, 0.6, 0.05],
        min_p=[0.0, 0.02, 0.3, 1.0],
        repetition_penalty=[1.0, 1.3, 0.7],
        presence_penalty=[0.0, 0.9, -0.5],
        frequency_penalty=[0.0, 0.4, -0.2],
    )
    return SamplingParams(
        **{name: random.choice(values) for name, values in choices.items()} | fixed
    )


def random_row() -> tuple[torch.Tensor, list[int], list[int]]:
    """logits [V] without ties, a prompt, an output with repetitions."""
    return (
        3 * torch.randn(VOCAB),
        random.choices(range(VOCAB), k=6),
        random.choices(range(VOCAB), k=random.randrange(9)),
    )


def reference(logits, params, prompt, output) -> list[float]:
    """The definition in plain Python, token by token."""
    x = [float(value) for value in logits]
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = (
                x[token] / params.repetition_penalty
                if x[token] > 0
                else x[token] * params.repetition_penalty
            )
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    if params.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    p = [math.exp((value - max(x)) / params.temperature) for value in x]
    p = [value if value >= params.min_p * max(p) else 0.0 for value in p]
    if params.top_k > 0:
        threshold = sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]
        p = [value if value >= threshold else 0.0 for value in p]
    total, mass, kept = math.fsum(p), 0.0, set()
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        if params.top_p == 1 or mass < params.top_p * total:
            kept.add(token)
        mass += p[token]
    total = math.fsum(p[token] for token in kept)
    return [p[token] / total if token in kept else 0.0 for token in range(len(p))]


# ---------------------------------------------------------------- the exact distribution


def worst_difference(function, rows=150) -> float:
    """Largest difference to `reference` over random rows and parameters."""
    worst = 0.0
    for _ in range(rows):
        (logits, prompt, output), params = random_row(), random_params()
        expected = torch.tensor(reference(logits, params, prompt, output), dtype=torch.float64)
        worst = max(worst, float((function(logits, params, prompt, output) - expected).abs().max()))
    return worst


def test_equals_the_definition():
    assert worst_difference(probabilities) < 1e-12


@pytest.mark.parametrize(
    "name",
    [
        "repetition counts the prompt",
        "frequency is not presence",
        "negative logits are multiplied",
        "output only",
        "top-p keeps the token that reaches p",
        "min-p is relative",
        "temperature first",
    ],
)
def test_wrong_answer_is_rejected(name, monkeypatch):
    penalize, top_p = sampling.penalize, keep_top_p

    def wrong(logits, params, prompt, output):
        fields = {field: getattr(params, field) for field in params.__dataclass_fields__}
        if name == "repetition counts the prompt":
            return probabilities(logits, params, [], output)
        if name == "frequency is not presence":
            return probabilities(logits, params, prompt, sorted(set(output)))
        if name == "negative logits are multiplied":
            # all logits positive: the division then reaches every seen token
            shift = float(logits.abs().max()) + 9
            return probabilities(logits + shift, params, prompt, output)
        if name == "output only":
            return probabilities(logits, params, prompt, prompt + output)
        if name == "min-p is relative":
            p = probabilities(
                logits, SamplingParams(**fields | dict(min_p=0, top_k=0, top_p=1)), prompt, output
            )
            kept = logits.double().masked_fill(p < min(params.min_p, 0.5 * p.max()), -math.inf)
            return probabilities(kept, params, prompt, output)
        if name == "temperature first":
            monkeypatch.setattr(
                sampling,
                "penalize",
                lambda x, p, *rest: penalize(x / p.temperature, p, *rest) * p.temperature,
            )
        if name == "top-p keeps the token that reaches p":
            monkeypatch.setattr(
                sampling, "keep_top_p", lambda p, bound: top_p(p, max(bound - float(p.max()), 1e-9))
            )
        return probabilities(logits, params, prompt, output)

    assert worst_difference(wrong, rows=600) > 1e-6


def test_equals_transformers_processors():
    """In this module's order, repetition, temperature, min-p, top-k, top-p; float64, so that no cut
    falls on a rounding.
    """
    for _ in range(150):
        (logits, prompt, output), params = (
            random_row(),
            random_params(presence_penalty=0.0, frequency_penalty=0.0),
        )
        ids, scores = torch.tensor([prompt + output]), logits[None].double()
        processors = [
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            TemperatureLogitsWarper(params.temperature),
            MinPLogitsWarper(params.min_p),
            TopPLogitsWarper(params.top_p),
        ]
        if params.top_k > 0:
            processors.insert(3, TopKLogitsWarper(params.top_k))
        for processor in processors:
            scores = processor(ids, scores)
        torch.testing.assert_close(
            probabilities(logits, params, prompt, output), scores[0].softmax(-1), atol=1e-12, rtol=0
        )


def test_min_p_comes_before_top_p():
    """p = .5 .3 .1 .1 with min_p .3 and top_p .6: of what min-p leaves (.5 .3) the first alone has
    .625 of the mass.
    """
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64).log()
    assert probabilities(logits, SamplingParams(min_p=0.3, top_p=0.6), [], []).tolist() == [
        1,
        0,
        0,
        0,
    ]


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    for _ in range(100):
        p, bound = torch.rand(VOCAB, dtype=torch.float64).softmax(0), random.uniform(0.01, 0.9)
        kept = p[keep_top_p(p, bound) > 0]
        assert kept.sum() >= bound > kept.sum() - kept.min()
        assert kept.min() >= p[keep_top_p(p, bound) == 0].max()


def test_ties():
    """top-k keeps every token that ties with the k-th; top-p and greedy take the smallest ids."""
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert (probabilities(logits, SamplingParams(top_k=2), [], []) > 0).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert (probabilities(logits, SamplingParams(top_p=0.4), [], []) > 0).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert probabilities(logits, GREEDY, [], []).tolist() == [0, 1, 0, 0, 0]
    assert sample(logits[None], [GREEDY], [[]], [[]]) == [1]


def test_extreme_values():
    logits = torch.tensor([-math.inf, 1e4, 1e4 - 1, -1e4, -math.inf])
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1e300),
        random_params(),
    ):
        p = probabilities(logits, params, [0, 1], [1, 2])
        assert p.isfinite().all() and abs(p.sum() - 1) < 1e-12 and p[0] == p[4] == 0
    assert probabilities(logits, SamplingParams(temperature=1e-300), [], []).tolist() == [
        0,
        1,
        0,
        0,
        0,
    ]
    for dtype in (torch.float16, torch.bfloat16):
        assert (
            probabilities(torch.randn(VOCAB).to(dtype), random_params(), [1], [2]).dtype
            == torch.float64
        )


# ---------------------------------------------------------------- draws


def p_value(tokens: list[int], p: torch.Tensor) -> float:
    """χ² test of draws against p; cells with fewer than 10 expected draws are pooled."""
    counts, expected = Counter(tokens), (p * len(tokens)).tolist()
    assert all(p[token] > 0 for token in counts), "a token of probability zero was drawn"
    cells = [(counts[token], value) for token, value in enumerate(expected) if value >= 10]
    rest = [(counts[token], value) for token, value in enumerate(expected) if 0 < value < 10]
    cells += [tuple(map(sum, zip(*rest)))] if sum(value for _, value in rest) >= 10 else []
    statistic = sum((seen - value) ** 2 / value for seen, value in cells)
    return float(stats.chi2.sf(statistic, max(len(cells) - 1, 1)))


FALSE_ALARM = 1e-10  # per test; ten seeds below share it (Bonferroni)


def many_numbers() -> torch.Tensor:
    """The first 200,000 random numbers of a fresh seed."""
    return uniform(streams_of([random.randrange(2**40)]), torch.arange(200_000))


def test_draws_follow_the_distribution():
    for _ in range(10):
        logits, prompt, output = random_row()
        p = probabilities(logits, random_params(top_k=0, top_p=0.95, min_p=0.0), prompt, output)
        tokens = draw(p, many_numbers()).tolist()
        assert p_value(tokens, p) > FALSE_ALARM / 10


@pytest.mark.parametrize(
    "bias", [lambda p: p**0.95, lambda p: p + 0.03 * p.max(), lambda p: p.roll(1)]
)
def test_the_test_rejects_a_biased_sampler(bias):
    p = torch.randn(VOCAB, dtype=torch.float64).softmax(0)
    tokens = draw(bias(p), many_numbers()).tolist()
    assert p_value(tokens, p) < FALSE_ALARM


def test_sample_follows_the_distribution():
    """The whole of `sample`, twice 3000 rows in one batch with two kinds of parameters."""
    kinds = [(random_params(top_k=0, min_p=0.0, top_p=top_p), random_row()) for top_p in (1.0, 0.7)]
    rows = [kinds[index % 2] for index in range(6000)]
    tokens = sample(
        torch.stack([row[0] for _, row in rows]),
        [params.seeded() for params, _ in rows],
        [row[1] for _, row in rows],
        [row[2] for _, row in rows],
    )
    for kind, (params, (logits, prompt, output)) in enumerate(kinds):
        assert p_value(tokens[kind::2], probabilities(logits, params, prompt, output)) > FALSE_ALARM


def test_never_a_token_of_probability_zero():
    # the largest and the smallest number that `uniform` gives
    numbers = torch.tensor([1 - 2**-53, 0.0], dtype=torch.float64)
    for p in itertools.product([0.0, 0.1, 0.2, 0.7, 1 / 3], repeat=4):
        p = torch.tensor(p, dtype=torch.float64)
        if p.sum() > 0:
            last, first = draw(p, numbers).tolist()
            assert first == p.nonzero().min() and last == p.nonzero().max()


# ---------------------------------------------------------------- batches and seeds


def make_batch(size: int):
    rows = [random_row() for _ in range(size)]
    params = [
        random_params(seed=random.randrange(2**62), temperature=random.choice([0, 0, 0.7, 1.5]))
        for _ in rows
    ]
    return (
        torch.stack([row[0] for row in rows]),
        params,
        [row[1] for row in rows],
        [row[2] for row in rows],
    )


def sampled(logits, params, prompts, outputs) -> list[int]:
    return sample(logits, [p.seeded() for p in params], prompts, outputs)


def test_a_row_does_not_depend_on_the_batch():
    logits, params, prompts, outputs = make_batch(24)
    together = sampled(logits, params, prompts, outputs)
    alone = [
        sampled(logits[i : i + 1], params[i : i + 1], prompts[i : i + 1], outputs[i : i + 1])[0]
        for i in range(24)
    ]
    order = random.sample(range(24), 24)
    shuffled = sampled(logits[order], *([x[i] for i in order] for x in (params, prompts, outputs)))
    assert together == alone and shuffled == [together[i] for i in order]


def test_top_k_is_not_the_union_over_rows():
    """Each row allows one token; a mask shared by the batch would allow all of them to every
    row.
    """
    logits = 0.01 * torch.randn(VOCAB, VOCAB)
    logits[range(VOCAB), range(VOCAB)] += 0.1
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)):
        assert sampled(logits, [params] * VOCAB, [[]] * VOCAB, [[]] * VOCAB) == list(range(VOCAB))


def test_seeds():
    """A seed stays; without one, each request gets a fresh one from PyTorch's global generator."""
    params = SamplingParams(seed=random.randrange(2**62))
    assert params.seeded() is params
    torch.manual_seed(5)
    fresh = [SamplingParams(top_k=3).seeded() for _ in range(3)]
    assert len({p.seed for p in fresh}) == 3 and {p.top_k for p in fresh} == {3}
    torch.manual_seed(5)
    assert SamplingParams(top_k=3).seeded() == fresh[0]


def test_a_row_that_is_drawn_needs_a_seed():
    """Greedy rows need none, with penalties or without."""
    logits, greedy = torch.zeros(3, VOCAB), SamplingParams(temperature=0, presence_penalty=1.0)
    params = [SamplingParams(seed=1), GREEDY, greedy]
    assert sample(logits, params, [[]] * 3, [[], [], [0]])[1:] == [0, 1]
    params[2] = SamplingParams()
    with pytest.raises(ValueError, match="seed: got None; accepted: an integer"):
        sample(logits, params, [[]] * 3, [[]] * 3)


def test_greedy_uses_penalties_and_ignores_the_rest():
    logits = torch.tensor([[3.0, 2.9, -1.0]])
    assert sampled(
        logits, [SamplingParams(temperature=0, top_k=2, top_p=0.5, min_p=0.1)], [[]], [[]]
    ) == [0]
    assert sampled(
        logits, [SamplingParams(temperature=0, repetition_penalty=1.2)], [[0]], [[]]
    ) == [1]
    # output only
    assert sampled(logits, [SamplingParams(temperature=0, presence_penalty=0.2)], [[0]], [[]]) == [
        0
    ]
    assert sampled(logits, [SamplingParams(temperature=0, presence_penalty=0.2)], [[]], [[0]]) == [
        1
    ]


def test_sampling_leaves_its_inputs_alone():
    logits, params, prompts, outputs = make_batch(8)
    before = logits.clone(), [list(x) for x in prompts], [list(x) for x in outputs]
    sampled(logits, params, prompts, outputs)
    assert torch.equal(logits, before[0]) and (prompts, outputs) == before[1:]


# ---------------------------------------------------------------- bad input


NUMBERS = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop_token_ids", (3, -1)),
        ("stop_token_ids", ["a"]),
        # what is no number, or only passes as one
        *[(field, "1") for field in NUMBERS],
        *[(field, None) for field in NUMBERS],
        *[(field, True) for field in NUMBERS],
        *[(field, 10**400) for field in NUMBERS],
        ("seed", "1"),
        ("seed", True),
        ("stop_token_ids", 5),
        ("stop_token_ids", 0),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [2.0]),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        # penalties that would carry a logit out of its range
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", math.inf),
    ],
)
def test_bad_parameters(field, value):
    with pytest.raises(ValueError, match=f"^{field}: got .*; accepted: ") as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("logits", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_that_are_no_distribution(logits):
    with pytest.raises(ValueError, match="logits: the largest of row 1 is"):
        sampled(torch.tensor([[0.0, 1.0], logits]), [GREEDY, SamplingParams()], [[], []], [[], []])


def test_stop_tokens_may_be_a_list_and_params_are_hashable():
    assert SamplingParams(stop_token_ids=[3, 4]) == SamplingParams(stop_token_ids=(3, 4))
    for tokens in ({3}, frozenset([3]), [3], (3,)):
        assert SamplingParams(stop_token_ids=tokens).stop_token_ids == (3,)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert len({SamplingParams(), SamplingParams(), GREEDY}) == 2
