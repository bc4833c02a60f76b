"""Wrong answers to lesson 10's exercises: real slips, and the hint for each."""

from functools import reduce

import torch

from lessons.l08_online_softmax import naive as online
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 10.1 merge partial results

answers.slips(
    "10.1",
    """
    averaged: You average the splits. A split weighs as much as its keys: exp(its lse).
    - torch.where(seen, torch.exp(partial_lse - lse[..., None]), 0.0)
    + torch.full_like(partial_lse, 1 / partial_lse.shape[-1])

    averaged_over_seen: You average the splits that saw keys. Each weighs exp(its lse), not 1.
    - torch.where(seen, torch.exp(partial_lse - lse[..., None]), 0.0)
    + seen.to(lse.dtype) / seen.sum(-1, keepdim=True).clamp(min=1)

    weighted_by_lse: You weigh by the lse itself. It is a logarithm: the weight is exp(lse).
    - weights = torch.where(seen, torch.exp(partial_lse - lse[..., None]), 0.0)
    + weights = torch.where(seen, partial_lse, 0.0)
    + weights = weights / weights.sum(-1, keepdim=True)

    no_max: exp(1000) overflows and exp(-1000) is 0. Subtract the largest lse first.
    - torch.logsumexp(partial_lse, dim=-1)
    + partial_lse.exp().sum(-1).log()

    empty_counts: You give an empty split the lse 0, and so the weight exp(0) = 1. Its lse is −inf.
    - torch.logsumexp(partial_lse, dim=-1)
    + torch.logsumexp(torch.where(seen, partial_lse, 0.0), dim=-1)

    unwritten_rows: 0 · NaN is NaN: replace the rows of empty splits before you weigh them.
    - torch.where(seen[..., None], partial_out, 0.0)
    + partial_out

    all_empty_is_nan: Where all splits are empty you get −inf − −inf or 0 / 0. The answer is 0 and
        −inf.
    - torch.where(seen, torch.exp(partial_lse - lse[..., None]), 0.0)
    + torch.exp(partial_lse - lse[..., None])

    base_2: You take the lse for a log2. It is the natural logarithm: exp, not exp2.
    - lse = torch
    + partial_lse = partial_lse * 0.6931471805599453  # exp2(x) = exp(x · log 2)
    + lse = torch

    base_2_given: You multiply the lse by log2(e) and then use exp. One or the other.
    - lse = torch
    + partial_lse = partial_lse * 1.4426950408889634  # log2(e)
    + lse = torch

    not_normalised: The weights do not sum to 1: divide by their sum.
    - lse[..., None]
    + partial_lse.amax(-1, keepdim=True)

    lse_is_the_max: You return the largest lse. All splits weigh more: add log Σ exp(lse − max).
    - weights, values), lse
    + weights, values), partial_lse.amax(-1)

    lse_summed: You add the logarithms. Add the exponentials, then take the logarithm.
    - weights, values), lse
    + weights, values), partial_lse.sum(-1)

    lse_of_the_last: You return the last split's lse, not that of all of them.
    - weights, values), lse
    + weights, values), partial_lse[..., -1]

    softmax_over_heads: Your softmax runs over the heads. It belongs over the splits, the last axis.
    - lse[..., None]
    + torch.logsumexp(partial_lse, dim=1, keepdim=True)

    always_float32: You return float32 whatever comes in.
    - weights, values), lse
    + weights, values).float(), lse.float()

    max_from_-1e4: Your maximum never falls below a number of yours. What if every lse is lower
        still?
    - lse = torch.logsumexp(partial_lse, dim=-1)
    + top = partial_lse.amax(-1, keepdim=True).clamp(min=-1e4)
    + lse = top[..., 0] + (partial_lse - top).exp().sum(-1).log()

    one_max_over_heads: You subtract one maximum over all heads. A head far below it loses all of
        its weight.
    - lse = torch.logsumexp(partial_lse, dim=-1)
    + top = partial_lse.amax((1, 2), keepdim=True)
    + top = top.masked_fill(top == -torch.inf, 0.0)
    + lse = top[..., 0] + (partial_lse - top).exp().sum(-1).log()

    assumes_dense: You read partial_lse as if it were dense. It may be a slice.
    - seen = partial_lse
    + strides = torch.empty(partial_lse.shape).stride()
    + partial_lse = torch.as_strided(partial_lse, partial_lse.shape, strides)
    + seen = partial_lse

    one_split_as_it_is: A single split may be one without keys: its row was never written.
    - seen = partial_lse
    + if partial_lse.shape[-1] == 1:
    +     return partial_out[..., 0, :], partial_lse[..., 0]
    + seen = partial_lse

    sequence_by_sequence: A Python loop runs over the sequences.
    - return torch.einsum("bhs,bhsd->bhd", weights, values), lse
    + outs = [torch.einsum("hs,hsd->hd", *own) for own in zip(weights, values)]
    + return torch.stack(outs), lse
    """,
)


