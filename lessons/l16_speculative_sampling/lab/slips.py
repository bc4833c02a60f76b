"""Verifications with one slip each, as printed in guides and teaching code."""

import torch

from lessons.l02_naive_attention.sampling import draw
from lessons.l16_speculative_sampling import naive
from lessons.l16_speculative_sampling.stand_ins import draw_rows, verify_torch


def slipped(p, q, drafted, u, cu_rows, verify_one):
    """naive.verify with another verify_sequence."""
    tokens = torch.full_like(drafted, -1)
    accepted = torch.full_like(cu_rows[1:], -1)
    for b, (first, end) in enumerate(zip(cu_rows.tolist(), cu_rows[1:].tolist())):
        rows = slice(first, end)
        emitted = verify_one(p[rows], q[rows].nan_to_num(), drafted[rows], u[rows])
        tokens[first : first + len(emitted)] = torch.tensor(emitted)
        accepted[b] = len(emitted) - 1
    return tokens, accepted


def one_sequence(p, q, drafted, u, rest_of, ratio_of=lambda p, q: p / q, bonus_of=None):
    """verify_sequence, whose rest, ratio and bonus row are another sequence's."""
    emitted, last = [], len(drafted) - 1
    for row in range(last):
        token = drafted[row]
        if not u[row, 0] < ratio_of(p[row, token], q[row, token]):
            return [*emitted, int(draw(rest_of(p, q, row), u[row, 1:]))]
        emitted.append(int(token))
    bonus = p[-1] if bonus_of is None else bonus_of(p, q)
    return [*emitted, int(draw(bonus, u[-1, 1:]))]


def not_clipped(p, q, drafted, u, cu_rows):
    """|p - q| in place of max(0, p - q)."""

    def one(p, q, drafted, u):
        return one_sequence(p, q, drafted, u, lambda p, q, row: (p[row] - q[row]).abs())

    return slipped(p, q, drafted, u, cu_rows, one)


def at_the_last_position(p, q, drafted, u, cu_rows):
    """After a rejection the token is drawn from the last row."""

    def one(p, q, drafted, u):
        return one_sequence(p, q, drafted, u, lambda p, q, row: p[-1])

    return slipped(p, q, drafted, u, cu_rows, one)


def from_p(p, q, drafted, u, cu_rows):
    """After a rejection the token is drawn from p, not from the residual."""

    def one(p, q, drafted, u):
        return one_sequence(p, q, drafted, u, lambda p, q, row: p[row])

    return slipped(p, q, drafted, u, cu_rows, one)


def epsilon_in_the_ratio(p, q, drafted, u, cu_rows):
    """p / (q + 1e-8): off by little, and off."""

    def one(p, q, drafted, u):
        def rest_of(p, q, row):
            return naive.residual(p[row], q[row])

        return one_sequence(p, q, drafted, u, rest_of, lambda p, q: p / (q + 1e-8))

    return slipped(p, q, drafted, u, cu_rows, one)


def residual_for_the_bonus(p, q, drafted, u, cu_rows):
    """A row that accepted everything draws from a residual, too: with the draft's last row."""

    def one(p, q, drafted, u):
        def rest_of(p, q, row):
            return naive.residual(p[row], q[row])

        def bonus_of(p, q):
            return naive.residual(p[-1], q[-2])

        return one_sequence(p, q, drafted, u, rest_of, bonus_of=bonus_of)

    return slipped(p, q, drafted, u, cu_rows, one)


VERIFICATIONS = (
    not_clipped,
    at_the_last_position,
    from_p,
    residual_for_the_bonus,
)


# ---------------------------------------------------------------- for whole batches


def batch_from_p(p, q, drafted, u, cu_rows, max_rows):
    """verify_torch that draws from p after a rejection."""
    tokens, accepted = verify_torch(p, q, drafted, u, cu_rows, max_rows)
    ends = cu_rows[:-1].long() + accepted
    tokens[ends] = draw_rows(p[ends], u[ends, 1])
    return tokens, accepted


def batch_always_accepts(p, q, drafted, u, cu_rows, max_rows):
    """Whatever the target might have said itself stays: p > 0 in place of the rule."""
    return verify_torch(p, q, drafted, u * torch.tensor([1e-9, 1.0]), cu_rows, max_rows)


BATCHED = (batch_from_p, batch_always_accepts)
