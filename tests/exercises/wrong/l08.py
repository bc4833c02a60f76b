"""Wrong answers to lesson 08's exercises: real slips, and the hint for whoever made them."""

import math
from functools import partial

import torch

from lessons.l08_online_softmax.naive import Partial, finish, from_scores
from solutions.l08_online_softmax import ALL_LANES, LOG2E
from tests.exercises.wrong import Answers

answers = Answers()


def anchored(m):
    """m, and 0 where it is −inf."""
    return m.masked_fill(m == -torch.inf, 0.0)


# ---------------------------------------------------------------- 8.1 two parts become one


def slipped_merge(
    a,
    b,
    *,
    m="max",
    anchor=True,
    rescale_l="both",
    rescale_acc="both",
    base=math.e,
    mean=False,
    out_of="both",
    in_place=False,
    plain=False,
):
    """merge with one slip. The keyword switches exist only here, to spell the wrong answers
    briefly.
    """
    new = {
        "max": torch.maximum(a.m, b.m),
        "first": a.m,
        "zero": torch.maximum(a.m, b.m).clamp(min=0),
        "none": 0 * b.l,
        "lse": torch.logaddexp(a.m, b.m),
    }[m]
    at = anchored(new) if anchor else new
    shrink_a, shrink_b = (torch.exp((x - at) * math.log(base)) for x in (a.m, b.m))
    one = torch.ones_like(a.l)
    la, lb = (
        (shrink_a if rescale_l in ("both", "a") else one),
        (shrink_b if rescale_l in ("both", "b") else one),
    )
    ca, cb = (
        (shrink_a if rescale_acc in ("both", "a") else one),
        (shrink_b if rescale_acc in ("both", "b") else one),
    )
    if in_place:
        a.acc.mul_(ca[..., None]).add_(b.acc * cb[..., None])
        return Partial(new, a.l * la + b.l * lb, a.acc)
    l, acc = a.l * la + b.l * lb, a.acc * ca[..., None] + b.acc * cb[..., None]
    if mean:
        l, acc = l / 2, acc / 2
    if out_of == "divided":
        acc = acc / l[..., None]
    return (new, l, acc) if plain else Partial(new, l, acc)


for name, slip, hint in [
    ("frozen_max", dict(m="first"), "You keep a's max. What if b holds a larger score?"),
    (
        "no_max",
        dict(m="none", anchor=False),
        "You return to m = 0, so to exp(score) itself. What is exp(400) in float32?",
    ),
    (
        "max_starts_at_0",
        dict(m="zero"),
        "Your max never falls below 0. Where all scores are -1000, every weight becomes 0.",
    ),
    (
        "stale_acc",
        dict(rescale_acc="b"),
        "When the max grows, l of a is rescaled but acc of a is not.",
    ),
    ("stale_l", dict(rescale_l="b"), "When the max grows, acc of a is rescaled but l of a is not."),
    (
        "b_as_it_is",
        dict(rescale_l="a", rescale_acc="a"),
        "You rescale a alone. b has to shrink where a holds the larger score.",
    ),
    (
        "no_rescaling",
        dict(rescale_l="none", rescale_acc="none"),
        "Sums relative to different maxima cannot be added.",
    ),
    (
        "nan_where_nothing_is_seen",
        dict(anchor=False),
        "-inf - -inf is NaN: a row that has seen nothing needs care.",
    ),
    ("a_plain_tuple", dict(plain=True), "The caller reads merged.m: return a Partial."),
    ("base_2", dict(base=2), "You shrink by exp2(m - m_new). exp(x) is exp2(x · log2 e)."),
    (
        "mean_of_both",
        dict(mean=True),
        "You average. Sums of parts are added; only the division at the end makes a mean.",
    ),
    (
        "divided_early",
        dict(out_of="divided"),
        "You divide acc by l. A Partial keeps the sum; `finish` divides.",
    ),
    (
        "max_is_a_sum",
        dict(m="lse"),
        "You take log(exp(a.m) + exp(b.m)) for the max: m is the larger of the two.",
    ),
    (
        "in_place",
        dict(in_place=True),
        "You write into a.acc. The caller may merge a with something else as well.",
    ),
]:
    answers.wrong("8.1", hint, name)(partial(slipped_merge, **slip))


@answers.alternative("8.1")
def merge_by_cases(a, b):
    """Only the smaller side shrinks; where both are −inf, nothing is added."""
    a_larger = a.m >= b.m
    gap = torch.where(a.m == b.m, 0.0, (a.m - b.m).abs())
    small = torch.exp(-gap)
    shrink_a, shrink_b = torch.where(a_larger, 1.0, small), torch.where(a_larger, small, 1.0)
    return Partial(
        torch.where(a_larger, a.m, b.m),
        shrink_a * a.l + shrink_b * b.l,
        shrink_a[..., None] * a.acc + shrink_b[..., None] * b.acc,
    )


