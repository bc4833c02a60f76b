"""Wrong answers to lesson 16's exercises: the museum's slips, and the hint for whoever made them."""

from functools import partial

import torch

from lessons.l02_naive_attention.sampling import draw
from lessons.l16_speculative_sampling.naive import verify_sequence
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 16.1 the speed-up


def slipped_speed(alpha, count, cost_ratio, *, emits="chain", costs="once", best="speed", least=0):
    """The three numbers with a slip, spelled by switches."""
    tokens_of = {
        "chain": lambda k: sum(alpha**kept for kept in range(k + 1)),
        "no bonus": lambda k: sum(alpha**kept for kept in range(1, k + 1)),
        "no correction": lambda k: sum(alpha**kept for kept in range(k)),
        "average": lambda k: 1 + alpha * k,
    }[emits]
    cost_of = {
        "once": lambda k: k * cost_ratio + 1,
        "twice": lambda k: 2 * k * cost_ratio + 1,
        "free": lambda k: 1,
        "verified one by one": lambda k: k * cost_ratio + k + 1,
        "a draft of the bonus": lambda k: (k + 1) * cost_ratio + 1,
    }[costs]
    gains = {k: tokens_of(k) / cost_of(k) for k in range(least, 11)}
    ranks = {k: tokens_of(k) for k in gains} if best == "tokens" else gains
    gain = tokens_of(count) / cost_of(count)
    return float(tokens_of(count)), float(gain), max(ranks, key=ranks.get)


for name, slip, hint in [
    (
        "no_bonus_token",
        dict(emits="no bonus"),
        "A step always emits one token that nobody drafted: after a rejection, or the bonus.",
    ),
    (
        "no_token_when_all_stay",
        dict(emits="no correction"),
        "If all K stay, the target's last row gives one more: the sum goes up to alpha ** K.",
    ),
    (
        "rejections_do_not_end_the_chain",
        dict(emits="average"),
        "A token counts only if all in front of it stayed: its chance is alpha to a power.",
    ),
    (
        "the_draft_run_twice",
        dict(costs="twice"),
        "The draft runs once for each drafted token; its probabilities are kept for the rule.",
    ),
    ("a_free_draft", dict(costs="free"), "The draft's passes cost cost_ratio each."),
    (
        "verified_one_by_one",
        dict(costs="verified one by one"),
        "The target sees all drafted tokens in one pass. That is the whole point.",
    ),
    (
        "drafts_the_bonus_token",
        dict(costs="a draft of the bonus"),
        "The bonus token comes from the target: the draft runs count times.",
    ),
    (
        "best_by_tokens",
        dict(best="tokens"),
        "More drafted tokens always emit more, and cost more: compare speed-ups.",
    ),
    ("never_without_a_draft", dict(least=1), "0 is a choice, too: a poor draft is best not asked."),
]:
    answers.wrong("16.1", hint, name)(partial(slipped_speed, **slip))


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


def slipped_verification(p, q, drafted, u, *, rest="residual", ratio="exact", end="bonus"):
    """verify_one with some slips, spelled by switches."""
    emitted = []
    for row, token in enumerate(drafted):
        here, there = p[row, token], q[row, token]
        keep = here / (there + 1e-8) if ratio == "epsilon" else here / there
        keep = there / here.clamp(min=1e-300) if ratio == "upside down" else keep
        if not u[row, 0] < keep:
            weights = {
                "residual": (p[row] - q[row]).clamp(min=0),
                "absolute": (p[row] - q[row]).abs(),
                "last absolute": (p[-1] - q[-1]).abs(),
                "last row": p[-1],
                "last residual": (p[len(drafted) - 1] - q[-1]).clamp(min=0),
                "target": p[row],
                "draft's surplus": (q[row] - p[row]).clamp(min=0),
            }[rest]
            if end == "all or nothing":
                emitted = []
            return [*emitted, int(draw(weights, u[row, 1:]))]
        emitted.append(token)
    if end == "no bonus":
        return emitted
    last = p[-1]
    if end == "residual" and drafted:
        last = (p[-1] - q[-1]).clamp(min=0)
    return [*emitted, int(draw(last, u[-1, 1:]))]


