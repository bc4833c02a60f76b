"""Wrong answers to lesson 16's exercises: the museum's slips, each with a hint."""

import torch

from lessons.l02_naive_attention.sampling import draw
from lessons.l16_speculative_sampling.naive import verify_sequence
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 16.1 the speed-up

answers.slips(
    "16.1",
    """
    last_of_equals: Of equal speed-ups the smaller count wins.
    - max(range(11), key=gain)
    + max(range(10, -1, -1), key=gain)

    no_bonus_token: A step always emits one token that was not drafted: after a rejection, or the
        bonus.
    - sum(alpha**kept for kept in range(k + 1))
    + sum(alpha**kept for kept in range(1, k + 1))

    no_token_when_all_stay: If all K stay, the target's last row gives one more: the sum goes up to
        alpha ** K.
    - range(k + 1)
    + range(k)

    rejections_do_not_end_the_chain: A token counts only if all in front of it stayed: its chance is
        alpha to a power.
    - sum(alpha**kept for kept in range(k + 1))
    + 1 + alpha * k

    the_draft_run_twice: The draft runs once for each drafted token; its probabilities are kept for
        the rule.
    - (k * cost_ratio + 1)
    + (2 * k * cost_ratio + 1)

    a_free_draft: The draft's passes cost cost_ratio each.
    - tokens(k) / (k * cost_ratio + 1)
    + tokens(k)

    verified_one_by_one: The target sees all drafted tokens in one pass. That is the whole point.
    - (k * cost_ratio + 1)
    + (k * cost_ratio + k + 1)

    drafts_the_bonus_token: The bonus token comes from the target: the draft runs count times.
    - (k * cost_ratio + 1)
    + ((k + 1) * cost_ratio + 1)

    best_by_tokens: More drafted tokens always emit more, and cost more: compare speed-ups.
    - max(range(11), key=gain)
    + max(range(11), key=tokens)

    never_without_a_draft: 0 is a choice, too: a poor draft is best not asked.
    - range(11)
    + range(1, 11)
    """,
)


@answers.alternative("16.1")
def by_the_closed_formula(alpha, count, cost_ratio):
    def tokens(k):
        return (1 - alpha ** (k + 1)) / (1 - alpha)

    gains = [tokens(k) / (1 + k * cost_ratio) for k in range(11)]
    return tokens(count), gains[count], gains.index(max(gains))


@answers.alternative("16.1")
def by_a_running_sum(alpha, count, cost_ratio):
    found, tokens, power = [], 0.0, 1.0
    for k in range(11):
        tokens, power = tokens + power, power * alpha
        found.append((tokens, tokens / (k * cost_ratio + 1)))
    best = sorted(range(11), key=lambda k: (-found[k][1], k))[0]
    return found[count][0], found[count][1], best


# ---------------------------------------------------------------- 16.2 one verification

answers.slips(
    "16.2",
    """
    zero_stays: u is 0 and p is 0: u is not below p / q, so the token goes.
    - u[row, 0] * q[row, token] >= p[row, token]
    + u[row, 0] * q[row, token] > p[row, token]

    a_little_residual: The residual of a token may be 0. A little more, and it can be drawn.
    - (p[row] - q[row]).clamp(min=0)
    + (p[row] - q[row]).clamp(min=1e-6)

    as_it_was: Bugs are left. Work the docstring's two examples by hand first.
    - if u[row, 0] * q[row, token] >= p[row, token]:
    -     rest = (p[row] - q[row]).clamp(min=0)
    + if u[row, 0] >= p[row, token] / (q[row, token] + 1e-8):
    +     rest = (p[-1] - q[-1]).abs()
    - return [*emitted, int(draw(p[-1], u[-1, 1:]))]
    + return emitted

    residual_not_clipped: Where q is above p the draft has proposed more than its share: the
        residual is 0 there.
    - (p[row] - q[row]).clamp(min=0)
    + (p[row] - q[row]).abs()

    resampled_at_the_last_position: The new token takes the rejected one's place: use the row of the
        rejection.
    - (p[row] - q[row]).clamp(min=0)
    + p[-1]

    last_residual: Right formula, wrong row: the residual belongs to the row of the rejection.
    - (p[row] - q[row]).clamp(min=0)
    + (p[len(drafted) - 1] - q[-1]).clamp(min=0)

    drawn_from_the_target: Accepted drafts cover min(p, q) already. Drawing from p counts this share
        twice.
    - (p[row] - q[row]).clamp(min=0)
    + p[row]

    drawn_from_the_surplus: The residual is what the target has more than the draft, not the other
        way round.
    - (p[row] - q[row]).clamp(min=0)
    + (q[row] - p[row]).clamp(min=0)

    epsilon_in_the_ratio: A drafted token has q above 0, so nothing needs 1e-8. It rejects rare
        tokens.
    - u[row, 0] * q[row, token] >= p[row, token]
    + u[row, 0] >= p[row, token] / (q[row, token] + 1e-8)

    ratio_upside_down: It is p over q.
    - u[row, 0] * q[row, token] >= p[row, token]
    + u[row, 0] * p[row, token] >= q[row, token]

    no_bonus_token: If all stay, the target's last row is there already: draw a token from it.
    - return [*emitted, int(draw(p[-1], u[-1, 1:]))]
    + return emitted

    residual_for_the_bonus: After the last drafted token nothing was drafted: draw from p itself.
    - return [*emitted, int(draw(p[-1], u[-1, 1:]))]
    + rest = (p[-1] - q[-1]).clamp(min=0) if drafted else p[-1]
    + return [*emitted, int(draw(rest, u[-1, 1:]))]

    all_or_nothing: The tokens in front of the rejected one stay.
    - return [*emitted, int(draw(rest, u[row, 1:]))]
    + return [int(draw(rest, u[row, 1:]))]
    """,
)