@answers.alternative("10.1")
def by_lesson_8(partial_out, partial_lse):
    parts = (
        online.from_state(partial_out[..., s, :], partial_lse[..., s])
        for s in range(partial_lse.shape[-1])
    )
    return online.finish(reduce(online.merge, parts))


# ---------------------------------------------------------------- 10.2 predict

answers.slips(
    "10.2",
    """
    a_program_per_query_head: The query heads of a KV head share a program: count KV heads.
    - programs = batch * num_kv_heads
    + programs = batch * num_heads

    waves_rounded_down: One program too many starts another wave: round up.
    - -(-programs // num_slots)
    + max(1, programs // num_slots)

    first_wave_alone: You look at the first wave alone. The last one takes as long.
    - programs / (waves * num_slots)
    + min(1.0, programs / num_slots)

    last_wave_alone: You look at the last wave alone. Average over all of them.
    - programs / (waves * num_slots)
    + ((programs - 1) % num_slots + 1) / num_slots

    waves_not_whole: Waves are whole: divide by waves · slots, not by the slots of one.
    - programs / (waves * num_slots)
    + programs / num_slots

    written_not_read: The partials are written by one kernel and read by the other: twice.
    - partial_bytes = 2 * batch
    + partial_bytes = batch

    a_partial_per_kv_head: Each query head has its own result, so its own partials.
    - partial_bytes = 2 * batch * num_heads
    + partial_bytes = 2 * batch * num_kv_heads

    lse_forgotten: A partial result is D values and one lse.
    - (head_dim + 1) * 4 if
    + head_dim * 4 if

    partials_in_16_bits: Partials are float32, because they are still to be summed.
    - (head_dim + 1) * 4 if
    + (head_dim + 1) * 2 if

    k_alone: K and V are read, not K alone.
    - kv_bytes = 2 * batch
    + kv_bytes = batch

    one_split_writes_partials: One split is the result already: no partials.
    - if num_splits > 1 else 0

    always_two_bytes: You count 2 bytes a value of K and V, whatever itemsize says.
    - head_dim * itemsize
    + head_dim * 2

    k_and_v_per_query_head: K and V have num_kv_heads heads, read once for all their queries.
    - context_len * num_kv_heads
    + context_len * num_heads

    one_sequence: Every sequence has its partials.
    - partial_bytes = 2 * batch * num_heads
    + partial_bytes = 2 * num_heads
    """,
)


@answers.alternative("10.2")
def by_rows(batch, num_heads, num_kv_heads, head_dim, context_len, num_splits, num_slots, itemsize):
    programs, waves = batch * num_kv_heads * num_splits, 0
    while waves * num_slots < programs:
        waves += 1
    group = num_heads // num_kv_heads
    ratio = (
        group * num_splits * (4 * head_dim + 4) / (context_len * head_dim * itemsize)
        if num_splits > 1
        else 0.0
    )
    return programs, waves, programs / waves / num_slots, ratio


# ---------------------------------------------------------------- 10.3 the kernel

