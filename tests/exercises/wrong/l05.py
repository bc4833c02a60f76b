"""Wrong answers to lesson 05's exercises: real slips, each with a hint."""

from dataclasses import replace

import torch

from lessons.l02_naive_attention import naive
from lessons.l03_kv_cache.optimized import decode_attention as one_program_per_query_head
from lessons.l05_gqa import optimized as lesson
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 5.1 nothing is repeated

answers.slips(
    "5.1",
    """
    heads_by_modulo: Query head h reads KV head h % Hkv. Neighbours share a KV head: h // group.
    - q.unflatten(1, (k.shape[1], -1))
    + q.unflatten(1, (-1, k.shape[1])).transpose(1, 2)
    - return torch.einsum("hgtn,nhd->thgd", p, v)
    + return torch.einsum("hgtn,nhd->tghd", p, v)

    one_kv_head_for_all: All your query heads read KV head 0.
    - rows = q.unflatten
    + k, v = (x[:, :1].expand(x.shape) for x in (k, v))
    + rows = q.unflatten

    finite_mask: You mask with -10000. Scores may be smaller; nothing is smaller than -inf.
    - -torch.inf
    + -1e4

    no_maximum: What you subtract is not each row's largest score: far below it every exp is 0, and
        0 / 0 is NaN.
    - p = torch.softmax(scores.float().masked_fill(~sees, -torch.inf), dim=-1).to(v.dtype)
    + p = scores.float().masked_fill(~sees, -torch.inf).exp()
    + p = (p / p.sum(-1, keepdim=True)).to(v.dtype)

    finite_first_maximum: What you subtract is not each row's largest score: far below it every exp
        is 0, and 0 / 0 is NaN.
    - p = torch.softmax(scores.float().masked_fill(~sees, -torch.inf), dim=-1).to(v.dtype)
    + scores = scores.float().masked_fill(~sees, -torch.inf)
    + p = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e4)).exp()
    + p = (p / p.sum(-1, keepdim=True)).to(v.dtype)

    strides_ignored: You read q, k or v as if its rows followed each other. Its strides say where
        they are.
    - rows = q.unflatten
    + k = k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1))
    + rows = q.unflatten

    scale_twice: softmax_scale is applied twice.
    - rows, k) * softmax_scale
    + rows, k) * softmax_scale**2

    no_scale: The scores are not scaled.
    - rows, k) * softmax_scale
    + rows, k)

    scale_of_its_own: You scale by 1 / √D. The argument softmax_scale says what to scale by.
    - rows, k) * softmax_scale
    + rows, k) * q.shape[-1] ** -0.5

    no_mask: Your prompt's tokens see their future.
    - .masked_fill(~sees, -torch.inf)

    top_left_mask: A chunk's first query comes after all older tokens, not at the first one.
    - causal_mask(len(q), len(k), window, q.device)
    + torch.ones(len(q), len(k), dtype=torch.bool).tril()

    no_window: `window` is ignored.
    - len(k), window, q.device
    + len(k), None, q.device

    no_window_in_a_step: A single query ignores `window`.
    - len(k), window, q.device
    + len(k), window if len(q) > 1 else None, q.device

    no_window_in_a_prompt: Several queries ignore `window`.
    - len(k), window, q.device
    + len(k), window if len(q) == 1 else None, q.device

    k_and_v_swapped: K and V have changed places.
    - rows = q.unflatten
    + k, v = v, k
    + rows = q.unflatten

    heads_in_another_order: Your output's heads are [group, Hkv]; q's are [Hkv, group].
    - "hgtn,nhd->thgd"
    + "hgtn,nhd->tghd"

    returns_float32: You compute in float32, which is fine, and forget to return q's dtype.
    - .reshape(q.shape)
    + .reshape(q.shape).float()

    changes_q: You scale the caller's q in place.
    - rows, k) * softmax_scale
    + rows.mul_(softmax_scale), k)

    repeats_on_the_way: You repeat K and V on the way: three times the bytes are written, and read
        again.
    - rows = q.unflatten(1, (k.shape[1], -1))  # [T, Hkv, group, D]
    + k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    + rows = q.unflatten(1, (k.shape[1], -1))

    repeat_for_repeat_interleave: `repeat` gives KV heads 0 1 0 1 0 1. The query heads of a group
        are neighbours: 0 0 0 1 1 1.
    - rows = q.unflatten(1, (k.shape[1], -1))  # [T, Hkv, group, D]
    + k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))
    + rows = q.unflatten(1, (k.shape[1], -1))
    """,
)


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

