"""Chi-squared and z-tests of what speculation emits, on tables of real models.

With top-k = 4 only a few hundred sequences of three tokens can follow a prompt. Their probabilities
are computed once, for all of them, so that 200,000 steps need no further pass of a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from lessons.l16_speculative_sampling.more.speed import acceptance
from lessons.l16_speculative_sampling.stand_ins import draw_rows

Prefix = tuple[int, ...]
LEAST_EXPECTED = 10  # cells with fewer are pooled into one


@dataclass(frozen=True)
class Tables:
    """Two models after one prompt, over the U tokens that either may emit there.

    p, q: [prefixes, U]; row: the row of each prefix (of numbers below U); ids: [U] token ids;
    expected: [U ** length] probabilities of the sequences under the target.
    """

    p: Tensor
    q: Tensor
    row: dict[Prefix, int]
    ids: list[int]
    length: int
    expected: Tensor


@torch.inference_mode()
def tables_of(
    target: Decoder, draft: Decoder, prompt: list[int], params: SamplingParams, length: int
) -> Tables:
    """Both models after every prefix of up to length - 1 tokens that either may emit."""
    found: dict[Prefix, tuple[Tensor, Tensor]] = {}
    layer: list[Prefix] = [()]
    for _ in range(length):
        for prefix in layer:
            found[prefix] = tuple(behind(m, prompt, prefix, params) for m in (target, draft))
        layer = [(*f, int(token)) for f in layer for token in sum(found[f]).nonzero()]
    ids = sorted({int(token) for both in found.values() for token in sum(both).nonzero()})
    number = {token: index for index, token in enumerate(ids)}
    row = {tuple(number[t] for t in prefix): index for index, prefix in enumerate(found)}
    p, q = (torch.stack([both[which][ids] for both in found.values()]) for which in (0, 1))
    expected = torch.zeros((len(ids),) * length, dtype=torch.float64)
    for prefix, index in row.items():
        if len(prefix) == length - 1:
            chance = 1.0
            for seen, token in enumerate(prefix):
                chance = chance * p[row[prefix[:seen]], token]
            expected[prefix] = chance * p[index]
    return Tables(p, q, row, ids, length, expected.flatten())


def behind(model: Decoder, prompt: list[int], prefix: Prefix, params: SamplingParams) -> Tensor:
    """What the model samples after prompt and prefix: [V] float64."""
    tokens = torch.tensor([*prompt, *prefix], device=model.device)
    hidden = model(tokens, whole_sequence(model, len(tokens)))
    return probabilities(model.logits(hidden[-1:])[0], params, prompt, list(prefix))


@dataclass(frozen=True)
class Steps:
    """counts: [U ** length] how often each sequence came; kept: first drafted tokens that
    stayed.
    """

    counts: Tensor
    kept: int
    total: int


def drawn_steps(tables: Tables, verify, total: int, seed: int) -> Steps:
    """`total` steps that draft length - 1 tokens; the target goes on alone after each."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    width, drafts = len(tables.ids), tables.length - 1
    rows, drafted = torch.zeros(total, tables.length, dtype=torch.int64), []
    for index in range(drafts):
        drafted.append(draw_rows(tables.q[rows[:, index]], uniform(total)))
        rows[:, index + 1] = rows_behind(tables, torch.stack(drafted, 1))
    drafted = torch.stack([*drafted, torch.full((total,), -1)], 1)
    cu_rows = torch.arange(total + 1, dtype=torch.int32) * tables.length
    u = uniform(rows.numel(), 2).float().clamp(max=1 - 2.0**-24)
    p, q = (table[rows.flatten()].float() for table in (tables.p, tables.q))
    tokens, accepted = verify(p, q, drafted.flatten(), u, cu_rows, tables.length)
    tokens = tokens.view(total, -1)
    for index in range(1, tables.length):
        short = accepted < index  # what the step has not emitted
        here = rows_behind(tables, tokens[short, :index])
        tokens[short, index] = draw_rows(tables.p[here], uniform(len(here)))
    places = torch.zeros(total, dtype=torch.int64)
    for token in tokens.unbind(1):
        places = places * width + token
    counts = torch.bincount(places, minlength=width**tables.length)
    return Steps(counts, int((accepted > 0).sum()), total)


def rows_behind(tables: Tables, prefixes: Tensor) -> Tensor:
    """The table's row of each prefix. [N, size] -> [N]."""
    distinct, where = prefixes.unique(dim=0, return_inverse=True)
    found = [tables.row[tuple(prefix)] for prefix in distinct.tolist()]
    return torch.tensor(found, dtype=torch.int64)[where]


def sequences(tables: Tables, outputs: list[list[int]]) -> Tensor:
    """How often each sequence is in `outputs`, as token ids: [U ** length]."""
    number = {token: index for index, token in enumerate(tables.ids)}
    counts = torch.zeros((len(tables.ids),) * tables.length, dtype=torch.int64)
    for output in outputs:
        counts[tuple(number[token] for token in output)] += 1
    return counts.flatten()


# ---------------------------------------------------------------- the tests


def chi_squared(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom. counts, expected: [cells]; the rare ones are
    pooled.

    Infinite if something came that cannot come.
    """
    if counts[expected == 0].sum() > 0:
        return float("inf"), 1
    is_large = expected >= LEAST_EXPECTED
    pooled = [(counts[~is_large].sum()[None], expected[~is_large].sum()[None])]
    parts = [(counts[is_large], expected[is_large]), *(p for p in pooled if p[1] >= LEAST_EXPECTED)]
    seen, wanted = (torch.cat(x).double() for x in zip(*parts))
    return float(((seen - wanted) ** 2 / wanted).sum()), max(1, len(seen) - 1)


def chance_of(statistic: float, freedom: int) -> float:
    """The probability of this chi-squared or a larger one, if all is right."""
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))


def z_of_acceptance(steps: Steps, tables: Tables) -> float:
    """How many standard deviations the kept first tokens are from Σ min(p, q)."""
    alpha = float(acceptance(tables.p[0], tables.q[0]))
    deviation = (steps.total * alpha * (1 - alpha)) ** 0.5
    return (steps.kept - steps.total * alpha) / deviation
