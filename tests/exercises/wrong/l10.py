"""Wrong answers to lesson 10's exercises: real slips, and the hint for whoever made them."""

import math
from functools import partial, reduce

import torch

from lessons.l08_online_softmax import naive as online
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 10.1 merge partial results


def slipped_merge(
    partial_out,
    partial_lse,
    *,
    use_max=True,
    empty_lse=-math.inf,
    hide=True,
    guard=True,
    average=None,
    base=math.e,
    lse_is="sum",
    normalise=True,
    by_key_count=False,
    axis=-1,
    dtype=None,
    lowest=-math.inf,
    one_top=False,
    dense=False,
    first_split=False,
):
    """Merging with one slip. The keyword switches exist only here, to spell the wrong answers
    briefly.
    """
    if first_split and partial_lse.shape[-1] == 1:
        return partial_out[..., 0, :], partial_lse[..., 0]
    if dense:
        strides = torch.empty(partial_lse.shape).stride()
        partial_lse = torch.as_strided(partial_lse, partial_lse.shape, strides)
    seen = partial_lse != -torch.inf
    values = torch.where(seen[..., None], partial_out, 0.0) if hide else partial_out
    scores = torch.where(seen, partial_lse, empty_lse) * math.log(base)
    top = scores.amax(axis, keepdim=True) if use_max else torch.zeros_like(scores)
    top = top.clamp(min=lowest)
    top = top.amax(1, keepdim=True) if one_top else top
    if guard:
        top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top)
    if average:
        weights = torch.ones_like(weights) if average == "all" else seen.to(weights.dtype)
    if by_key_count:
        weights = torch.where(seen, partial_lse, 0.0)
    total = weights.sum(axis, keepdim=True)
    share = (
        weights / (torch.where(total == 0, 1.0, total) if guard else total)
        if normalise
        else weights
    )
    out = torch.einsum("bhs,bhsd->bhd", share, values)
    lse = {
        "sum": (top + total.log()).squeeze(axis)
        if axis == -1
        else torch.logsumexp(partial_lse, -1),
        "max": partial_lse.amax(-1),
        "linear": partial_lse.sum(-1),
        "last": partial_lse[..., -1],
    }[lse_is]
    return out.to(dtype or out.dtype), lse.to(dtype or lse.dtype)


for name, slip, hint in [
    (
        "averaged",
        dict(average="all"),
        "You average the splits. A split weighs as much as its keys: exp(its lse).",
    ),
    (
        "averaged_over_seen",
        dict(average="seen"),
        "You average the splits that saw keys. Each weighs exp(its lse), not 1.",
    ),
    (
        "weighted_by_lse",
        dict(by_key_count=True),
        "You weigh by the lse itself. It is a logarithm: the weight is exp(lse).",
    ),
    (
        "no_max",
        dict(use_max=False),
        "exp(1000) overflows and exp(-1000) is 0. Subtract the largest lse first.",
    ),
    (
        "empty_counts",
        dict(empty_lse=0.0),
        "You give an empty split the lse 0, and so the weight exp(0) = 1. Its lse is −inf.",
    ),
    (
        "unwritten_rows",
        dict(hide=False),
        "0 · NaN is NaN: replace the rows of empty splits before you weigh them.",
    ),
    (
        "all_empty_is_nan",
        dict(guard=False),
        "Where all splits are empty you get −inf − −inf or 0 / 0. The answer is 0 and −inf.",
    ),
    (
        "base_2",
        dict(base=2),
        "You take the lse for a log2. It is the natural logarithm: exp, not exp2.",
    ),
    (
        "base_2_given",
        dict(base=1 / math.log(2)),
        "You multiply the lse by log2(e) and then use exp. One or the other.",
    ),
    ("not_normalised", dict(normalise=False), "The weights do not sum to 1: divide by their sum."),
    (
        "lse_is_the_max",
        dict(lse_is="max"),
        "You return the largest lse. All splits weigh more: add log Σ exp(lse − max).",
    ),
    (
        "lse_summed",
        dict(lse_is="linear"),
        "You add the logarithms. Add the exponentials, then take the logarithm.",
    ),
    (
        "lse_of_the_last",
        dict(lse_is="last"),
        "You return the last split's lse, not that of all of them.",
    ),
    (
        "softmax_over_heads",
        dict(axis=-2),
        "Your softmax runs over the heads. It belongs over the splits, the last axis.",
    ),
    ("always_float32", dict(dtype=torch.float32), "You return float32 whatever comes in."),
    (
        "max_from_-1e4",
        dict(lowest=-1e4),
        "Your maximum never falls below a number of yours. What if every lse is lower still?",
    ),
    (
        "one_max_over_heads",
        dict(one_top=True),
        "You subtract one maximum over all heads. A head far below it loses all of its weight.",
    ),
    (
        "assumes_dense",
        dict(dense=True),
        "You read partial_lse as if it were dense. It may be a slice.",
    ),
    (
        "one_split_as_it_is",
        dict(first_split=True),
        "A single split may be one without keys: its row was never written.",
    ),
]:
    answers.wrong("10.1", hint, name)(partial(slipped_merge, **slip))