# ---------------------------------------------------------------- 8.2 attention in splits


def slipped_splits(
    scores,
    v,
    splits,
    block,
    *,
    start_m=-math.inf,
    grow=True,
    rescale_l=True,
    rescale_acc=True,
    log2e=True,
    anchor=True,
    drop_tail=False,
    use_m=True,
    add_m=True,
    split_lse=True,
    weigh="softmax",
    base2=True,
    empty_lse=None,
    all_nan=False,
):
    """attention_in_splits with some slips, spelled by switches."""
    outs, lses = [], []
    for begin, end in splits:
        m = torch.full((len(scores),), start_m)
        l, acc = torch.zeros(len(scores)), torch.zeros(len(scores), v.shape[1])
        stop = begin + (end - begin) // block * block if drop_tail else end
        for start in range(begin, stop, block):
            columns = slice(start, min(start + block, end))
            tile = scores[:, columns] * (LOG2E if log2e else 1.0)
            m_new = torch.maximum(m, tile.amax(-1)) if (grow or start == begin) else m
            m_new = m_new if use_m else 0 * m_new.nan_to_num()
            at = anchored(m_new) if anchor else m_new
            shrink, weights = (
                torch.exp2(m - at) if use_m else 0 * m_new + 1,
                torch.exp2(tile - at[:, None]),
            )
            l = (l * shrink if rescale_l else l) + weights.sum(-1)
            acc = (acc * shrink[:, None] if rescale_acc else acc) + weights @ v[columns]
            m = m_new
        outs.append(acc / (l if all_nan else l.masked_fill(l == 0, 1.0))[:, None])
        lse = (m if split_lse else 0) + torch.log2(l)
        lses.append(lse if empty_lse is None or end > begin else torch.full_like(lse, empty_lse))
    outs, lses = torch.stack(outs), torch.stack(lses)
    m = lses.amax(0)
    weights = torch.exp2(lses - anchored(m))
    if weigh == "mean":
        weights = torch.ones_like(lses)
    elif weigh == "largest":
        weights = (lses == m).float() * (m > -torch.inf)
    elif weigh == "lse":
        weights = lses.masked_fill(lses == -torch.inf, 0.0)
    l = weights.sum(0)
    out = (weights[:, :, None] * outs).sum(0) / (l if all_nan else l.masked_fill(l == 0, 1.0))[
        :, None
    ]
    lse = (m if add_m else 0) + torch.log2(
        torch.exp2(lses - anchored(m)).sum(0) if weigh == "mean" else l
    )
    return out, lse if base2 else lse * math.log(2)


for name, slip, hint in [
    (
        "as_given",
        dict(start_m=0.0, rescale_acc=False, add_m=False),
        "More than one bug is left. Work the example by hand.",
    ),
    (
        "two_bugs_left_max",
        dict(rescale_acc=False, add_m=False),
        "Two bugs are left: acc when the max grows, and the last line.",
    ),
    (
        "two_bugs_left_acc",
        dict(start_m=0.0, add_m=False),
        "Two bugs are left: where the max starts, and the last line.",
    ),
    (
        "two_bugs_left_lse",
        dict(start_m=0.0, rescale_acc=False),
        "Two bugs are left, both inside a split.",
    ),
    (
        "max_starts_at_0",
        dict(start_m=0.0),
        "Your max starts at 0: a row of -1000 never goes below it, and exp2(-1443) is 0.",
    ),
    ("stale_acc", dict(rescale_acc=False), "When the max grows, l is rescaled but acc is not."),
    (
        "lse_without_the_max",
        dict(add_m=False),
        "log2 of the sum relative to the max: the max has to be added back.",
    ),
    ("stale_l", dict(rescale_l=False), "When the max grows, acc is rescaled but l is not."),
    (
        "frozen_max",
        dict(grow=False),
        "You keep the first tile's max. What if a later tile holds a larger score?",
    ),
    ("no_max", dict(use_m=False), "You exponentiate raw scores. What is exp(400) in float32?"),
    (
        "exp2_without_log2e",
        dict(log2e=False),
        "exp2(score) is not exp(score): multiply the score by log2 e first.",
    ),
    ("natural_lse", dict(base2=False), "Your lse is a natural logarithm; log2 is asked for."),
    ("drops_the_tail", dict(drop_tail=True), "The last, shorter tile of a split is never read."),
    (
        "nan_where_nothing_is_seen",
        dict(anchor=False),
        "-inf - -inf is NaN: a tile that is all masked needs an anchor.",
    ),
    (
        "all_masked_row_is_nan",
        dict(all_nan=True),
        "0 / 0 is NaN: a row, or a split, that sees nothing gives 0.",
    ),
    (
        "splits_averaged",
        dict(weigh="mean"),
        "You average the splits. Each has the weight exp2(lse2).",
    ),
    (
        "largest_split_alone",
        dict(weigh="largest"),
        "You keep the split with the largest lse; the others count too.",
    ),
    (
        "lse_as_weight",
        dict(weigh="lse"),
        "You weigh by the logarithm itself. The weight is exp2 of it.",
    ),
    (
        "split_lse_without_the_max",
        dict(split_lse=False),
        "A split's lse lacks its max: add m to the logarithm of l.",
    ),
    (
        "max_starts_at_-1e4",
        dict(start_m=-1e4),
        "Your max starts at -10000: a row of -20000 never goes below it. Start at -inf.",
    ),
    (
        "empty_split_counts",
        dict(empty_lse=0.0),
        "An empty split gets lse 0, the weight of one score 0. log of nothing is -inf.",
    ),
]:
    answers.wrong("8.2", hint, name)(partial(slipped_splits, **slip))


