"""The distribution of what a verification emits, by enumeration: no random number is drawn.

A verification is a function of random numbers that is constant between some boundaries: p / q for
the number that accepts, the running sums of p and of the residual for the number that draws. So the
code under test runs once in the middle of each cell, and the cell's size is its probability.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import SamplingParams, probabilities

Prefix = tuple[int, ...]
Table = dict[Prefix, Tensor]  # what is sampled after each prefix: [V] float64


def random_table(vocab_size: int, length: int, params: SamplingParams, seed: int) -> Table:
    """A model of the tiniest kind: random logits for every prefix of up to `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for size in range(length + 1):
        for prefix in product(range(vocab_size), repeat=size):
            logits = 1.5 * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            table[prefix] = probabilities(logits, params, [0], list(prefix))
    return table


def middles(boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """The cells between 0, the boundaries and 1, without empty ones. boundaries: [N] -> the middles
    and the sizes of the cells, [cells] each.
    """
    ends = torch.cat([boundaries, torch.tensor([0.0, 1.0], dtype=torch.float64)]).clamp(0, 1)
    ends = ends.unique()
    sizes = ends.diff()
    return (ends[:-1] + sizes / 2)[sizes > 1e-12], sizes[sizes > 1e-12]


def boundaries_of(p: Tensor, q: Tensor) -> Tensor:
    """Where a draw changes its token: running sums of p and of the residuals. p, q: [K + 1, V]."""
    rests = torch.cat([p, (p[:-1] - q[:-1]).clamp(min=0)])
    rests = rests[rests.sum(-1) > 0]
    return (rests.cumsum(-1) / rests.sum(-1, keepdim=True)).flatten()


def cells(target: Table, draft: Table, drafted: Prefix):
    """Every cell for one drafted sequence: (p, q, u: [K + 1, 2], probability of the cell)."""
    prefixes = [drafted[:seen] for seen in range(len(drafted) + 1)]
    p = torch.stack([target[prefix] for prefix in prefixes])
    q = torch.stack([draft[prefix] for prefix in prefixes])
    q[-1] = torch.nan  # the bonus row is never read
    accepts = []
    for row, token in enumerate(drafted):
        ratio = (p[row, token] / q[row, token]).clamp(max=1)
        accepts.append(list(zip(*middles(ratio[None]))))
    draws = list(zip(*middles(boundaries_of(p, q))))
    for *chosen, (number, size) in product(*accepts, draws):
        u = torch.full((len(drafted) + 1, 2), float(number), dtype=torch.float64)
        for row, (accept, share) in enumerate(chosen):
            u[row, 0] = accept
            size = size * share
        yield p, q, u, float(size)


def emitted(
    verify: Callable, target: Table, draft: Table, vocab_size: int, count: int
) -> dict[Prefix, float]:
    """The probability of each sequence that a step with `count` drafted tokens emits.

    verify(p, q, drafted, u, cu_rows) -> tokens, accepted, as naive.verify, given all cells as one
    batch.
    """
    batch, weights = [], []
    for drafted in product(range(vocab_size), repeat=count):
        chance = 1.0
        for seen, token in enumerate(drafted):
            chance *= float(draft[drafted[:seen]][token])
        if chance == 0:
            continue  # never drafted
        for p, q, u, size in cells(target, draft, drafted):
            batch.append((p, q, torch.tensor([*drafted, -1]), u))
            weights.append(chance * size)
    p, q, drafted, u = (torch.cat(parts) for parts in zip(*batch))
    cu_rows = torch.arange(len(batch) + 1, dtype=torch.int32) * (count + 1)
    tokens, accepted = verify(p, q, drafted, u, cu_rows)
    found = defaultdict(float)
    for answer, kept, weight in zip(
        tokens.view(-1, count + 1).tolist(), accepted.tolist(), weights
    ):
        found[tuple(answer[: kept + 1])] += weight
    return dict(found)


def continued(steps: dict[Prefix, float], target: Table, length: int) -> dict[Prefix, float]:
    """What the text is after `length` tokens, if the target goes on alone after the step."""
    found = defaultdict(float)
    for prefix, chance in steps.items():
        if len(prefix) >= length:
            found[prefix] += chance
            continue
        for token, share in enumerate(target[prefix].tolist()):
            longer = continued({(*prefix, token): chance * share}, target, length)
            for whole, part in longer.items():
                found[whole] += part
    return dict(found)


def plain(target: Table, length: int) -> dict[Prefix, float]:
    """The probability of each sequence of `length` tokens, sampled one by one."""
    return continued({(): 1.0}, target, length)


def largest_difference(steps: dict[Prefix, float], target: Table, length: int) -> float:
    """Between the distribution with speculation and the one without, over all sequences."""
    ours, wanted = continued(steps, target, length), plain(target, length)
    return max(abs(ours.get(key, 0) - wanted.get(key, 0)) for key in ours.keys() | wanted.keys())
