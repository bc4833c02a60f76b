"""Wrong answers to lesson 08's exercises: real slips, each with a hint."""

import torch

from lessons.l08_online_softmax.naive import Partial, finish, from_scores
from solutions.l08_online_softmax import ALL_LANES, LOG2E
from tests.exercises.wrong import Answers

answers = Answers()


def anchored(m):
    """m, and 0 where it is −inf."""
    return m.masked_fill(m == -torch.inf, 0.0)


# ---------------------------------------------------------------- 8.1 two parts become one

answers.slips(
    "8.1",
    """
    frozen_max: You keep a's max. What if b holds a larger score?
    - m = torch.maximum(a.m, b.m)
    + m = a.m

    no_max: You return to m = 0, so to exp(score) itself. What is exp(400) in float32?
    - m = torch.maximum(a.m, b.m)
    + m = 0 * b.l
    - m.masked_fill(m == -torch.inf, 0.0)
    + m

    max_starts_at_0: Your max never falls below 0. Where all scores are -1000, every weight becomes
        0.
    - m = torch.maximum(a.m, b.m)
    + m = torch.maximum(a.m, b.m).clamp(min=0)

    stale_acc: When the max grows, l of a is rescaled but acc of a is not.
    - a.acc * shrink_a[..., None]
    + a.acc

    stale_l: When the max grows, acc of a is rescaled but l of a is not.
    - a.l * shrink_a
    + a.l

    b_as_it_is: You rescale a alone. b has to shrink where a holds the larger score.
    - b.l * shrink_b
    + b.l
    - b.acc * shrink_b[..., None]
    + b.acc

    no_rescaling: Sums relative to different maxima cannot be added.
    - a.l * shrink_a + b.l * shrink_b
    + a.l + b.l
    - a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None]
    + a.acc + b.acc

    nan_where_nothing_is_seen: -inf - -inf is NaN: a row that has seen nothing needs care.
    - m.masked_fill(m == -torch.inf, 0.0)
    + m

    a_plain_tuple: The caller reads merged.m: return a Partial.
    - return Partial(
    + return (

    base_2: You shrink by exp2(m - m_new). exp(x) is exp2(x · log2 e).
    - torch.exp(a.m - anchor), torch.exp(b.m - anchor)
    + torch.exp2(a.m - anchor), torch.exp2(b.m - anchor)

    mean_of_both: You average. Sums of parts are added; only the division at the end makes a mean.
    - a.l * shrink_a + b.l * shrink_b
    + (a.l * shrink_a + b.l * shrink_b) / 2
    - a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None]
    + (a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None]) / 2

    divided_early: You divide acc by l. A Partial keeps the sum; `finish` divides.
    - a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None]
    + (a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None])
    + / (a.l * shrink_a + b.l * shrink_b)[..., None]

    max_is_a_sum: You take log(exp(a.m) + exp(b.m)) for the max: m is the larger of the two.
    - m = torch.maximum(a.m, b.m)
    + m = torch.logaddexp(a.m, b.m)

    in_place: You write into a.acc. The caller may merge a with something else as well.
    - a.acc * shrink_a[..., None] + b.acc * shrink_b[..., None]
    + a.acc.mul_(shrink_a[..., None]).add_(b.acc * shrink_b[..., None])
    """,
)


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