@answers.wrong("10.1", "A Python loop runs over the sequences.")
def sequence_by_sequence(partial_out, partial_lse):
    pairs = [slipped_merge(o[None], lse[None]) for o, lse in zip(partial_out, partial_lse)]
    return torch.cat([out for out, _ in pairs]), torch.cat([lse for _, lse in pairs])


@answers.alternative("10.1")
def by_lesson_8(partial_out, partial_lse):
    parts = (
        online.from_state(partial_out[..., s, :], partial_lse[..., s])
        for s in range(partial_lse.shape[-1])
    )
    return online.finish(reduce(online.merge, parts))


# ---------------------------------------------------------------- 10.2 predict


def slipped_plan(
    batch,
    num_heads,
    num_kv_heads,
    head_dim,
    context_len,
    num_splits,
    num_slots,
    itemsize,
    *,
    heads="kv",
    floor=False,
    share="all waves",
    passes=2,
    partial_heads="query",
    with_lse=True,
    partial_itemsize=4,
    k_and_v=2,
    one_is_free=True,
    kv_itemsize=None,
    kv_heads="kv",
    batch_partials=True,
):
    """The plan with one slip, spelled by a switch."""
    programs = batch * (num_kv_heads if heads == "kv" else num_heads) * num_splits
    waves = max(1, programs // num_slots) if floor else -(-programs // num_slots)
    efficiency = {
        "all waves": programs / (waves * num_slots),
        "first wave": min(1.0, programs / num_slots),
        "unbounded": programs / num_slots,
        "last wave": ((programs - 1) % num_slots + 1) / num_slots,
    }[share]
    rows = (
        (batch if batch_partials else 1)
        * (num_heads if partial_heads == "query" else num_kv_heads)
        * num_splits
    )
    partial_bytes = (
        passes * rows * (head_dim + with_lse) * partial_itemsize
        if num_splits > 1 or not one_is_free
        else 0
    )
    kv_bytes = (
        k_and_v * batch * context_len * (num_kv_heads if kv_heads == "kv" else num_heads) * head_dim
    )
    return programs, waves, efficiency, partial_bytes / (kv_bytes * (kv_itemsize or itemsize))


for name, slip, hint in [
    (
        "a_program_per_query_head",
        dict(heads="query"),
        "The query heads of a KV head share a program: count KV heads.",
    ),
    ("waves_rounded_down", dict(floor=True), "One program too many starts another wave: round up."),
    (
        "first_wave_alone",
        dict(share="first wave"),
        "You look at the first wave alone. The last one takes as long.",
    ),
    (
        "last_wave_alone",
        dict(share="last wave"),
        "You look at the last wave alone. Average over all of them.",
    ),
    (
        "waves_not_whole",
        dict(share="unbounded"),
        "Waves are whole: divide by waves · slots, not by the slots of one.",
    ),
    (
        "written_not_read",
        dict(passes=1),
        "The partials are written by one kernel and read by the other: twice.",
    ),
    (
        "a_partial_per_kv_head",
        dict(partial_heads="kv"),
        "Each query head has its own result, so its own partials.",
    ),
    ("lse_forgotten", dict(with_lse=False), "A partial result is D values and one lse."),
    (
        "partials_in_16_bits",
        dict(partial_itemsize=2),
        "Partials are float32, because they are still to be summed.",
    ),
    ("k_alone", dict(k_and_v=1), "K and V are read, not K alone."),
    (
        "one_split_writes_partials",
        dict(one_is_free=False),
        "One split is the result already: no partials.",
    ),
    (
        "always_two_bytes",
        dict(kv_itemsize=2),
        "You count 2 bytes a value of K and V, whatever itemsize says.",
    ),
    (
        "k_and_v_per_query_head",
        dict(kv_heads="query"),
        "K and V have num_kv_heads heads, read once for all their queries.",
    ),
    ("one_sequence", dict(batch_partials=False), "Every sequence has its partials."),
]:
    answers.wrong("10.2", hint, name)(partial(slipped_plan, **slip))


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


@triton.jit
def slipped_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SLIP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    step, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    end = num_splits
    if SLIP == "one step":
        end = tl.minimum(num_splits, BLOCK_S)
    if SLIP == "whole steps":
        end = num_splits // BLOCK_S * BLOCK_S
    for start in range(0, end, BLOCK_S):
        split = start + step
        there = split < num_splits
        partial_row = row * num_splits + split
        absent = float("-inf")
        if SLIP == "absent splits weigh":
            absent = 0.0
        if SLIP == "absent at -1e4":
            absent = -1e4
        lse = tl.load(partial_lse_ptr + partial_row, mask=there, other=absent)
        value = tl.load(
            partial_out_ptr + partial_row[:, None] * HEAD_DIM + column[None, :],
            mask=there[:, None] & (column[None, :] < HEAD_DIM),
            other=0.0,
        )
        if SLIP == "empty counts":
            lse = tl.where(there & (lse == float("-inf")), 0.0, lse)
            value = tl.where(value == value, value, 0.0)
        if SLIP != "reads unwritten":
            value = tl.where((lse == float("-inf"))[:, None], 0.0, value)
        m_new = tl.maximum(m_i, tl.max(lse, axis=0))
        if SLIP == "frozen max" and start > 0:
            m_new = m_i
        base = m_new
        if SLIP == "no max":
            base = 0.0
        elif SLIP != "nothing minus nothing":
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        shrink = tl.exp(m_i - base)
        if SLIP == "no max":
            shrink = 1.0
        weights = tl.exp(lse - base)
        if SLIP == "base 2":
            weights = tl.exp2(lse - base)
        if SLIP == "averaged":
            weights = tl.where(lse > float("-inf"), 1.0, 0.0)
            shrink = 1.0
        l_i = l_i * shrink + tl.sum(weights, axis=0)
        if SLIP == "stale l":
            l_i = l_i / tl.where(shrink == 0.0, 1.0, shrink)
        if SLIP == "stale acc":
            shrink = 1.0
        acc = acc * shrink + tl.sum(weights[:, None] * value, axis=0)
        m_i = m_new
    divisor = l_i
    if SLIP != "0 / 0":
        divisor = tl.where(l_i == 0.0, 1.0, l_i)
    if SLIP == "not divided":
        divisor = 1.0
    if SLIP == "drift":
        acc = acc * (1.0 + 1e-6 * num_splits)
    tl.store(out_ptr + row * HEAD_DIM + column, acc / divisor, mask=column < HEAD_DIM)


def slipped_combine(partial_out, partial_lse, *, slip):
    """The exercise's wrapper around a kernel with one slip."""
    rows, num_splits, head_dim = partial_out.shape
    out = partial_out.new_full((rows, head_dim), torch.nan)
    slipped_kernel[rows,](
        partial_out,
        partial_lse,
        out,
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_S=16,
        SLIP=slip,
    )
    return out


for name, slip, hint in [
    ("one_step", "one step", "Your loop ends after 16 splits."),
    (
        "whole_steps",
        "whole steps",
        "Splits behind the last whole step of 16 are lost: mask the last step instead.",
    ),
    (
        "absent_splits_weigh",
        "absent splits weigh",
        "Masked lanes load the lse 0, and so weigh exp(0): other=float('-inf').",
    ),
    (
        "empty_counts",
        "empty counts",
        "An empty split weighs exp(0) in your sum. Its lse is −inf, its weight 0.",
    ),
    (
        "reads_unwritten",
        "reads unwritten",
        "0 · NaN is NaN: replace the values of empty splits by 0 before you weigh them.",
    ),
    (
        "frozen_max",
        "frozen max",
        "You keep the first step's maximum. A later step may hold a larger lse: exp overflows.",
    ),
    (
        "absent_at_-1e4",
        "absent at -1e4",
        "Masked lanes load the lse −10000, which may be the largest: other=float('-inf').",
    ),
    ("no_max", "no max", "exp(1000) overflows. Subtract the running maximum."),
    (
        "nothing_minus_nothing",
        "nothing minus nothing",
        "Before any split with keys the maximum is −inf: −inf − −inf is NaN.",
    ),
    ("zero_over_zero", "0 / 0", "A row without any key divides 0 by 0. It gives zeros."),
    ("base_2", "base 2", "exp2 of a natural logarithm: use exp."),
    ("averaged", "averaged", "You average the splits. Each weighs exp(its lse)."),
    ("stale_acc", "stale acc", "When the maximum grows, l_i shrinks but acc does not."),
    ("stale_l", "stale l", "When the maximum grows, acc shrinks but l_i does not."),
    (
        "not_divided",
        "not divided",
        "The weighted values are not divided by the sum of the weights.",
    ),
    (
        "depends_on_the_room",
        "drift",
        "Your result depends on the room for splits. Empty ones must not change a bit.",
    ),
]:
    answers.wrong("10.3", hint, name)(partial(slipped_combine, slip=slip))


answers.alternative("10.3")(partial(slipped_combine, slip="none"))


@answers.wrong("10.3", "PyTorch merges the splits, and the kernel does nothing.")
def one_after_the_other(partial_out, partial_lse):
    """Lesson 8's merge, split by split."""
    parts = [
        online.from_state(partial_out[:, s], partial_lse[:, s]) for s in range(partial_lse.shape[1])
    ]
    return online.finish(reduce(online.merge, parts))[0]


# ---------------------------------------------------------------- 10.4 the batch must not show


def slipped_decode(
    q,
    k_cache,
    v_cache,
    context_lens,
    split_size,
    window=None,
    *,
    size_by="argument",
    relative=True,
    heads="consecutive",
    window_by="sequence",
    end_off=0,
    begin_off=0,
    scale=True,
    use_window=True,
    average=False,
    whole=False,
    empty="zeros",
    window_off=0,
    stale_acc=False,
    lowest=-math.inf,
):
    """Decoding in splits with some slips, spelled by switches."""
    (batch, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    group, out = num_heads // num_kv_heads, torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        rows = q[b].view(num_kv_heads, group, head_dim)
        if heads == "strided":
            rows = q[b].view(group, num_kv_heads, head_dim).transpose(0, 1)
        size = {
            "argument": split_size,
            "batch": max(1, -(-length // max(1, 16 // (batch * num_kv_heads)))),
            "capacity": max(1, -(-k_cache.shape[1] // 5)),
            "longest": max(1, -(-int(context_lens.max()) // 5)),
        }[size_by]
        size = max(1, length) if whole else size
        first = (
            max(length - window - window_off, 0)
            if window is not None and use_window and window_by == "sequence"
            else 0
        )
        parts = []
        for start in range(first, length, size):
            begin, end = max(start + begin_off, 0), min(start + size, length)
            end = end + end_off if end < length or end_off == -2 else end
            if window_by == "split" and window is not None:
                begin = max(begin, end - window)
            k, v = k_cache[b, begin:end], v_cache[b, begin:end]
            if len(k):
                scores = torch.bmm(rows, k.permute(1, 2, 0)) * (head_dim**-0.5 if scale else 1.0)
                m = scores.amax(-1).clamp(min=lowest)
                weights = torch.exp(scores - m[..., None])
                parts.append((m, weights.sum(-1), torch.bmm(weights, v.transpose(0, 1))))
        if not parts:
            out[b] = torch.nan if empty == "nan" else 0.0
            continue
        top = torch.stack([m for m, _, _ in parts]).amax(0)
        factors = [torch.exp(m - top) if relative else torch.ones_like(m) for m, _, _ in parts]
        l = sum(f * l for f, (_, l, _) in zip(factors, parts))
        acc = sum(
            (1 if stale_acc else f[..., None]) * acc for f, (_, _, acc) in zip(factors, parts)
        )
        result = acc / l[..., None]
        if average:
            result = sum(acc / l[..., None] for _, l, acc in parts) / len(parts)
        out[b] = result.reshape(num_heads, head_dim)
    return out


MERGE_FIRST = (
    "Begin with the merge: sums relative to different maxima are added. More may be wrong."
)
BUGS = {
    "size": dict(size_by="batch"),
    "m": dict(relative=False),
    "heads": dict(heads="strided"),
    "window": dict(window_by="split"),
}
for name, bugs, hint in [
    (
        "as_given",
        "size m heads window",
        "More than one bug is left. Work the docstring's example by hand first.",
    ),
    (
        "three_left_size_fixed",
        "m heads window",
        MERGE_FIRST,
    ),
    (
        "three_left_m_fixed",
        "size heads window",
        "The merge is right. Look at the splits' size, the heads and the window.",
    ),
    (
        "three_left_heads_fixed",
        "size m window",
        MERGE_FIRST,
    ),
    (
        "three_left_window_fixed",
        "size m heads",
        MERGE_FIRST,
    ),
    ("number_by_the_batch", "size", "The number of splits depends on the batch. Use split_size."),
    (
        "l_without_m",
        "m",
        "You add l and acc of splits whose maxima differ. Bring them to one maximum first.",
    ),
    (
        "heads_across",
        "heads",
        "Your rows mix query heads of different KV heads: heads 0 … group-1 share KV head 0.",
    ),
    (
        "window_per_split",
        "window",
        "Each split keeps its own last `window` rows. The window counts from the sequence's end.",
    ),
]:
    answers.wrong("10.4", hint, name)(
        partial(slipped_decode, **{k: v for bug in bugs.split() for k, v in BUGS[bug].items()})
    )

for name, slip, hint in [
    (
        "key_dropped",
        dict(end_off=-1),
        "The last key of each split is lost: end is exclusive already.",
    ),
    ("key_doubled", dict(begin_off=-1), "Splits overlap by one key, which then counts twice."),
    (
        "size_by_capacity",
        dict(size_by="capacity"),
        "You cut the capacity, not the rows in use: a longer cache changes the bits.",
    ),
    (
        "size_by_longest",
        dict(size_by="longest"),
        "You cut by the longest sequence, so a neighbour changes the bits.",
    ),
    ("averaged", dict(average=True), "You average the splits. Each weighs exp(m) · l."),
    ("stale_acc", dict(stale_acc=True), "l is brought to the common maximum, acc is not."),
    (
        "max_from_0",
        dict(lowest=0.0),
        "Your maximum starts at a number. What if all scores lie below it? Start at −inf.",
    ),
    ("no_scale", dict(scale=False), "The scores are not scaled by 1 / √D."),
    ("no_window", dict(use_window=False), "You ignore `window`."),
    ("window_off_by_one", dict(window_off=1), "Your window holds one key too many."),
    ("empty_is_nan", dict(empty="nan"), "A sequence without keys gives zeros."),
    (
        "no_splits",
        dict(whole=True),
        "Right, but in one piece: all scores exist at once. Take split_size keys at a time.",
    ),
]:
    answers.wrong("10.4", hint, name)(partial(slipped_decode, **slip))


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
