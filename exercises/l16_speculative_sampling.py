# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=16
# Generated from solutions/l16_speculative_sampling.py, checksum bc07d2c12566. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 16: the speed-up predicted, a verification with bugs, a batch verified."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import draw
from lessons.toolbox.exercises.exercise import exercise


@exercise("16.1", "Predict: the speed-up", minutes=15, difficulty=1)
def predict_speculation(alpha: float, count: int, cost_ratio: float) -> tuple[float, float, int]:
    """What speculation gains: (tokens that a step emits on average, speed-up over plain decoding,
    the count from 0 to 10 with the largest speed-up).

    alpha: each drafted token stays with this probability, if all before it stayed; below 1.
    count: drafted tokens of a step. cost_ratio: seconds of a pass of the draft over seconds of a
    pass of the target. A pass of the target takes the same time for one token and for count + 1.
    A count of 0 is plain decoding; of equal speed-ups the smaller count wins. Errors: none to
    raise.

    Example: alpha 0.5, count 2, cost_ratio 0.25
        tokens 1 + 0.5 + 0.25 = 1.75, speed-up 1.75 / 1.5 = 1.1667, best count 1: 1.5 / 1.25 = 1.2
        -> (1.75, 1.1667, 1)
    Write down your guess first: alpha 0.7, count 6, cost_ratio 0.2.
    """

    raise NotImplementedError("Exercise 16.1: Predict: the speed-up")


@exercise(
    "16.2",
    "Find the bugs: one verification",
    minutes=25,
    difficulty=2,
    replaces="lessons.l16_speculative_sampling.stand_ins:verify_for",
    through="reference.ladder.yours.speculation:verify_for",
)
def verify_one(p: Tensor, q: Tensor, drafted: list[int], u: Tensor) -> list[int]:
    """The tokens that one sequence emits in a step of speculative sampling.

    p: [K + 1, V] float64, the target's probabilities at each drafted token and after the last.
    q: [K, V], those of the draft. drafted: K tokens; K may be 0. u: [K + 1, 2] in [0, 1): drafted
    token i stays if u[i, 0] is below p / q; otherwise u[i, 1] draws a token from the residual, and
    the step ends. If all stay, u[K, 1] draws the bonus token. `draw(weights: [V], u: [1])` draws by
    inverse CDF; the weights need not sum to 1. Errors: none to raise. The arguments stay.

    Example: V = 2, K = 1, p = [[0.75, 0.25], [0.5, 0.5]], q = [[0.5, 0.5]], drafted [1]
        u[0, 0] = 0.4: below 0.25 / 0.5, so 1 stays, and u[1, 1] = 0.1 draws 0     -> [1, 0]
        u[0, 0] = 0.6: rejected; the residual is [0.25, 0], so 0 is drawn          -> [0]

    The code below accepts and rejects common tokens rightly. It has four bugs. Delete the first
    line and find them.
    """
    raise NotImplementedError("Exercise 16.2: Find the bugs: one verification")
    emitted = []
    for row, token in enumerate(drafted):
        ratio = p[row, token] / (q[row, token] + 1e-8)
        if u[row, 0] >= ratio:
            rest = (p[-1] - q[-1]).abs()
            return [*emitted, int(draw(rest, u[row, 1:]))]
        emitted.append(token)
    return emitted


@exercise("16.3", "Verify a batch", minutes=45, difficulty=3)
def verify_batch(
    target_logits: Tensor,
    draft_logits: Tensor,
    temperature: Tensor,
    drafted: Tensor,
    u: Tensor,
    left: Tensor,
) -> tuple[Tensor, Tensor]:
    """Verify the drafts of B sequences: (tokens: [B, K + 1] int64, counts: [B] int64).

    target_logits: [B, K + 1, V] float64; draft_logits: [B, K, V]; temperature: [B], 0 is greedy
    (all of the probability on the largest logit, of equal ones on the first) and holds for both;
    drafted: [B, K] int64, K at least 1; u: [B, K + 1, 2] in [0, 1), as in 16.2; left: [B] int64,
    how many tokens each sequence may still emit, 1 or more.

    Sequence b emits tokens[b, :counts[b]]; after them comes -1. Each ends at its own first
    rejection. Emitted tokens beyond left[b] are cut off. A draw gives the first token whose running
    sum exceeds u times the sum. Errors: none to raise. The arguments stay.

    Example: K = 1, V = 2, two greedy sequences, all logits of the target [2, 1], of the draft [2,
    1] for the first and [1, 2] for the second, drafted [[0], [1]], left [5, 5]
        -> tokens [[0, 0], [0, -1]], counts [2, 1]
        with left [1, 1]: tokens [[0, -1], [0, -1]], counts [1, 1]
    """
    raise NotImplementedError("Exercise 16.3: Verify a batch")


def sampled_from(logits: Tensor, temperature: Tensor) -> Tensor:
    """The probabilities of each row. logits: [B, T, V], temperature: [B] -> [B, T, V]."""
    raise NotImplementedError("Exercise 16.3: Verify a batch")
