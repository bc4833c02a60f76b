"""Checks of lesson 16's exercises. Each exists because it rejects a named wrong answer
(wrong/l16.py).
"""

import random

import torch
from torch import Tensor

from tests.exercises.checking import check, compare

INF = float("inf")

# ---------------------------------------------------------------- 16.1 predict


def predicted(alpha, count, cost_ratio):
    """The three numbers, each from the chances of 0, 1, 2, … kept tokens."""

    def tokens(k):
        ends = [alpha**kept * (1 - alpha) for kept in range(k)] + [alpha**k]
        return sum((kept + 1) * chance for kept, chance in enumerate(ends))

    gains = [tokens(k) / (k * cost_ratio + 1) for k in range(11)]
    return tokens(count), gains[count], gains.index(max(gains))


SPEED_CASES = {  # name: (alpha, count, cost_ratio, why)
    "example": (0.5, 2, 0.25, "the docstring's"),
    "good_draft": (0.8, 4, 0.1, "the table of the lesson"),
    "poor_draft": (0.1, 3, 0.2, "where it loses, no draft is best"),
    "free_draft": (0.6, 5, 0.01, "n-grams cost next to nothing"),
    "no_draft": (0.7, 0, 0.3, "K = 0 is plain decoding"),
    "equals": (0.0, 2, 0.0, "every count is as fast as plain decoding, and the smallest wins"),
}


@check("16.1", {case: why for case, (*_, why) in SPEED_CASES.items()}, seconds=5)
def test_speed(impl, case, seed):
    alpha, count, cost_ratio, _ = SPEED_CASES[case]
    inputs = dict(alpha=alpha, count=count, cost_ratio=cost_ratio)
    compare(impl, inputs, want=predicted(**inputs), atol=1e-9)


@check("16.1", seconds=5)
def test_random_speeds(impl, seed):
    draws = random.Random(seed)
    for _ in range(30):
        inputs = dict(
            alpha=draws.uniform(0.05, 0.97),
            count=draws.randint(0, 8),
            cost_ratio=draws.uniform(0.02, 0.6),
        )
        compare(impl, inputs, want=predicted(**inputs), atol=1e-9)


# ---------------------------------------------------------------- 16.2 find the bugs


def first_above(weights: Tensor, u: float) -> int:
    """The first token whose running sum exceeds u times the sum."""
    mass, running = u * float(weights.sum()), 0.0
    for token, weight in enumerate(weights.tolist()):
        running += weight
        if weight > 0 and running > mass:
            return token
    return int(weights.nonzero()[-1])


def verified(p, q, drafted, u) -> list[int]:
    """The rule, token by token."""
    emitted = []
    for row, token in enumerate(drafted):
        keep = 1.0 if p[row, token] >= q[row, token] else float(p[row, token] / q[row, token])
        if float(u[row, 0]) < keep:
            emitted.append(token)
            continue
        rest = torch.where(p[row] > q[row], p[row] - q[row], 0)
        return [*emitted, first_above(rest, float(u[row, 1]))]
    return [*emitted, first_above(p[len(drafted)], float(u[len(drafted), 1]))]


def random_rows(draws: random.Random, count: int, vocab_size: int = 6) -> dict:
    """Arguments of verify_one with `count` drafted tokens, some tokens impossible."""
    generator = torch.Generator().manual_seed(draws.randrange(2**31))

    def rows(number):
        logits = 2 * torch.randn(number, vocab_size, generator=generator, dtype=torch.float64)
        hidden = torch.rand(number, vocab_size, generator=generator) < 0.2
        hidden[:, 0] = False
        return logits.masked_fill(hidden, -torch.inf).softmax(-1)

    p, q = rows(count + 1), rows(count)
    drafted = [int(torch.multinomial(row, 1, generator=generator)) for row in q]
    u = torch.rand(count + 1, 2, generator=generator, dtype=torch.float64)
    return dict(p=p, q=q, drafted=drafted, u=u)


@check("16.2", {"stays": "u below the ratio", "rejected": "u above it"}, seconds=5)
def test_verification_example(impl, case, seed):
    p = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    u = torch.tensor([[0.4, 0.9], [0.0, 0.1]], dtype=torch.float64)
    u[0, 0] = 0.4 if case == "stays" else 0.6
    want = [1, 0] if case == "stays" else [0]
    compare(impl, dict(p=p, q=q, drafted=[1], u=u), want=want)


@check("16.2", {str(k): f"{k} drafted tokens" for k in (0, 1, 4)}, seconds=10)
def test_verification(impl, case, seed):
    draws = random.Random(seed)
    for _ in range(60):
        inputs = random_rows(draws, int(case))
        compare(impl, inputs, want=verified(**inputs))


@check("16.2", seconds=5)
def test_rare_tokens_stay(impl, seed):
    """Both models give the drafted token 1e-9, so it stays, whatever u is."""
    p = torch.tensor([[1 - 1e-9, 1e-9]] * 2, dtype=torch.float64)
    u = torch.full((2, 2), 0.5, dtype=torch.float64)
    compare(impl, dict(p=p, q=p[:1], drafted=[1], u=u), want=[1, 0])


@check("16.2", {"lowest": "u is 0", "highest": "u is nearly 1"}, seconds=5)
def test_impossible_tokens(impl, case, seed):
    """The target gives token 1 nothing: it neither stays nor is drawn, whatever u is."""
    p = torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    u = torch.full((2, 2), 0.0 if case == "lowest" else 1 - 1e-9, dtype=torch.float64)
    compare(impl, dict(p=p, q=q, drafted=[1], u=u), want=[0])