answers.slips(
    "8.2",
    """
    as_given: More than one bug is left. Work the example by hand.
    = max_starts_at_0, stale_acc, lse_without_the_max

    two_bugs_left_max: Two bugs are left: acc when the max grows, and the last line.
    = stale_acc, lse_without_the_max

    two_bugs_left_acc: Two bugs are left: where the max starts, and the last line.
    = max_starts_at_0, lse_without_the_max

    two_bugs_left_lse: Two bugs are left, both inside a split.
    = max_starts_at_0, stale_acc

    max_starts_at_0: Your max starts at 0: a row of -1000 never goes below it, and exp2(-1443) is 0.
    - torch.full((len(scores),), -torch.inf)
    + torch.zeros(len(scores))

    stale_acc: When the max grows, l is rescaled but acc is not.
    - acc = acc * alpha[:, None] + p
    + acc = acc + p

    lse_without_the_max: log2 of the sum relative to the max: the max has to be added back.
    - :, None ], m + torch.log2(l)
    + :, None ], torch.log2(l)

    stale_l: When the max grows, acc is rescaled but l is not.
    - l = l * alpha + p
    + l = l + p

    frozen_max: You keep the first tile's max. What if a later tile holds a larger score?
    - torch.maximum(m, tile.amax(-1))
    + tile.amax(-1) if start == begin else m

    no_max: You exponentiate raw scores. What is exp(400) in float32?
    - m_new = torch.maximum(m, tile.amax(-1))
    + m_new = m = torch.zeros(len(scores))

    exp2_without_log2e: exp2(score) is not exp(score): multiply the score by log2 e first.
    - scores[:, columns] * LOG2E
    + scores[:, columns]

    natural_lse: Your lse is a natural logarithm; log2 is asked for.
    - :, None ], m + torch.log2(l)
    + :, None ], (m + torch.log2(l)) / LOG2E

    drops_the_tail: The last, shorter tile of a split is never read.
    - range(begin, end, block)
    + range(begin, end - block + 1, block)

    nan_where_nothing_is_seen: -inf - -inf is NaN: a tile that is all masked needs an anchor.
    - m_new.masked_fill(m_new == -torch.inf, 0.0)
    + m_new
    - - m.masked_fill(m == -torch.inf, 0.0)
    + - m

    all_masked_row_is_nan: 0 / 0 is NaN: a row, or a split, that sees nothing gives 0.
    - outs.append(acc / l.masked_fill(l == 0, 1.0)[:, None])
    + outs.append(acc / l[:, None])
    - outs).sum(0) / l.masked_fill(l == 0, 1.0)[
    + outs).sum(0) / l[

    largest_split_alone: You keep the split with the largest lse; the others count too.
    - torch.exp2(lses - m.masked_fill(m == -torch.inf, 0.0))
    + (lses == m).float() * (m > -torch.inf)

    lse_as_weight: You weigh by the logarithm itself. The weight is exp2 of it.
    - torch.exp2(lses - m.masked_fill(m == -torch.inf, 0.0))
    + lses.masked_fill(lses == -torch.inf, 0.0)

    splits_averaged: You average the splits. Each has the weight exp2(lse2).
    - return (weights[:, :, None] * outs).sum(0) / l.masked_fill(l == 0, 1.0)[
    -     :, None
    - ], m
    + return outs.mean(0), m

    split_lse_without_the_max: A split's lse lacks its max: add m to the logarithm of l.
    - lses.append(m + torch.log2(l))
    + lses.append(torch.log2(l))

    max_starts_at_-1e4: Your max starts at -10000: a row of -20000 never goes below it. Start at
        -inf.
    - (len(scores),), -torch.inf)
    + (len(scores),), -1e4)

    empty_split_counts: An empty split gets lse 0, the weight of one score 0. log of nothing is
        -inf.
    - lses.append(m + torch.log2(l))
    + lses.append(m + torch.log2(l) if end > begin else torch.zeros(len(scores)))
    """,
)


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

answers.slips(
    "8.3",
    """
    writes_forgotten: The probabilities are written as well.
    - 2 if num_columns <= max_block else 3
    + 1 if num_columns <= max_block else 2
    - 4 * pass_ms
    + 3 * pass_ms

    three_passes_read_twice: Three passes: max, sum, divide. That is three reads, and a write.
    - 4 * pass_ms
    + 3 * pass_ms

    always_online: A row that fits into registers is read once, not twice.
    - 2 if num_columns <= max_block else 3
    + 3

    always_one_block: A row longer than max_block does not fit: it is read twice.
    - 2 if num_columns <= max_block else 3
    + 2

    online_reads_three_times: The online pass finds max and sum together: two reads.
    - 2 if num_columns <= max_block else 3
    + 2 if num_columns <= max_block else 4

    always_two_bytes: You count 2 bytes a score whatever the dtype.
    - dtype.itemsize
    + 2

    always_four_bytes: You count 4 bytes a score whatever the dtype.
    - dtype.itemsize
    + 4

    gibibytes: A GB is 10⁹ bytes; 2³⁰ bytes are a GiB.
    - (gb_per_s * 1e9)
    + (gb_per_s * 2**30)

    seconds: These are seconds; ms are asked for.
    - (gb_per_s * 1e9) * 1e3
    + (gb_per_s * 1e9)

    microseconds: These are µs; ms are asked for.
    - (gb_per_s * 1e9) * 1e3
    + (gb_per_s * 1e9) * 1e6

    boundary_excluded: max_block columns fit as well.
    - num_columns <= max_block
    + num_columns < max_block

    boundary_one_more: max_block + 1 columns do not fit.
    - num_columns <= max_block
    + num_columns <= max_block + 1

    largest_that_works: That is the largest whole score that works. The next one breaks it.
    - finfo(dtype).max)) + 1
    + finfo(dtype).max))

    power_of_two: That is the exponent for exp2. exp grows by e each step, not by 2.
    - math.log(torch
    + math.log2(torch

    power_of_ten: That is the power of ten. exp grows by e each step, not by 10.
    - math.log(torch
    + math.log10(torch

    bfloat16_like_float16: bfloat16 has float32's 8 bits of exponent: it overflows as late as
        float32.
    - math.log(torch.finfo(dtype).max)
    + math.log(torch.finfo(torch.float16 if dtype.itemsize == 2 else dtype).max)

    overflow_of_the_sum: That is where the sum of all columns overflows; a single exp is asked for.
    - torch.finfo(dtype).max)
    + torch.finfo(dtype).max / num_columns)
    """,
)