answers.slips(
    "5.2",
    """
    heads_by_modulo: Your program takes query heads kv_head, kv_head + Hkv, …; the heads of a group
        are neighbours.
    - head = kv_head * GROUP + row
    + head = kv_head + row * tl.num_programs(0)

    every_group_reads_kv_head_0: Every program reads KV head 0: k_ptr and v_ptr move by kv_head ·
        stride.
    - k_ptr += sequence * stride_kb + kv_head * stride_kh
    - v_ptr += sequence * stride_vb + kv_head * stride_vh
    + k_ptr += sequence * stride_kb
    + v_ptr += sequence * stride_vb

    rows_after_the_group_written: The padded rows are stored, over the next group's heads. Mask the
        store with row < GROUP.
    - out.to(out_ptr.dtype.element_ty), mask=in_group
    + out.to(out_ptr.dtype.element_ty), mask=(row < BLOCK_M)[:, None] & in_head

    rows_after_the_group_loaded: The padded rows of q are loaded: the next group's heads, and at the
        end out of bounds.
    - mask=in_group, other=0.0,
    + mask=(row < BLOCK_M)[:, None] & in_head, other=0.0,

    columns_after_the_head_written: Columns from HEAD_DIM on are stored, over the next head. Mask
        the store with them too.
    - out.to(out_ptr.dtype.element_ty), mask=in_group
    + out.to(out_ptr.dtype.element_ty), mask=(row < GROUP)[:, None] & (column < BLOCK_D)[None, :]

    unused_rows_loaded: You load rows after `length`. A weight of 0 times NaN is NaN.
    - held = (key < length)[:, None] & in_head
    + held = (key >= 0)[:, None] & in_head

    tail_keys_unmasked: Keys after `length` score 0 and get weight 2^(0 - max): set their scores to
        -inf.
    - scores = tl.where((key < length)[None, :], scores, float("-inf"))

    scale_twice: The scale is applied twice.
    - input_precision="ieee") * scale_log2e
    + input_precision="ieee") * scale_log2e * scale_log2e

    exp2_without_log2e: 2^x is not e^x: exp2 needs scores that are multiplied with log2(e).
    - softmax_scale * 1.4426950408889634
    + softmax_scale

    ignores_the_callers_scale: softmax_scale is given, and you use 1 / √D all the same.
    - head_dim**-0.5 if softmax_scale is None else softmax_scale
    + head_dim**-0.5

    no_running_maximum: 2^x overflows: subtract each row's maximum so far.
    - m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    + m_i = tl.zeros((BLOCK_M,), tl.float32)
    - m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    + m_new = m_i

    one_maximum_for_the_tile: One row's maximum serves all rows. Each query head has its own: reduce
        over axis 1 alone.
    - tl.max(scores, axis=1)
    + tl.min(tl.max(scores, axis=1), axis=0)

    sums_not_rescaled: The maximum moves from tile to tile; l_i and acc have to be multiplied with
        2^(old - new).
    - alpha = tl.exp2(m_i - m_new)
    + alpha = tl.full((BLOCK_M,), 1.0, tl.float32)

    maximum_from_minus_10000: Your maximum starts too high. Scores may be smaller: start at -inf.
    - m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    + m_i = tl.full((BLOCK_M,), -1e4, tl.float32)

    sums_in_16_bits: Your sums are kept in 16 bits from tile to tile. Keep them in float32.
    - m_i = m_new
    + acc = acc.to(v.dtype).to(tl.float32)
    + m_i = m_new

    v_with_the_strides_of_k: You step through v with a stride of k. Each has its own.
    - v_ptr + key[:, None].to(tl.int64) * stride_vn
    + v_ptr + key[:, None].to(tl.int64) * stride_kn

    no_window: You ignore `window`.
    - tl.maximum(length - window, 0)
    + 0

    window_one_row_long: Your window holds one row too many: it counts the query's own.
    - length - window, 0
    + length - window - 1, 0

    window_by_whole_tiles: The window begins in the middle of a tile, and you take the whole tile.
    - tl.maximum(length - window, 0)
    + tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N

    an_empty_sequence_is_nan: A sequence of length 0 divides 0 by 0. It attends to nothing: zeros.
    - tl.where(length > 0, acc / l_i[:, None], 0.0)
    + acc / l_i[:, None]
    """,
)