@answers.alternative("16.2")
def by_the_lesson(p, q, drafted, u):
    padded = torch.cat([q, torch.zeros_like(p[-1:])])
    return verify_sequence(p, padded, torch.tensor([*drafted, -1]), u)


@answers.alternative("16.2")
def count_first(p, q, drafted, u):
    stays = [bool(u[i, 0] * q[i, x] < p[i, x]) for i, x in enumerate(drafted)]
    kept = stays.index(False) if False in stays else len(drafted)
    weights = p[kept] if kept == len(drafted) else torch.relu(p[kept] - q[kept])
    return [*drafted[:kept], int(draw(weights, u[kept, 1:]))]


# ---------------------------------------------------------------- 16.3 a batch

answers.slips(
    "16.3",
    """
    zero_stays: u is 0 and p is 0: u is not below p / q, so the token goes.
    - u[:, :-1, 0] * q_there < p_there
    + u[:, :-1, 0] * q_there <= p_there

    reaches: The first running sum that exceeds u times the sum, not the first that reaches it.
    - right=True
    + right=False

    equal_ones_share: Greedy is one token: of equal logits the first has all of the probability.
    - best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    + best = (logits == logits.amax(-1, keepdim=True)).to(logits.dtype)
    + best = best / best.sum(-1, keepdim=True)

    nearly_greedy: A temperature near 0 is not greedy: the next logit may be as near.
    - is_greedy = (temperature == 0)[:, None, None]
    - divisor = torch.where(is_greedy, 1, temperature[:, None, None])
    + is_greedy = (temperature < 0)[:, None, None]
    + divisor = temperature.clamp(min=1e-5)[:, None, None]

    division_by_temperature_0: Temperature 0 divides by 0. Put all of the probability on the largest
        logit there.
    - return torch.where(is_greedy, best, (logits / divisor).softmax(-1))
    + return (logits / temperature[:, None, None]).softmax(-1)

    greedy_rows_sampled: At temperature 0 a row's probability is 1 at the largest logit and 0
        elsewhere.
    - return torch.where(is_greedy, best, (logits / divisor).softmax(-1))
    + return (logits / divisor).softmax(-1)

    temperature_on_the_target_only: The draft sampled at this temperature, too. The rule needs what
        it really sampled from.
    - (sampled_from(x, temperature) for x in (target_logits, draft_logits))
    + sampled_from(target_logits, temperature), draft_logits.softmax(-1)

    one_rejection_stops_the_batch: Each sequence goes as far as its own first rejection, not as the
        batch's first.
    - passes.long().cumprod(dim=1).sum(dim=1)
    + passes.long().cumprod(dim=1).sum(dim=1)
    + kept = kept.min().expand_as(kept)

    counts_what_passes: A token that would pass after a rejected one is lost: count the leading ones
        (cumprod).
    - passes.long().cumprod(dim=1).sum(dim=1)
    + passes.sum(dim=1)

    residual_for_rows_that_accepted: A row that accepted all has no draft at its last position:
        subtract nothing there.
    - torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    + torch.cat([q, q[:, -1:]], dim=1)

    no_bonus_token: A row that accepted all emits K + 1 tokens.
    - torch.minimum(kept + 1, left)
    + torch.minimum((kept + 1).clamp(max=count), left)

    max_tokens_overshot: A step may emit more tokens than a sequence may still have: cut at left.
    - torch.minimum(kept + 1, left)
    + kept + 1

    drawn_from_the_target: After a rejection the token comes from max(0, p - q), not from p.
    - (p[rows, kept] - q[rows, kept]).clamp(min=0)
    + p[rows, kept]
    """,
)


def softmaxed(logits, temperature):
    """[B, T, V] logits -> probabilities."""
    scaled = logits / temperature[:, None, None]
    best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return torch.where(temperature[:, None, None] == 0, best, scaled.softmax(-1))


@answers.alternative("16.3")
def row_after_row(target_logits, draft_logits, temperature, drafted, u, left):
    p, q = (softmaxed(x, temperature) for x in (target_logits, draft_logits))
    answers_of = [
        count_first(p[b], q[b], drafted[b].tolist(), u[b])[: int(left[b])]
        for b in range(len(drafted))
    ]
    counts = torch.tensor([len(answer) for answer in answers_of])
    width = drafted.shape[1] + 1
    return torch.tensor([a + [-1] * (width - len(a)) for a in answers_of]), counts


@answers.alternative("16.3")
def with_a_comparison(target_logits, draft_logits, temperature, drafted, u, left):
    """The draw by counting running sums, in place of searchsorted."""
    p, q = (softmaxed(x, temperature) for x in (target_logits, draft_logits))
    count, tokens, counts = drafted.shape[1], torch.full_like(u[..., 0], -1).long(), []
    rests = torch.cat([torch.relu(p[:, :-1] - q), p[:, -1:]], 1).cumsum(-1)
    drawn = (rests <= u[..., 1:] * rests[..., -1:]).sum(-1)
    alive = torch.ones(len(drafted), dtype=torch.bool)
    counts = torch.zeros(len(drafted), dtype=torch.int64)
    for at in range(count + 1):
        stays = torch.zeros_like(alive)
        token = drawn[:, at]
        if at < count:
            there = drafted[:, at : at + 1]
            bound = u[:, at, 0] * q[:, at].gather(1, there)[:, 0]
            stays = bound < p[:, at].gather(1, there)[:, 0]
            token = torch.where(stays, drafted[:, at], token)
        emits = alive & (counts < left)
        tokens[:, at] = torch.where(emits, token, -1)
        counts, alive = counts + emits, alive & stays
    return tokens, counts