@answers.wrong(
    "8.2", "The numbers are right, but all scores are weighed at once, not a tile at a time."
)
def all_at_once(scores, v, splits, block):
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - anchored(lse)[:, None]) @ v, lse * LOG2E


@answers.alternative("8.2")
def splits_as_partials(scores, v, splits, block):
    states = []
    for begin, end in splits:
        part = from_scores(scores[:, begin:begin].double(), v[begin:begin].double())
        for start in range(begin, end, block):
            stop = min(start + block, end)
            part = merge_by_cases(
                part, from_scores(scores[:, start:stop].double(), v[start:stop].double())
            )
        states.append(part)
    while len(states) > 1:
        states = [merge_by_cases(*states[:2]), *states[2:]]
    out, lse = finish(states[0])
    return out.float(), (lse * LOG2E).float()


# ---------------------------------------------------------------- 8.3 predict


def slipped_numbers(
    num_rows,
    num_columns,
    dtype,
    gb_per_s,
    max_block,
    *,
    three=4,
    short=2,
    long=3,
    itemsize=None,
    giga=1e9,
    milli=1e3,
    boundary=0,
    score="floor",
):
    """The three numbers with one slip, spelled by a switch."""
    ms = num_rows * num_columns * (itemsize or dtype.itemsize) / (gb_per_s * giga) * milli
    largest = torch.finfo(dtype).max
    limit = {
        "floor": math.floor(math.log(largest)) + 1,
        "below": math.floor(math.log(largest)),
        "log2": math.floor(math.log2(largest)) + 1,
        "log10": math.floor(math.log10(largest)) + 1,
        "half": 12 if dtype.itemsize == 2 else math.floor(math.log(largest)) + 1,
        "sum": math.floor(math.log(largest / num_columns)) + 1,
    }[score]
    return three * ms, (short if num_columns <= max_block + boundary else long) * ms, limit


for name, slip, hint in [
    ("writes_forgotten", dict(three=3, short=1, long=2), "The probabilities are written as well."),
    (
        "three_passes_read_twice",
        dict(three=3),
        "Three passes: max, sum, divide. That is three reads, and a write.",
    ),
    ("always_online", dict(short=3), "A row that fits into registers is read once, not twice."),
    (
        "always_one_block",
        dict(long=2),
        "A row longer than max_block does not fit: it is read twice.",
    ),
    (
        "online_reads_three_times",
        dict(long=4),
        "The online pass finds max and sum together: two reads.",
    ),
    ("always_two_bytes", dict(itemsize=2), "You count 2 bytes a score whatever the dtype."),
    ("always_four_bytes", dict(itemsize=4), "You count 4 bytes a score whatever the dtype."),
    ("gibibytes", dict(giga=2.0**30), "A GB is 10⁹ bytes; 2³⁰ bytes are a GiB."),
    ("seconds", dict(milli=1), "These are seconds; ms are asked for."),
    ("microseconds", dict(milli=1e6), "These are µs; ms are asked for."),
    ("boundary_excluded", dict(boundary=-1), "max_block columns fit as well."),
    ("boundary_one_more", dict(boundary=1), "max_block + 1 columns do not fit."),
    (
        "largest_that_works",
        dict(score="below"),
        "That is the largest whole score that works. The next one breaks it.",
    ),
    (
        "power_of_two",
        dict(score="log2"),
        "That is the exponent for exp2. exp grows by e each step, not by 2.",
    ),
    (
        "power_of_ten",
        dict(score="log10"),
        "That is the power of ten. exp grows by e each step, not by 10.",
    ),
    (
        "bfloat16_like_float16",
        dict(score="half"),
        "bfloat16 has float32's 8 bits of exponent: it overflows as late as float32.",
    ),
    (
        "overflow_of_the_sum",
        dict(score="sum"),
        "That is where the sum of all columns overflows; a single exp is asked for.",
    ),
]:
    answers.wrong("8.3", hint, name)(partial(slipped_numbers, **slip))