answers.wrong(
    "5.2",
    "Right, but each tile is loaded once for every query head, as in lesson 3. Load it once per KV "
    "head.",
    "one_program_per_query_head",
)(one_program_per_query_head)
answers.alternative("5.2")(lesson.decode_attention)


def in_pytorch(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """Lesson 2's attention, sequence after sequence."""
    out = torch.zeros_like(q)
    for b, n in enumerate(context_lens.tolist()):
        held = [x[b, :n].float() for x in (q[:, None], k_cache, v_cache)]
        held[0] = q[b : b + 1].float()
        out[b] = naive.attention(*held, softmax_scale, window=window)[0]
    return out


attacks(answers, "5.2", in_pytorch)


# ---------------------------------------------------------------- 5.3 converting

answers.slips(
    "5.3",
    """
    as_given: All three bugs are there. Work the example by hand.
    = two_bugs_left_bias, biases_forgotten

    two_bugs_left_bias: Two bugs are left: which heads form a group, and what they become.
    - heads = weight.view(num_kv_heads, -1, config.head_dim, *weight.shape[1:])
    - converted[name] = heads.mean(1).flatten(0, 1)
    + heads = weight.view(-1, num_kv_heads, config.head_dim, *weight.shape[1:])
    + converted[name] = heads.sum(0).flatten(0, 1)

    two_bugs_left_groups: Two bugs are left: what a group becomes, and the biases.
    = sum_instead_of_mean, biases_forgotten

    two_bugs_left_sum: Two bugs are left: which heads form a group, and the biases.
    = heads_by_modulo, biases_forgotten

    float32_means: Your means are float32. The checkpoint's dtype stays.
    - return converted, replace
    + converted = {name: weight.float() for name, weight in converted.items()}
    + return converted, replace

    every_name_with_k: You change every weight whose name has k_ in it. k_norm is shared by all
        heads.
    - ".k_proj." in name or ".v_proj." in name
    + "k_" in name or "v_" in name

    heads_by_modulo: You merge heads 0, 2, 4. Query heads of a group are neighbours: 0, 1, 2.
    - heads = weight.view(num_kv_heads, -1, config.head_dim, *weight.shape[1:])
    - converted[name] = heads.mean(1).flatten(0, 1)
    + heads = weight.view(-1, num_kv_heads, config.head_dim, *weight.shape[1:])
    + converted[name] = heads.mean(0).flatten(0, 1)

    sum_instead_of_mean: A sum of three keys scores three times as high. Take the mean.
    - heads.mean(1)
    + heads.sum(1)

    biases_forgotten: The biases keep the rows of all heads: they are merged too.
    - if ".k_proj." in name or ".v_proj." in name:
    + if ".k_proj.weight" in name or ".v_proj.weight" in name:

    first_head: You keep each group's first head and drop the others. The mean of all is asked for.
    - heads.mean(1)
    + heads[:, 0]

    last_head: You keep each group's last head and drop the others. The mean of all is asked for.
    - heads.mean(1)
    + heads[:, -1]

    mean_over_the_wrong_axis: You average rows of one head, not one row of all heads.
    - weight.view(num_kv_heads, -1, config.head_dim, *weight.shape[1:])
    + weight.view(num_kv_heads, config.head_dim, -1, *weight.shape[1:])
    - heads.mean(1)
    + heads.mean(2)

    wrong_rows: Row h · D + i is coordinate i of head h: heads come first, then D.
    - heads = weight.view(num_kv_heads, -1, config.head_dim, *weight.shape[1:])
    + heads = weight.unflatten(0, (config.head_dim, config.num_key_value_heads)).transpose(0, 1)
    + heads = heads.unflatten(0, (num_kv_heads, -1))

    keys_alone: Only K has fewer heads now. V is merged as well.
    - ".k_proj." in name or ".v_proj." in name
    + ".k_proj." in name

    queries_too: You average query heads. They stay: only keys and values are shared.
    - return converted, replace
    + for name in [name for name in weights if ".q_proj." in name]:
    +     heads = weights[name].unflatten(0, (num_kv_heads, -1, config.head_dim))
    +     heads = heads.unflatten(1, (config.num_key_value_heads // num_kv_heads, -1))
    +     converted[name] = heads.mean(1, keepdim=True).expand_as(heads).reshape(weights[name].shape)
    + return converted, replace

    config_forgotten: The config still says the old number of KV heads.
    - return converted, replace(config, num_key_value_heads=num_kv_heads)
    + return converted, config

    fewer_query_heads: num_attention_heads counts query heads; they stay.
    - replace(config, num_key_value_heads=num_kv_heads)
    + replace(
    +     config,
    +     num_key_value_heads=num_kv_heads,
    +     num_attention_heads=config.num_attention_heads * num_kv_heads // config.num_key_value_heads,
    + )

    writes_into_the_weights: You write into the caller's tensors.
    - converted[name] = heads.mean(1).flatten(0, 1)
    + converted[name] = heads.mean(1).flatten(0, 1)
    + weight[: len(converted[name])] = converted[name]
    """,
)


@answers.alternative("5.3")
def head_by_head(weights, config, num_kv_heads):
    converted, size = {}, config.num_key_value_heads // num_kv_heads
    for name, weight in weights.items():
        heads = list(weight.split(config.head_dim)) if "k_proj" in name or "v_proj" in name else []
        merged = [sum(heads[at : at + size]) / size for at in range(0, len(heads), size)]
        converted[name] = torch.cat(merged) if merged else weight
    return converted, replace(config, num_key_value_heads=num_kv_heads)


# ---------------------------------------------------------------- 5.4 predict

answers.slips(
    "5.4",
    """
    k_alone: You count K alone; V is read as well.
    - per_head = 2 * num_hidden_layers
    + per_head = num_hidden_layers

    one_layer: Every layer has its own K and V.
    - per_head = 2 * num_hidden_layers
    + per_head = 2

    always_two_bytes: You count 2 bytes a value whatever the dtype.
    - * dtype.itemsize * context
    + * 2 * context

    megabytes: You divide by 10^6: that is MB. A MiB has 2^20 bytes.
    - context / 2**20
    + context / 10**6

    group_size_for_kv_heads: You multiply with Hq / Hkv. The cache holds Hkv heads.
    - per_head * num_key_value_heads, per_head
    + per_head * (num_attention_heads // num_key_value_heads), per_head

    mha_has_the_group: MHA has a KV head for every query head: Hq, not Hq / Hkv.
    - per_head * num_attention_heads
    + per_head * (num_attention_heads // num_key_value_heads)

    copies_written_only: The copies are written and then read again: two more passes.
    - grouped + 2 * mha
    + grouped + mha

    cached_rows_not_read: Before it can be copied, the cached K and V has to be read.
    - grouped + 2 * mha
    + 2 * mha

    gib_as_1000: A GiB has 1024 MiB.
    - memory_gib * 1024 //
    + memory_gib * 1000 //

    expanded_cache_stored: You store a copy for every query head. Only Hkv heads are kept.
    - memory_gib * 1024 // grouped
    + memory_gib * 1024 // mha

    parts_of_sequences: Whole sequences only: an int.
    - int(memory_gib * 1024 // grouped)
    + memory_gib * 1024 / grouped
    """,
)


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
