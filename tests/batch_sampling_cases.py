"""Rows, parameters and reference answers for the tests of the batched sampler."""

import random

import torch
from torch import Tensor

from lessons.l02_naive_attention import sampling
from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch, batch_probabilities
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities

# No top_p is a quotient of small numbers: a row of ties would reach it exactly, or miss it by the
# last bit of a sum.
CHOICES = dict(
    temperature=[0, 0.31, 0.8, 1.0, 1.7],
    top_k=[-1, 0, 1, 3, 10, 256, 257, 400, 10**6],
    top_p=[1.0, 0.9513, 0.6107, 0.0523, 1e-9, 1 - 1e-9],
    min_p=[0.0, 0.0213, 0.3127, 1.0],
    repetition_penalty=[1.0, 1.3, 0.7],
    presence_penalty=[0.0, 0.9, -0.5],
    frequency_penalty=[0.0, 0.4, -0.2],
)


# "ties": few distinct logits; "holes": -inf among them; "flat": as of an untrained model
KINDS = ["normal", "ties", "holes", "flat"]


def random_params(**fixed) -> SamplingParams:
    """Every field off in half of all rows, so that all mixes occur."""
    off = SamplingParams()
    drawn = {
        name: random.choice([getattr(off, name), random.choice(values)])
        for name, values in CHOICES.items()
    }
    return SamplingParams(**drawn | fixed)


def random_tokens(vocab: int, count: int) -> list[int]:
    return random.choices(range(vocab), k=count)


class Case:
    """A batch of random rows, of one of the KINDS."""

    def __init__(self, rows: int, vocab: int, kind: str = "normal", **fixed):
        logits = 2 * torch.randn(rows, vocab, dtype=torch.float64)
        if kind == "ties":
            logits = logits.round()
        if kind == "holes":
            holes = torch.rand(rows, vocab) < 0.6
            holes[range(rows), logits.argmax(dim=1)] = False
            logits[holes] = -torch.inf
        if kind == "flat":
            logits = 0.01 * logits
        self.logits = logits
        self.params = [random_params(seed=random.randrange(2**63), **fixed) for _ in range(rows)]
        self.prompts = [random_tokens(vocab, random.randrange(9)) for _ in range(rows)]
        self.outputs = [random_tokens(vocab, random.randrange(12)) for _ in range(rows)]

    def batch(self, **options) -> SamplingBatch:
        return SamplingBatch.of(self.params, self.prompts, self.outputs, **options)

    def rows(self):
        return zip(self.logits, self.params, self.prompts, self.outputs)

    def expected(self) -> Tensor:
        """[B, V] float64, of the specification."""
        return torch.stack([probabilities(*row) for row in self.rows()])


def worst_difference(case: Case) -> float:
    """Largest difference between the batch's probabilities and the specification; inf for a NaN."""
    got = batch_probabilities(case.logits, case.batch())
    return float((got - case.expected()).abs().nan_to_num(torch.inf).max())


def kept_range(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int], slack: float
) -> tuple[Tensor, Tensor]:
    """Which tokens must be kept, and which may be, if every probability and every sum is only right
    up to the relative error `slack`. logits: [V] -> two [V] bool.
    """
    x = sampling.penalize(logits.double(), params, prompt, output)
    if params.temperature == 0:
        may = x >= x.max() - slack * x.max().abs().clamp(min=1)
        return may & (may.sum() == 1), may
    p = torch.softmax((x - x.max()) / params.temperature, dim=-1)
    cut = params.min_p * p.max()
    if 1 <= params.top_k < len(p):
        cut = max(cut, p.topk(params.top_k).values[-1])
    must, may = p > cut * (1 + slack), p >= cut * (1 - slack)
    if params.top_p < 1:
        at_least = mass_above(p * must, p * (1 + slack)) / p[may].sum()
        others = mass_above(p * may, p * (1 - slack)) - p * may
        at_most = others / p[must].sum()
        must = must & (at_most < params.top_p * (1 - slack) - slack)
        may = may & (at_least < params.top_p * (1 + slack))
    return must & (p > 1e-35), may  # below, float32 has no number


def mass_above(p: Tensor, bounds: Tensor) -> Tensor:
    """For each bound, the sum of the entries of p above it. Both [V] -> [V]."""
    ascending = p.sort().values
    below = torch.cat([ascending.new_zeros(1), ascending.cumsum(0)])
    return p.sum() - below[torch.searchsorted(ascending, bounds, right=True)]