@answers.alternative("8.3")
def numbers_by_trying(num_rows, num_columns, dtype, gb_per_s, max_block):
    megabytes = num_rows * num_columns * torch.zeros((), dtype=dtype).element_size() / 1e6
    score = 1
    while torch.tensor(float(score), dtype=torch.float64).exp().to(dtype).isfinite():
        score += 1
    return 4 * megabytes / gb_per_s, (3 - (num_columns <= max_block)) * megabytes / gb_per_s, score


# ---------------------------------------------------------------- 8.4 the butterfly


def slipped_butterfly(
    m,
    l,
    shfl_xor_sync,
    *,
    distances=(16, 8, 4, 2, 1),
    mask=ALL_LANES,
    m_first=False,
    rescale=True,
    anchor=True,
    fused=False,
    add_m=False,
    extra=False,
    old_l=False,
    whole=False,
):
    """warp_merge with one slip, spelled by a switch."""
    if whole:
        top = m.max()
        return top.expand(32).clone(), (l * torch.exp(m - anchored(top))).sum().expand(32).clone()
    first_l = l
    for distance in distances:
        other_m = shfl_xor_sync(mask, m, distance)
        m_new = m + other_m if add_m else torch.maximum(m, other_m)
        at = anchored(m_new) if anchor else m_new
        own, other = torch.exp(m - at), torch.exp(other_m - at)
        if m_first:
            other = torch.exp(m_new - at)
        if not rescale:
            own = other = torch.ones(32)
        other_l = shfl_xor_sync(mask, first_l if old_l else l, distance)
        l = (
            (l.double() * own.double() + (other_l * other).double()).float()
            if fused
            else l * own + other_l * other
        )
        m = m_new
    if extra:
        m = torch.maximum(m, shfl_xor_sync(mask, m, 1))
    return m, l


for name, slip, hint in [
    (
        "last_step_skipped",
        dict(distances=(16, 8, 4, 2)),
        "Neighbours never meet: after 16, 8, 4, 2 comes 1.",
    ),
    (
        "first_step_skipped",
        dict(distances=(8, 4, 2, 1)),
        "The two halves of the warp never meet: begin with 16.",
    ),
    (
        "a_step_twice",
        dict(distances=(16, 8, 4, 2, 2)),
        "One step is made twice: sums count twice, and neighbours never meet.",
    ),
    (
        "distances_1_to_5",
        dict(distances=(1, 2, 3, 4, 5)),
        "Distances are powers of two: a round changes one bit of the lane.",
    ),
    (
        "half_the_mask",
        dict(mask=0xFFFF),
        "Your mask names 16 lanes; the others get garbage. All 32 take part.",
    ),
    (
        "mask_of_lane_0",
        dict(mask=1),
        "The mask is one bit a lane, not the number of the lane that wants the result.",
    ),
    (
        "other_l_not_shrunk",
        dict(m_first=True),
        "The other lane's l is relative to its own m, not to the new one.",
    ),
    ("no_rescaling", dict(rescale=False), "Sums relative to different maxima cannot be added."),
    (
        "nan_of_empty_lanes",
        dict(anchor=False),
        "-inf - -inf is NaN: two lanes that have seen nothing meet.",
    ),
    ("maxima_added", dict(add_m=True), "The max of both lanes is the larger one, not their sum."),
    (
        "first_l_again",
        dict(old_l=True),
        "You exchange the l that the lane started with, not the one it has by now.",
    ),
    (
        "fused_multiply_add",
        dict(fused=True),
        "An FMA rounds one product and not the other, so partners differ in the last bit.",
    ),
    (
        "one_exchange_too_many",
        dict(extra=True),
        "After five rounds every lane knows everything; the sixth exchange is wasted.",
    ),
    (
        "reads_other_registers",
        dict(whole=True),
        "No lane can read all registers: max and sum over lanes are yours to build.",
    ),
]:
    answers.wrong("8.4", hint, name)(partial(slipped_butterfly, **slip))


@answers.alternative("8.4")
def butterfly_from_small_to_large(m, l, shfl_xor_sync):
    for bit in range(5):
        other_m, other_l = (shfl_xor_sync(-1 & ALL_LANES, x, 1 << bit) for x in (m, l))
        gap = torch.where(m == other_m, 0.0, m - other_m)
        small = torch.exp(-gap.abs())
        l = torch.where(gap >= 0, l, l * small) + torch.where(gap >= 0, other_l * small, other_l)
        m = torch.maximum(m, other_m)
    return m, l