@answers.alternative("8.3")
def numbers_by_trying(num_rows, num_columns, dtype, gb_per_s, max_block):
    megabytes = num_rows * num_columns * torch.zeros((), dtype=dtype).element_size() / 1e6
    score = 1
    while torch.tensor(float(score), dtype=torch.float64).exp().to(dtype).isfinite():
        score += 1
    return 4 * megabytes / gb_per_s, (3 - (num_columns <= max_block)) * megabytes / gb_per_s, score


# ---------------------------------------------------------------- 8.4 the butterfly

answers.slips(
    "8.4",
    """
    last_step_skipped: Neighbours never meet: after 16, 8, 4, 2 comes 1.
    - (16, 8, 4, 2, 1)
    + (16, 8, 4, 2)

    first_step_skipped: The two halves of the warp never meet: begin with 16.
    - (16, 8, 4, 2, 1)
    + (8, 4, 2, 1)

    a_step_twice: One step is made twice: sums count twice, and neighbours never meet.
    - (16, 8, 4, 2, 1)
    + (16, 8, 4, 2, 2)

    distances_1_to_5: Distances are powers of two: a round changes one bit of the lane.
    - (16, 8, 4, 2, 1)
    + (1, 2, 3, 4, 5)

    half_the_mask: Your mask names 16 lanes; the others get garbage. All 32 take part.
    - other_m = shfl_xor_sync(ALL_LANES, m, distance)
    - other_l = shfl_xor_sync(ALL_LANES, l, distance)
    + other_m = shfl_xor_sync(0xFFFF, m, distance)
    + other_l = shfl_xor_sync(0xFFFF, l, distance)

    mask_of_lane_0: The mask is one bit a lane, not the number of the lane that wants the result.
    - other_m = shfl_xor_sync(ALL_LANES, m, distance)
    - other_l = shfl_xor_sync(ALL_LANES, l, distance)
    + other_m = shfl_xor_sync(1, m, distance)
    + other_l = shfl_xor_sync(1, l, distance)

    other_l_not_shrunk: The other lane's l is relative to its own m, not to the new one.
    - torch.exp(other_m - anchor)
    + torch.exp(m_new - anchor)

    no_rescaling: Sums relative to different maxima cannot be added.
    - l * torch.exp(m - anchor) + other_l * torch.exp(other_m - anchor)
    + l + other_l

    nan_of_empty_lanes: -inf - -inf is NaN: two lanes that have seen nothing meet.
    - m_new.masked_fill(m_new == -torch.inf, 0.0)
    + m_new

    maxima_added: The max of both lanes is the larger one, not their sum.
    - torch.maximum(m, other_m)
    + m + other_m

    first_l_again: You exchange the l that the lane started with, not the one it has by now.
    - for distance in
    + first_l = l
    + for distance in
    - shfl_xor_sync(ALL_LANES, l, distance)
    + shfl_xor_sync(ALL_LANES, first_l, distance)

    fused_multiply_add: An FMA rounds one product and not the other, so partners differ in the last
        bit.
    - l = l * torch.exp(m - anchor) + other_l * torch.exp(other_m - anchor)
    + product = other_l * torch.exp(other_m - anchor)
    + l = (l.double() * torch.exp(m - anchor).double() + product.double()).float()

    one_exchange_too_many: After five rounds every lane knows everything; the sixth exchange is
        wasted.
    - return m, l
    + return torch.maximum(m, shfl_xor_sync(ALL_LANES, m, 1)), l

    reads_other_registers: No lane can read all registers: max and sum over lanes are yours to
        build.
    - for distance in
    + top = m.max()
    + anchor = top.masked_fill(top == -torch.inf, 0.0)
    + return top.expand(32).clone(), (l * torch.exp(m - anchor)).sum().expand(32).clone()
    + for distance in
    """,
)


@answers.alternative("8.4")
def butterfly_from_small_to_large(m, l, shfl_xor_sync):
    for bit in range(5):
        other_m, other_l = (shfl_xor_sync(-1 & ALL_LANES, x, 1 << bit) for x in (m, l))
        gap = torch.where(m == other_m, 0.0, m - other_m)
        small = torch.exp(-gap.abs())
        l = torch.where(gap >= 0, l, l * small) + torch.where(gap >= 0, other_l * small, other_l)
        m = torch.maximum(m, other_m)
    return m, l