# ---------------------------------------------------------------- 16.3 a batch


def batch_of(seed: int, greedy: str, alike: float, limits: tuple[int, int]) -> dict:
    """Arguments of verify_batch: 12 sequences with 3 drafted tokens over 7.

    greedy: "all", "none" or "some" sequences; alike: how near the draft's logits are to the
    target's; limits: of `left`.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, count, vocab_size = 12, 3, 7

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    target = 2 * normal(batch, count + 1, vocab_size)
    draft = alike * target[:, :-1] + 2 * (1 - alike) * normal(batch, count, vocab_size)
    temperature = 0.4 + torch.rand(batch, generator=generator, dtype=torch.float64)
    share = {"all": 1.0, "none": 0.0, "some": 0.5}[greedy]
    temperature[torch.rand(batch, generator=generator) < share] = 0
    q = torch.stack([distribution(*row) for row in zip(draft, temperature)])
    drafted = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, count)
    u = torch.rand(batch, count + 1, 2, generator=generator, dtype=torch.float64)
    left = torch.randint(limits[0], limits[1] + 1, (batch,), generator=generator)
    names = ("target_logits", "draft_logits", "temperature", "drafted", "u", "left")
    return dict(zip(names, (target, draft, temperature, drafted, u, left)))


def distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """[T, V] logits of one sequence -> what is sampled from."""
    if float(temperature) == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits / temperature).softmax(-1)


def verified_batch(target_logits, draft_logits, temperature, drafted, u, left):
    """16.2, one sequence after the other."""
    tokens = torch.full((len(drafted), drafted.shape[1] + 1), -1)
    counts = torch.zeros(len(drafted), dtype=torch.int64)
    for b, at in enumerate(temperature):
        p, q = distribution(target_logits[b], at), distribution(draft_logits[b], at)
        emitted = verified(p, q, drafted[b].tolist(), u[b])[: int(left[b])]
        tokens[b, : len(emitted)] = torch.tensor(emitted)
        counts[b] = len(emitted)
    return tokens, counts


BATCH_CASES = {  # name: (greedy, alike, limits of left, why)
    "sampled": ("none", 0.5, (9, 9), "each sequence ends at its own rejection"),
    "greedy": ("all", 0.7, (9, 9), "temperature 0 is a choice, not a divisor"),
    "mixed": ("some", 0.6, (9, 9), "greedy and sampled rows in one batch"),
    "good_drafts": ("none", 0.97, (9, 9), "most rows accept all, and draw a bonus token"),
    "nearly_done": ("some", 0.9, (1, 3), "no sequence emits more than is left"),
}


@check("16.3", {case: why for case, (*_, why) in BATCH_CASES.items()}, seconds=10)
def test_batch(impl, case, seed):
    greedy, alike, limits, _ = BATCH_CASES[case]
    for at in range(8):
        inputs = batch_of(8 * seed + at, greedy, alike, limits)
        compare(impl, inputs, want=verified_batch(**inputs))


@check("16.3", seconds=5)
def test_batch_example(impl, seed):
    logits = torch.tensor([2.0, 1.0], dtype=torch.float64)
    inputs = dict(
        target_logits=logits.expand(2, 2, 2).clone(),
        draft_logits=torch.stack([logits, logits.flip(0)])[:, None],
        temperature=torch.zeros(2, dtype=torch.float64),
        drafted=torch.tensor([[0], [1]]),
        u=torch.full((2, 2, 2), 0.5, dtype=torch.float64),
        left=torch.tensor([5, 5]),
    )
    want = torch.tensor([[0, 0], [0, -1]]), torch.tensor([2, 1])
    compare(impl, inputs, want=want)


def one_draft(target, draft, drafted, u, temperature):
    """A batch of one sequence with one drafted token over two; `target` is the bonus row, too."""
    return dict(
        target_logits=torch.tensor([[target, target]], dtype=torch.float64),
        draft_logits=torch.tensor([[draft]], dtype=torch.float64),
        temperature=torch.tensor([temperature], dtype=torch.float64),
        drafted=torch.tensor([[drafted]]),
        u=torch.full((1, 2, 2), u, dtype=torch.float64),
        left=torch.tensor([5]),
    )


EDGES = {  # name: (arguments of one_draft, tokens, count, why)
    "cannot_stay": (([0.0, -INF], [0.0, 0.0], 1, 0.0, 1.0), [0, -1], 1, "0 is not below 0 / q"),
    "cannot_be_drawn": (
        ([-INF, 0.0], [0.0, -INF], 0, 0.0, 1.0),
        [1, -1],
        1,
        "a running sum of 0 does not exceed 0",
    ),
    "greedy_and_close": (
        ([1.0, 1.0 + 1e-7], [1.0, 1.0 + 1e-7], 1, 0.25, 0.0),
        [1, 1],
        2,
        "greedy takes the largest logit, however near the next one is",
    ),
    "greedy_and_equal": (
        ([1.0, 1.0], [0.0, 1.0], 1, 0.25, 0.0),
        [0, -1],
        1,
        "of equal logits the first has all of the probability",
    ),
}


@check("16.3", {case: why for case, (*_, why) in EDGES.items()}, seconds=5)
def test_edges_of_a_draw(impl, case, seed):
    arguments, tokens, count, _ = EDGES[case]
    want = torch.tensor([tokens]), torch.tensor([count])
    compare(impl, one_draft(*arguments), want=want)
