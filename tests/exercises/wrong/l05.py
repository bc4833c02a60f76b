"""Wrong answers to lesson 05's exercises: real slips, and the hint for whoever made them."""

from dataclasses import replace
from functools import partial

import torch

from lessons.l02_naive_attention import naive
from lessons.l03_kv_cache.optimized import decode_attention as one_program_per_query_head
from lessons.l05_gqa import optimized as lesson
from lessons.l05_gqa.naive import attention_repeated
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 5.1 nothing is repeated


def slipped_attention(
    q,
    k,
    v,
    softmax_scale,
    window=None,
    *,
    heads="in groups",
    scale="once",
    mask="bottom right",
    windows="all",
    swapped=False,
    minor=False,
    wide=False,
    in_place=False,
    least=-torch.inf,
    maximum="own",
    own_strides=True,
):
    """Grouped attention with one slip. The keywords exist only here, to spell the slips briefly."""
    if swapped:
        k, v = v, k
    if in_place:
        q = q.mul_(softmax_scale)
    if not own_strides:
        k = k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1))
    group, kv_heads = q.shape[1] // k.shape[1], k.shape[1]
    read = torch.arange(q.shape[1])
    read = {"in groups": read // group, "modulo": read % kv_heads, "first": read * 0}[heads]
    factor = {"once": softmax_scale, "twice": softmax_scale**2, "never": 1.0}[scale]
    factor = {"root of D": q.shape[-1] ** -0.5}.get(scale, factor) if not in_place else 1.0
    sees = naive.causal_mask(len(q), len(k), None if windows == "none" else window)
    if windows == "prompts" and len(q) == 1:
        sees[:] = True
    if windows == "steps" and len(q) > 1:
        sees = naive.causal_mask(len(q), len(k))
    if mask == "top left":
        sees = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    if mask == "none":
        sees = torch.ones(len(q), len(k), dtype=torch.bool)
    outs = []
    for head, kv_head in enumerate(read):
        scores = (q[:, head] @ k[:, kv_head].T).float() * factor
        scores = scores.masked_fill(~sees, least)
        p = torch.softmax(scores, -1)
        if maximum != "own":
            m = scores.amax(-1, keepdim=True).clamp(min=-1e4) if maximum == "finite" else 0
            p = (scores - m).exp()
            p = p / p.sum(-1, keepdim=True)
        outs.append(p.to(v.dtype) @ v[:, kv_head])
    out = torch.stack(outs, dim=1)
    if minor:
        out = out.unflatten(1, (kv_heads, group)).transpose(1, 2).flatten(1, 2)
    return out.float() if wide else out


for name, slip, hint in [
    (
        "heads_by_modulo",
        dict(heads="modulo"),
        "Query head h reads KV head h % Hkv. Neighbours share a KV head: h // group.",
    ),
    ("one_kv_head_for_all", dict(heads="first"), "All your query heads read KV head 0."),
    (
        "finite_mask",
        dict(least=-1e4),
        "You mask with -10000. Scores may be smaller; nothing is smaller than -inf.",
    ),
    (
        "no_maximum",
        dict(maximum="none"),
        "What you subtract is not each row's largest score: far below it every exp is 0, and "
        "0 / 0 is NaN.",
    ),
    (
        "finite_first_maximum",
        dict(maximum="finite"),
        "What you subtract is not each row's largest score: far below it every exp is 0, and "
        "0 / 0 is NaN.",
    ),
    (
        "strides_ignored",
        dict(own_strides=False),
        "You read q, k or v as if its rows followed each other. Its strides say where they are.",
    ),
    ("scale_twice", dict(scale="twice"), "softmax_scale is applied twice."),
    ("no_scale", dict(scale="never"), "The scores are not scaled."),
    (
        "scale_of_its_own",
        dict(scale="root of D"),
        "You scale by 1 / √D. The argument softmax_scale says what to scale by.",
    ),
    ("no_mask", dict(mask="none"), "Your prompt's tokens see their future."),
    (
        "top_left_mask",
        dict(mask="top left"),
        "A chunk's first query comes after all older tokens, not at the first one.",
    ),
    ("no_window", dict(windows="none"), "`window` is ignored."),
    ("no_window_in_a_step", dict(windows="prompts"), "A single query ignores `window`."),
    ("no_window_in_a_prompt", dict(windows="steps"), "Several queries ignore `window`."),
    ("k_and_v_swapped", dict(swapped=True), "K and V have changed places."),
    (
        "heads_in_another_order",
        dict(minor=True),
        "Your output's heads are [group, Hkv]; q's are [Hkv, group].",
    ),
    (
        "returns_float32",
        dict(wide=True),
        "You compute in float32, which is fine, and forget to return q's dtype.",
    ),
    ("changes_q", dict(in_place=True), "You scale the caller's q in place."),
]:
    answers.wrong("5.1", hint, name)(partial(slipped_attention, **slip))

answers.wrong(
    "5.1",
    "You repeat K and V on the way: three times the bytes are written, and read again.",
    "repeats_on_the_way",
)(attention_repeated)


@answers.wrong(
    "5.1",
    "`repeat` gives KV heads 0 1 0 1 0 1. The query heads of a group are neighbours: 0 0 0 1 1 1.",
)
def repeat_for_repeat_interleave(q, k, v, softmax_scale, window=None):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))
    return naive.attention(q, k, v, softmax_scale, window=window)