answers.slips(
    "10.3",
    """
    one_step: Your loop ends after 16 splits.
    - range(0, num_splits, BLOCK_S)
    + range(0, tl.minimum(num_splits, BLOCK_S), BLOCK_S)

    whole_steps: Splits after the last whole step of 16 are lost: mask the last step instead.
    - range(0, num_splits, BLOCK_S)
    + range(0, num_splits // BLOCK_S * BLOCK_S, BLOCK_S)

    absent_splits_weigh: Masked lanes load the lse 0, and so weigh exp(0): other=float('-inf').
    - mask=there, other=float("-inf")
    + mask=there, other=0.0

    empty_counts: An empty split weighs exp(0) in your sum. Its lse is −inf, its weight 0.
    - value = tl.where((lse == float("-inf"))[:, None], 0.0, value)
    + lse = tl.where(there & (lse == float("-inf")), 0.0, lse)
    + value = tl.where(value == value, value, 0.0)

    reads_unwritten: 0 · NaN is NaN: replace the values of empty splits by 0 before you weigh them.
    - value = tl.where((lse == float("-inf"))[:, None], 0.0, value)

    frozen_max: You keep the first step's maximum. A later step may hold a larger lse: exp
        overflows.
    - m_new = tl.maximum(m_i, tl.max(lse, axis=0))
    + m_new = tl.maximum(m_i, tl.max(lse, axis=0))
    + if start > 0:
    +     m_new = m_i

    absent_at_-1e4: Masked lanes load the lse −10000, which may be the largest: other=float('-inf').
    - mask=there, other=float("-inf")
    + mask=there, other=-1e4

    no_max: exp(1000) overflows. Subtract the running maximum.
    - base = tl.where(m_new == float("-inf"), 0.0, m_new)
    - alpha = tl.exp(m_i - base)
    + base, alpha = 0.0, 1.0

    nothing_minus_nothing: Before any split with keys the maximum is −inf: −inf − −inf is NaN.
    - tl.where(m_new == float("-inf"), 0.0, m_new)
    + m_new

    zero_over_zero: A row without any key divides 0 by 0. It gives zeros.
    - tl.where(l_i == 0.0, 1.0, l_i)
    + l_i

    base_2: exp2 of a natural logarithm: use exp.
    - tl.exp(lse - base)
    + tl.exp2(lse - base)

    averaged: You average the splits. Each weighs exp(its lse).
    - alpha = tl.exp(m_i - base)
    - p = tl.exp(lse - base)
    + alpha = 1.0
    + p = tl.where(lse > float("-inf"), 1.0, 0.0)

    stale_acc: When the maximum grows, l_i shrinks but acc does not.
    - acc = acc * alpha
    + acc = acc

    stale_l: When the maximum grows, acc shrinks but l_i does not.
    - l_i = l_i * alpha
    + l_i = l_i

    not_divided: The weighted values are not divided by the sum of the weights.
    - / tl.where(l_i == 0.0, 1.0, l_i)

    depends_on_the_room: Your result depends on the room for splits. Empty ones must not change a
        bit.
    - out = acc /
    + out = acc * (1.0 + 1e-6 * num_splits) /
    """,
)


@triton.jit
def two_pass_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest lse of the row first, then split by split."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < HEAD_DIM
    lses, values = partial_lse_ptr + row * num_splits, partial_out_ptr + row * num_splits * HEAD_DIM
    top = tl.full((), float("-inf"), tl.float32)
    for split in range(0, num_splits):
        top = tl.maximum(top, tl.load(lses + split))
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(0, num_splits):
        lse = tl.load(lses + split)
        if lse > float("-inf"):
            weight = tl.exp(lse - top)
            total += weight
            acc += weight * tl.load(values + split * HEAD_DIM + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * HEAD_DIM + column, acc / tl.where(total > 0, total, 1.0), mask=inside)


@answers.alternative("10.3")
def in_two_passes(partial_out, partial_lse):
    rows, num_splits, head_dim = partial_out.shape
    out = partial_out.new_empty(rows, head_dim)
    block = triton.next_power_of_2(head_dim)
    two_pass_kernel[rows,](
        partial_out, partial_lse, out, num_splits, HEAD_DIM=head_dim, BLOCK=block
    )
    return out


def one_after_the_other(partial_out, partial_lse):
    """Lesson 8's merge, split by split."""
    parts = [
        online.from_state(partial_out[:, s], partial_lse[:, s]) for s in range(partial_lse.shape[1])
    ]
    return online.finish(reduce(online.merge, parts))[0]


attacks(answers, "10.3", one_after_the_other)


# ---------------------------------------------------------------- 10.4 the batch must not show