for name, slip, hint in [
    (
        "as_it_was",
        dict(rest="last absolute", ratio="epsilon", end="no bonus"),
        "Bugs are left. Work the docstring's two examples by hand first.",
    ),
    (
        "residual_not_clipped",
        dict(rest="absolute"),
        "Where q is above p the draft has proposed more than its share: the residual is 0 there.",
    ),
    (
        "resampled_at_the_last_position",
        dict(rest="last row"),
        "The new token stands where the rejected one stood: use the row of the rejection.",
    ),
    (
        "last_residual",
        dict(rest="last residual"),
        "Right formula, wrong row: the residual belongs to the row of the rejection.",
    ),
    (
        "drawn_from_the_target",
        dict(rest="target"),
        "Accepted drafts cover min(p, q) already. Drawing from p counts this share twice.",
    ),
    (
        "drawn_from_the_surplus",
        dict(rest="draft's surplus"),
        "The residual is what the target has more than the draft, not the other way round.",
    ),
    (
        "epsilon_in_the_ratio",
        dict(ratio="epsilon"),
        "A drafted token has q above 0, so nothing needs 1e-8. It rejects rare tokens.",
    ),
    ("ratio_upside_down", dict(ratio="upside down"), "It is p over q."),
    (
        "no_bonus_token",
        dict(end="no bonus"),
        "If all stay, the target's last row is there already: draw a token from it.",
    ),
    (
        "residual_for_the_bonus",
        dict(end="residual"),
        "Behind the last drafted token nothing was drafted: draw from p itself.",
    ),
    (
        "all_or_nothing",
        dict(end="all or nothing"),
        "The tokens in front of the rejected one stay.",
    ),
]:
    answers.wrong("16.2", hint, name)(partial(slipped_verification, **slip))


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


def softmaxed(logits, temperature, greedy="one hot"):
    """[B, T, V] logits -> probabilities."""
    scaled = logits / temperature[:, None, None]
    if greedy == "divided":
        return scaled.softmax(-1)
    best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    if greedy == "as at temperature 1":
        best = logits.softmax(-1)
    return torch.where(temperature[:, None, None] == 0, best, scaled.softmax(-1))


def slipped_batch(
    target_logits,
    draft_logits,
    temperature,
    drafted,
    u,
    left,
    *,
    greedy="one hot",
    on_draft=True,
    stops="own",
    bonus="target",
    cut=True,
    rest="residual",
):
    """verify_batch with some slips, spelled by switches."""
    p = softmaxed(target_logits, temperature, greedy)
    same = temperature if on_draft else torch.ones_like(temperature)
    q = softmaxed(draft_logits, same, greedy)
    rows, count = torch.arange(len(drafted)), drafted.shape[1]
    p_there = p[:, :-1].gather(2, drafted[..., None]).squeeze(2)
    q_there = q.gather(2, drafted[..., None]).squeeze(2)
    passes = (u[:, :-1, 0] * q_there < p_there).long()
    kept = passes.cumprod(1).sum(1) if stops != "counted" else passes.sum(1)
    if stops == "together":
        kept = kept.min().expand_as(kept)
    behind = q[:, -1:] if bonus == "residual" else torch.zeros_like(p[:, :1])
    padded = torch.cat([q, behind], 1)
    weights = (p[rows, kept] - padded[rows, kept]).clamp(min=0)
    if rest == "target":
        weights = p[rows, kept]
    running = weights.cumsum(1)
    mass = u[rows, kept, 1] * running[:, -1]
    drawn = torch.searchsorted(running, mass[:, None], right=True).squeeze(1)
    tokens = torch.cat([drafted, drafted[:, :1]], 1)
    tokens[rows, kept] = drawn.clamp(max=p.shape[-1] - 1)
    counts = kept + 1
    if bonus == "none":
        counts = counts.clamp(max=count)
    counts = torch.minimum(counts, left) if cut else counts
    return tokens.masked_fill(torch.arange(count + 1) >= counts[:, None], -1), counts


for name, slip, hint in [
    (
        "division_by_temperature_0",
        dict(greedy="divided"),
        "Temperature 0 divides by 0. Put all of the probability on the largest logit there.",
    ),
    (
        "greedy_rows_sampled",
        dict(greedy="as at temperature 1"),
        "At temperature 0 a row's probability is 1 at the largest logit and 0 elsewhere.",
    ),
    (
        "temperature_on_the_target_only",
        dict(on_draft=False),
        "The draft sampled at this temperature, too. The rule needs what it really sampled from.",
    ),
    (
        "one_rejection_stops_the_batch",
        dict(stops="together"),
        "Each sequence goes as far as its own first rejection, not as the batch's first.",
    ),
    (
        "counts_what_passes",
        dict(stops="counted"),
        "A token that would pass behind a rejected one is lost: count the leading ones (cumprod).",
    ),
    (
        "residual_for_rows_that_accepted",
        dict(bonus="residual"),
        "A row that accepted all has no draft at its last position: subtract nothing there.",
    ),
    ("no_bonus_token", dict(bonus="none"), "A row that accepted all emits K + 1 tokens."),
    (
        "max_tokens_overshot",
        dict(cut=False),
        "A step may emit more tokens than a sequence may still have: cut at left.",
    ),
    (
        "drawn_from_the_target",
        dict(rest="target"),
        "After a rejection the token comes from max(0, p - q), not from p.",
    ),
]:
    answers.wrong("16.3", hint, name)(partial(slipped_batch, **slip))


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