@answers.alternative("5.1")
def heads_as_rows(q, k, v, softmax_scale, window=None):
    """One matrix product for each KV head, the queries of its heads below each other."""
    sees = naive.causal_mask(len(q), len(k), window)
    outs = []
    for rows, keys, values in zip(q.chunk(k.shape[1], dim=1), k.unbind(1), v.unbind(1)):
        scores = rows.transpose(0, 1) @ keys.T * softmax_scale  # [group, T, N]
        p = scores.float().masked_fill(~sees, -torch.inf).softmax(-1).to(v.dtype)
        outs.append((p @ values).transpose(0, 1))
    return torch.cat(outs, dim=1)


# ---------------------------------------------------------------- 5.2 the kernel


@triton.jit
def slipped_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    context_lens_ptr,
    scale_log2e,
    window,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIP: tl.constexpr,
):
    """The kernel with the one slip that SLIP names."""
    kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = (
        kv_head + row * tl.num_programs(0) if SLIP == "heads_by_modulo" else kv_head * GROUP + row
    )
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    in_head = (column < HEAD_DIM)[None, :]
    in_group = (row < GROUP)[:, None] & in_head
    all_rows, all_columns = (
        (row < BLOCK_M)[:, None] & in_head,
        (row < GROUP)[:, None] & (column < BLOCK_D)[None, :],
    )
    written = all_rows if SLIP == "rows_behind_the_group_written" else in_group
    written = all_columns if SLIP == "columns_behind_the_head_written" else written
    q = tl.load(
        q_ptr + sequence * stride_qb + head[:, None] * stride_qh + column[None, :],
        mask=all_rows if SLIP == "rows_behind_the_group_loaded" else in_group,
        other=0.0,
    )
    k_ptr += (
        sequence * stride_kb + (0 if SLIP == "every_group_reads_kv_head_0" else kv_head) * stride_kh
    )
    v_ptr += (
        sequence * stride_vb + (0 if SLIP == "every_group_reads_kv_head_0" else kv_head) * stride_vh
    )
    m_i = tl.full((BLOCK_M,), 0.0 if SLIP == "no_running_maximum" else float("-inf"), tl.float32)
    if SLIP == "maximum_from_minus_10000":
        m_i = tl.full((BLOCK_M,), -1e4, tl.float32)
    if SLIP == "v_with_the_strides_of_k":
        stride_vn = stride_kn
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = tl.maximum(length - window, 0)
    if SLIP == "no_window":
        first = 0
    if SLIP == "window_one_row_long":
        first = tl.maximum(length - window - 1, 0)
    if SLIP == "window_by_whole_tiles":
        first = first // BLOCK_N * BLOCK_N
    for start in range(first, length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = (key < length)[:, None] & in_head
        if SLIP == "unused_rows_loaded":
            held = (key >= 0)[:, None] & in_head
        k = tl.load(k_ptr + key[:, None] * stride_kn + column[None, :], mask=held, other=0.0)
        v = tl.load(v_ptr + key[:, None] * stride_vn + column[None, :], mask=held, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        if SLIP == "scale_twice":
            scores = scores * scale_log2e
        if SLIP == "exp2_without_log2e":
            scores = scores * 0.6931471805599453
        if SLIP != "tail_keys_unmasked":
            scores = tl.where((key < length)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        if SLIP == "no_running_maximum":
            m_new = m_i
        if SLIP == "one_maximum_for_the_tile":
            m_new = tl.maximum(m_i, tl.min(tl.max(scores, axis=1), axis=0))
        weights = tl.exp2(scores - m_new[:, None])
        shrink = tl.exp2(m_i - m_new)
        if SLIP == "sums_not_rescaled":
            shrink = tl.full((BLOCK_M,), 1.0, tl.float32)
        l_i = l_i * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        if SLIP == "sums_in_16_bits":
            acc = acc.to(v.dtype).to(tl.float32)
        m_i = m_new
    out = acc / l_i[:, None]
    if SLIP != "an_empty_sequence_is_nan":
        out = tl.where(length > 0, out, 0.0)
    rows = (
        out_ptr
        + (sequence * tl.num_programs(0) * GROUP + head[:, None]) * HEAD_DIM
        + column[None, :]
    )
    tl.store(rows, out.to(out_ptr.dtype.element_ty), mask=written)


def slipped_decode(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None, *, slip):
    """The exercise's launch, of the kernel above."""
    (batch, heads, dim), kv_heads = q.shape, k_cache.shape[2]
    scale, out = (
        dim**-0.5 if softmax_scale is None else softmax_scale,
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
    )
    if slip == "ignores_the_callers_scale":
        scale = dim**-0.5
    slipped_kernel[kv_heads, batch](
        q,
        k_cache,
        v_cache,
        out,
        context_lens,
        scale * lesson.LOG2_E,
        window or k_cache.shape[1],
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=heads // kv_heads,
        HEAD_DIM=dim,
        BLOCK_M=16,
        BLOCK_D=16,
        BLOCK_N=16,
        SLIP=slip,
    )
    return out


for slip, hint in {
    "heads_by_modulo": "Your program takes query heads kv_head, kv_head + Hkv, …; the heads of a "
    "group are neighbours.",
    "every_group_reads_kv_head_0": "Every program reads KV head 0: k_ptr and v_ptr move by kv_head "
    "· stride.",
    "rows_behind_the_group_written": "The padded rows are stored, over the next group's heads. "
    "Mask the store with row < GROUP.",
    "rows_behind_the_group_loaded": "The padded rows of q are loaded: the next group's heads, and "
    "at the end out of bounds.",
    "columns_behind_the_head_written": "Columns from HEAD_DIM on are stored, over the next head. "
    "Mask the store with them too.",
    "unused_rows_loaded": "You load rows after `length`. A weight of 0 times NaN is NaN.",
    "tail_keys_unmasked": "Keys after `length` score 0 and get weight 2^(0 - max): set their "
    "scores to -inf.",
    "scale_twice": "The scale is applied twice.",
    "exp2_without_log2e": "2^x is not e^x: exp2 needs scores that are multiplied with log2(e).",
    "ignores_the_callers_scale": "softmax_scale is given, and you use 1 / √D all the same.",
    "no_running_maximum": "2^x overflows: subtract each row's maximum so far.",
    "one_maximum_for_the_tile": "One row's maximum serves all rows. Each query head has its own: "
    "reduce over axis 1 alone.",
    "sums_not_rescaled": "The maximum moves from tile to tile; l_i and acc have to be multiplied "
    "with 2^(old - new).",
    "maximum_from_minus_10000": "Your maximum starts too high. Scores may be smaller: start at "
    "-inf.",
    "sums_in_16_bits": "Your sums are kept in 16 bits from tile to tile. Keep them in float32.",
    "v_with_the_strides_of_k": "You step through v with a stride of k. Each has its own.",
    "no_window": "You ignore `window`.",
    "window_one_row_long": "Your window holds one row too many: it counts the query's own.",
    "window_by_whole_tiles": "The window begins in the middle of a tile, and you take the whole "
    "tile.",
    "an_empty_sequence_is_nan": "A sequence of length 0 divides 0 by 0. It attends to nothing: "
    "zeros.",
}.items():
    answers.wrong("5.2", hint, slip)(partial(slipped_decode, slip=slip))

answers.wrong(
    "5.2",
    "Right, but each tile is loaded once for every query head, as in lesson 3. Load it once per KV "
    "head.",
    "one_program_per_query_head",
)(one_program_per_query_head)
answers.alternative("5.2")(lesson.decode_attention)


# ---------------------------------------------------------------- 5.3 converting


def slipped_conversion(
    weights,
    config,
    num_kv_heads,
    *,
    groups="neighbours",
    merge="mean",
    names=("k_proj.", "v_proj."),
    biases=True,
    rows="head_major",
    config_says="kv_heads",
    in_place=False,
    queries=False,
    widens=False,
):
    """The conversion with some slips, spelled by switches."""
    converted, dim, have = dict(weights), config.head_dim, config.num_key_value_heads
    for name, weight in weights.items():
        if queries and ".q_proj." in name:
            heads = weight.unflatten(0, (have, -1, dim))
            converted[name] = (
                heads.unflatten(0, (num_kv_heads, -1))
                .mean(1, keepdim=True)
                .expand(-1, have // num_kv_heads, *heads.shape[1:])
                .reshape(weight.shape)
            )
        if not any(part in name for part in names) or (name.endswith("bias") and not biases):
            continue
        heads = (
            weight.unflatten(0, (have, dim))
            if rows == "head_major"
            else weight.unflatten(0, (dim, have)).transpose(0, 1)
        )
        heads = (
            heads.unflatten(0, (num_kv_heads, -1))
            if groups == "neighbours"
            # [groups, heads of a group, D, ...]
            else heads.unflatten(0, (-1, num_kv_heads)).transpose(0, 1)
        )
        new = {
            "mean": lambda x: x.mean(1),
            "sum": lambda x: x.sum(1),
            "first": lambda x: x[:, 0],
            "last": lambda x: x[:, -1],
            "wrong_axis": lambda x: x.flatten(1, 2).unflatten(1, (dim, -1)).mean(2),
        }[merge](heads)
        if in_place:
            weight[: new.shape[0] * dim] = new.flatten(0, 1)
        converted[name] = new.flatten(0, 1)
    says = {
        "kv_heads": dict(num_key_value_heads=num_kv_heads),
        "nothing": {},
        "both": dict(
            num_key_value_heads=num_kv_heads,
            num_attention_heads=config.num_attention_heads * num_kv_heads // have,
        ),
    }[config_says]
    if widens:
        converted = {name: weight.float() for name, weight in converted.items()}
    return converted, replace(config, **says)


for name, slip, hint in [
    (
        "as_given",
        dict(groups="strided", merge="sum", biases=False),
        "All three bugs are there. Work the example by hand.",
    ),
    (
        "two_bugs_left_bias",
        dict(groups="strided", merge="sum"),
        "Two bugs are left: who forms a group, and what they become.",
    ),
    (
        "two_bugs_left_groups",
        dict(merge="sum", biases=False),
        "Two bugs are left: what a group becomes, and the biases.",
    ),
    (
        "two_bugs_left_sum",
        dict(groups="strided", biases=False),
        "Two bugs are left: which heads form a group, and the biases.",
    ),
    (
        "float32_means",
        dict(widens=True),
        "Your means are float32. The checkpoint's dtype stays.",
    ),
    (
        "every_name_with_k",
        dict(names=("k_", "v_")),
        "You change every weight whose name has k_ in it. k_norm is shared by all heads.",
    ),
    (
        "heads_by_modulo",
        dict(groups="strided"),
        "You merge heads 0, 2, 4. Query heads of a group are neighbours: 0, 1, 2.",
    ),
    (
        "sum_instead_of_mean",
        dict(merge="sum"),
        "A sum of three keys scores three times as high. Take the mean.",
    ),
    (
        "biases_forgotten",
        dict(biases=False),
        "The biases keep the rows of all heads: they are merged too.",
    ),
    (
        "first_head",
        dict(merge="first"),
        "You keep each group's first head and drop the others. The mean of all is asked for.",
    ),
    (
        "last_head",
        dict(merge="last"),
        "You keep each group's last head and drop the others. The mean of all is asked for.",
    ),
    (
        "mean_over_the_wrong_axis",
        dict(merge="wrong_axis"),
        "You average rows of one head, not one row of all heads.",
    ),
    (
        "wrong_rows",
        dict(rows="head_minor"),
        "Row h · D + i is coordinate i of head h: heads come first, then D.",
    ),
    ("keys_alone", dict(names=("k_proj.",)), "Only K has fewer heads now. V is merged as well."),
    (
        "queries_too",
        dict(queries=True),
        "You average query heads. They stay: only keys and values are shared.",
    ),
    (
        "config_forgotten",
        dict(config_says="nothing"),
        "The config still says the old number of KV heads.",
    ),
    (
        "fewer_query_heads",
        dict(config_says="both"),
        "num_attention_heads counts query heads; they stay.",
    ),
    ("writes_into_the_weights", dict(in_place=True), "You write into the caller's tensors."),
]:
    answers.wrong("5.3", hint, name)(partial(slipped_conversion, **slip))


@answers.alternative("5.3")
def head_by_head(weights, config, num_kv_heads):
    converted, size = {}, config.num_key_value_heads // num_kv_heads
    for name, weight in weights.items():
        heads = list(weight.split(config.head_dim)) if "k_proj" in name or "v_proj" in name else []
        merged = [sum(heads[at : at + size]) / size for at in range(0, len(heads), size)]
        converted[name] = torch.cat(merged) if merged else weight
    return converted, replace(config, num_key_value_heads=num_kv_heads)


# ---------------------------------------------------------------- 5.4 predict


def slipped_sharing(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    context,
    memory_gib,
    *,
    k_and_v=2,
    layers=True,
    itemsize=None,
    mib=2**20,
    copies=2,
    first_read=True,
    heads="kv",
    mha="query",
    gib=1024,
    stored="kv",
    whole=True,
):
    """The four numbers with one slip, spelled by a switch."""
    per_head = (
        k_and_v
        * (num_hidden_layers if layers else 1)
        * head_dim
        * (itemsize or dtype.itemsize)
        * context
        / mib
    )
    grouped = per_head * (
        num_key_value_heads if heads == "kv" else num_attention_heads // num_key_value_heads
    )
    multi = per_head * (
        num_attention_heads if mha == "query" else num_attention_heads // num_key_value_heads
    )
    fit = memory_gib * gib / (grouped if stored == "kv" else multi)
    return grouped, multi, first_read * grouped + copies * multi, int(fit) if whole else fit


for name, slip, hint in [
    ("k_alone", dict(k_and_v=1), "You count K alone; V is read as well."),
    ("one_layer", dict(layers=False), "Every layer has its own K and V."),
    ("always_two_bytes", dict(itemsize=2), "You count 2 bytes a value whatever the dtype."),
    ("megabytes", dict(mib=10**6), "You divide by 10^6: that is MB. A MiB has 2^20 bytes."),
    (
        "group_size_for_kv_heads",
        dict(heads="group"),
        "You multiply with Hq / Hkv. The cache holds Hkv heads.",
    ),
    (
        "mha_has_the_group",
        dict(mha="group"),
        "MHA has a KV head for every query head: Hq, not Hq / Hkv.",
    ),
    (
        "copies_written_only",
        dict(copies=1),
        "The copies are written and then read again: two more passes.",
    ),
    (
        "cached_rows_not_read",
        dict(first_read=False),
        "Before it can be copied, the cached K and V has to be read.",
    ),
    ("gib_as_1000", dict(gib=1000), "A GiB has 1024 MiB."),
    (
        "expanded_cache_stored",
        dict(stored="query"),
        "You store a copy for every query head. Only Hkv heads are kept.",
    ),
    ("parts_of_sequences", dict(whole=False), "Whole sequences only: an int."),
]:
    answers.wrong("5.4", hint, name)(partial(slipped_sharing, **slip))


@answers.alternative("5.4")
def from_a_token(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    context,
    memory_gib,
):
    token = 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype.itemsize
    group = num_attention_heads / num_key_value_heads
    grouped = token * context / 2**20
    return (
        grouped,
        grouped * group,
        grouped * (1 + 2 * group),
        int(memory_gib * 2**30) // (token * context),
    )