answers.slips(
    "10.4",
    """
    as_given: More than one bug is left. Work the docstring's example by hand first.
    = number_by_the_batch, l_without_m, heads_across, window_per_split

    three_left_size_fixed: Begin with the merge: sums relative to different maxima are added. More
        may be wrong.
    = l_without_m, heads_across, window_per_split

    three_left_m_fixed: The merge is right. Look at the splits' size, the heads and the window.
    = number_by_the_batch, heads_across, window_per_split

    three_left_heads_fixed: Begin with the merge: sums relative to different maxima are added. More
        may be wrong.
    = number_by_the_batch, l_without_m, window_per_split

    three_left_window_fixed: Begin with the merge: sums relative to different maxima are added. More
        may be wrong.
    = number_by_the_batch, l_without_m, heads_across

    number_by_the_batch: The number of splits depends on the batch. Use split_size.
    - m = torch.full(
    + split_size = max(1, -(-length // max(1, 16 // (len(q) * num_kv_heads))))
    + m = torch.full(

    l_without_m: You add l and acc of splits whose maxima differ. Bring them to one maximum first.
    - torch.maximum(m, scores.amax(-1))
    + scores.amax(-1)
    - torch.exp(m - m_new)
    + torch.ones_like(m)

    heads_across: Your rows mix query heads of different KV heads: heads 0 … group-1 share
        KV head 0.
    - q[b].view(num_kv_heads, group, head_dim)
    + q[b].view(group, num_kv_heads, head_dim).transpose(0, 1)

    window_per_split: Each split keeps its own last `window` rows. The window counts from the
        sequence's end.
    - first = 0 if window is None else max(length - window, 0)
    + first = 0
    - cache[b, start :
    + cache[b, max(start, min(start + split_size, length) - (window or length)) :

    splits_from_key_0: Splits begin at the first row that counts: yours begin at multiples of
        split_size, so a window of one split is in two.
    - for start in range(first, length, split_size):
    + for start in range(first - first % split_size, length, split_size):
    - cache[b, start :
    + cache[b, max(start, first) :

    key_dropped: The last key of each split is lost: end is exclusive already.
    - min(start + split_size, length)
    + min(start + max(split_size - 1, 1), length)

    key_doubled: Splits overlap by one key, which then counts twice.
    - cache[b, start :
    + cache[b, max(start - 1, 0) :

    size_by_capacity: You cut the capacity, not the rows in use: a longer cache changes the bits.
    - m = torch.full(
    + split_size = max(1, -(-k_cache.shape[1] // 5))
    + m = torch.full(

    size_by_longest: You cut by the longest sequence, so a neighbour changes the bits.
    - m = torch.full(
    + split_size = max(1, -(-int(context_lens.max()) // 5))
    + m = torch.full(

    averaged: You average the splits. Each weighs exp(m) · l.
    - l = l * alpha + p.sum(-1)
    - acc = acc * alpha[..., None] + torch.bmm(p, v.transpose(0, 1))
    + l = l + 1
    + acc = acc + torch.bmm(p, v.transpose(0, 1)) / p.sum(-1, keepdim=True)

    stale_acc: l is brought to the common maximum, acc is not.
    - acc * alpha[..., None]
    + acc

    max_from_0: Your maximum starts at a number. What if all scores are below it? Start at −inf.
    - m = torch.full((num_kv_heads, group), -torch.inf)
    + m = torch.zeros(num_kv_heads, group)

    no_scale: The scores are not scaled by 1 / √D.
    - * head_dim**-0.5

    no_window: You ignore `window`.
    - first = 0 if window is None else max(length - window, 0)
    + first = 0

    window_off_by_one: Your window holds one key too many.
    - max(length - window, 0)
    + max(length - window - 1, 0)

    empty_is_nan: A sequence without keys gives zeros.
    - torch.zeros_like(q)
    + torch.full_like(q, torch.nan)

    no_splits: Right, but in one piece: all scores exist at once. Take split_size keys at a time.
    - m = torch.full(
    + split_size = max(1, length)
    + m = torch.full(
    """,
)


@answers.alternative("10.4")
def merged_partials(q, k_cache, v_cache, context_lens, split_size, window=None):
    (_, num_heads, head_dim), group = q.shape, q.shape[1] // k_cache.shape[2]
    results = []
    for one, k, v, length in zip(q, k_cache, v_cache, context_lens.tolist()):
        part, first = (
            online.identity((num_heads,), head_dim),
            0 if window is None else max(length - window, 0),
        )
        for start in range(first, length, split_size):
            keys, values = (
                x[start : min(start + split_size, length)].repeat_interleave(group, dim=1)
                for x in (k, v)
            )
            scores = torch.einsum("hd,nhd->hn", one, keys) * head_dim**-0.5
            found = online.from_scores(scores[:, None], values.transpose(0, 1))
            part = online.merge(part, online.Partial(*(x[:, 0] for x in found)))
        results.append(online.finish(part)[0])
    return torch.stack(results)
