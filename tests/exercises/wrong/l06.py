"""Wrong answers to lesson 06's exercises: real slips, and the hint for each."""

import math

import torch

from lessons.l02_naive_attention import naive
from solutions.l06_mla import AbsorbedCache
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 6.1 from the weights


answers.slips(
    "6.1",
    """
    stretched_without_mscale: Without mscale_all_dim m is 1, whatever the factor is.
    - m = 0.1 * mscale_all_dim * math.log(factor) + 1
    + m = 0.1 * (mscale_all_dim or 1.0) * math.log(factor) + 1

    latent_rotated: You rotate the latent. W_UK could then never move into the query: only k_pe and
        q_pe carry the position.
    - k_nope, v = (
    + c_kv = torch.cat([rotated(c_kv[:, None, :rope])[:, 0], c_kv[:, rope:]], dim=-1)
    + k_nope, v = (

    whole_head_rotated: You rotate the coordinates without position too. Only the last `rope` turn.
    - out = attention(
    + if nope >= rope:
    +     q, k = (torch.cat([rotated(y[..., :rope]), y[..., rope:]], -1) for y in (q, k))
    + else:
    +     q, k = (torch.cat([y[..., :nope] * cos[:, None, :1], y[..., nope:]], -1) for y in (q, k))
    + out = attention(

    key_not_rotated: k_pe is not rotated.
    - rotated(k_pe[:, None])
    + k_pe[:, None]

    query_not_rotated: q_pe is not rotated.
    - rotated(q[..., nope:])
    + q[..., nope:]

    halves: You rotate coordinate i with i + rope / 2. In these weights the pairs are (2i, 2i + 1).
    - pe[..., 0::2], pe[..., 1::2]
    + *pe.chunk(2, dim=-1)
    - torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)
    + torch.cat([a * c - b * s, b * c + a * s], dim=-1)

    layouts_mixed: q_pe and k_pe are rotated in different layouts; their product means nothing then.
    - q = torch.cat([q[..., :nope], rotated(q[..., nope:])], dim=-1)
    + q_pe = rotated(q[..., nope:].unflatten(-1, (2, -1)).mT.flatten(-2))  # halves as pairs
    + q = torch.cat([q[..., :nope], q_pe.unflatten(-1, (-1, 2)).mT.flatten(-2)], dim=-1)

    backwards: Halves in place of pairs, and the angle's sign is turned.
    - pe[..., 0::2], pe[..., 1::2]
    + *pe.chunk(2, dim=-1)
    - torch.stack([a * c - b * s, b * c + a * s], dim=-1).flatten(-2)
    + torch.cat([a * c + b * s, b * c - a * s], dim=-1)

    key_of_each_head: Each head gets a rotary key of its own. There is one, and all heads share it.
    - rotated(k_pe[:, None]).expand(-1, num_heads, -1)
    + rotated(torch.stack([k_pe.roll(2 * h, -1) for h in range(num_heads)], dim=1))

    norm_forgotten: The latent's RMSNorm is missing.
    - c_kv = (
    -     c_kv * torch.rsqrt(c_kv.square().mean(-1, keepdim=True) + 1e-6)
    -     * weights["kv_a_layernorm"]
    - )

    norm_over_both: You norm the latent together with the rotary key: only the latent is normed.
    - c_kv, k_pe = (x @ weights["kv_a_proj_with_mqa"].T).split([rank, rope], dim=-1)
    + down = x @ weights["kv_a_proj_with_mqa"].T
    + down = down * torch.rsqrt(down.square().mean(-1, keepdim=True) + 1e-6)
    + c_kv, k_pe = down.split([rank, rope], dim=-1)
    - c_kv * torch.rsqrt(c_kv.square().mean(-1, keepdim=True) + 1e-6)
    + c_kv

    norm_weight_forgotten: kv_a_layernorm's weight is not used.
    - * weights["kv_a_layernorm"]

    norm_eps: The norm adds 1e-6, whatever the model's other norms add.
    - keepdim=True) + 1e-6
    + keepdim=True) + 1e-5

    all_k_then_all_v: kv_b_proj is stored head by head, nope rows and then v_dim rows; you take all
        of W_UK first.
    - .unflatten(-1, (num_heads, nope + v_dim))
    - .split([nope, v_dim], dim=-1)
    + .split([num_heads * nope, num_heads * v_dim], dim=-1)
    - k = torch.cat(
    + k_nope, v = k_nope.unflatten(-1, (num_heads, -1)), v.unflatten(-1, (num_heads, -1))
    + k = torch.cat(

    v_before_k: In each head of kv_b_proj k's rows come before v's.
    - k_nope, v = (
    + v, k_nope = (
    - .split([nope, v_dim], dim=-1)
    + .split([v_dim, nope], dim=-1)

    rope_before_nope: A head of q holds its nope coordinates first, the rotary ones last.
    - [q[..., :nope], rotated(q[..., nope:])]
    + [q[..., rope:], rotated(q[..., :rope])]

    key_before_latent: kv_a_proj_with_mqa gives the latent first, the rotary key last.
    - c_kv, k_pe = (x @ weights["kv_a_proj_with_mqa"].T).split([rank, rope], dim=-1)
    + k_pe, c_kv = (x @ weights["kv_a_proj_with_mqa"].T).split([rope, rank], dim=-1)

    scale_of_the_row: 1 / √(rank + rope) is the cache row's width. The scores are those of heads of
        nope + rope.
    - (nope + rope) ** -0.5
    + (rank + rope) ** -0.5

    scale_of_the_latent: 1 / √rank is the latent's width. The scores are those of heads of nope +
        rope.
    - (nope + rope) ** -0.5
    + rank**-0.5

    scale_without_rope: A head of q and k is nope + rope wide, not nope.
    - (nope + rope) ** -0.5
    + nope**-0.5

    scale_of_v: The scale comes from the width of q and k, not from that of v.
    - (nope + rope) ** -0.5
    + v_dim**-0.5

    mscale_forgotten: The scale lacks m²: a stretched model sharpens its softmax.
    - m * m * (nope + rope)
    + (nope + rope)

    mscale_once: m enters once. q and k are scaled by m each, so their product by m².
    - m * m * (nope + rope)
    + m * (nope + rope)

    not_causal: Your tokens see their future.
    - (nope + rope) ** -0.5)
    + (nope + rope) ** -0.5, causal=False)

    returns_float64: The result has another dtype than x.
    - return out.flatten(-2) @ weights["o_proj"].T
    + return (out.flatten(-2) @ weights["o_proj"].T).double()
    """,
)


@answers.alternative("6.1")
def one_head_after_the_other(x, weights, mla, num_heads, cos, sin, factor=1.0, mscale_all_dim=0.0):
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
    turn = torch.zeros(len(x), rope, rope, dtype=x.dtype)
    for i in range(rope // 2):
        turn[:, 2 * i, 2 * i] = turn[:, 2 * i + 1, 2 * i + 1] = cos[:, i]
        turn[:, 2 * i, 2 * i + 1], turn[:, 2 * i + 1, 2 * i] = -sin[:, i], sin[:, i]
    down = x @ weights["kv_a_proj_with_mqa"].T
    latent = torch.nn.functional.rms_norm(down[:, :rank], (rank,), weights["kv_a_layernorm"], 1e-6)
    key = torch.einsum("tij,tj->ti", turn, down[:, rank:])
    m = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1
    rows, columns = (
        weights["kv_b_proj"].split([nope, mla.v_head_dim] * num_heads),
        weights["o_proj"].split(mla.v_head_dim, 1),
    )
    out = 0
    for h, w_q in enumerate(weights["q_proj"].split(nope + rope)):
        q = x @ w_q.T
        scores = (
            q[:, :nope] @ (latent @ rows[2 * h].T).T
            + torch.einsum("tij,tj->ti", turn, q[:, nope:]) @ key.T
        )
        scores = scores * m**2 / math.sqrt(nope + rope)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        out = out + torch.softmax(scores, -1) @ (latent @ rows[2 * h + 1].T) @ columns[h].T
    return out


# ---------------------------------------------------------------- 6.2 a cache of latents


answers.slips(
    "6.2",
    """
    rows_built_anew: Each append copies the whole buffer. Write into the rows there are.
    - end = self.length + len(c_kv)
    + end = self.length + len(c_kv)
    + self.rows = self.rows.clone()

    scale_of_the_row: 1 / √(rank + rope): absorbing changes how the products are grouped, not the
        scores. The scale stays that of nope + rope.
    - self.config.softmax_scale
    + mla.latent_dim**-0.5

    scale_of_the_latent: 1 / √rank: the scale stays that of the heads, nope + rope.
    - self.config.softmax_scale
    + mla.kv_lora_rank**-0.5

    mscale_forgotten: 1 / √(nope + rope) lacks what config.softmax_scale knows: the stretched
        context.
    - self.config.softmax_scale
    + mla.qk_head_dim**-0.5

    w_uk_transposed: W_UK is read along the wrong axis: q_nope W_UK sums over nope.
    - q_nope, w_uk)
    + q_nope, w_uk.mT.reshape(w_uk.shape))

    all_k_then_all_v: kv_b_proj is stored head by head; you take all of W_UK's rows first.
    - w_uk, w_uv = weight.unflatten(0, (q.shape[1], -1)).split(
    -     [mla.qk_nope_head_dim, mla.v_head_dim], dim=1
    - )
    + heads = q.shape[1]
    + w_uk, w_uv = weight.split([heads * mla.qk_nope_head_dim, heads * mla.v_head_dim])
    + w_uk, w_uv = w_uk.unflatten(0, (heads, -1)), w_uv.unflatten(0, (heads, -1))

    v_before_k: In each head of kv_b_proj W_UK's rows come before W_UV's.
    - w_uk, w_uv =
    + w_uv, w_uk =
    - [mla.qk_nope_head_dim, mla.v_head_dim]
    + [mla.v_head_dim, mla.qk_nope_head_dim]

    values_from_w_uk: Your values come from the first v_dim rows of a head, which are W_UK's.
    - out, w_uv)
    + out, weight.unflatten(0, (q.shape[1], -1))[:, : mla.v_head_dim])

    values_from_the_last_columns: A row's value is its latent, the first rank columns. The rotary
        key is no value.
    - rows[..., : mla.kv_lora_rank]
    + rows[..., -mla.kv_lora_rank :]

    rotary_part_dropped: q_pe takes no part in your scores: the order of the tokens is lost.
    - w_uk), q_pe]
    + w_uk), 0 * q_pe]

    key_before_latent: A row is the latent, then the rotary key. Yours, or your query, has them the
        other way round.
    - [c_kv, k_pe]
    + [k_pe, c_kv]

    overwrites_last_row: Your new row replaces the last old one: it belongs at row `length`.
    - end = self.length + len(c_kv)
    - self.rows[layer, self.length : end]
    + start = max(self.length - 1, 0)
    + end = start + len(c_kv)
    + self.rows[layer, start:end]

    length_moves_early: length moves with layer 0, so layer 1 writes the same tokens one pass
        further.
    - if layer == self.config.num_hidden_layers - 1:
    + if layer == 0:

    counts_passes: length grows by one per pass. A prompt brings more than one token.
    - self.length = end
    + self.length += 1

    attends_to_whole_buffer: You attend to the whole capacity. Only rows up to `end` hold tokens.
    - self.rows[layer, :end, None]
    + self.rows[layer, :, None]

    no_causal_mask: The tokens of a pass see each other's future.
    - self.config.softmax_scale
    + self.config.softmax_scale, causal=False

    top_left_mask: A chunk's first query comes after all old rows, not at row 0.
    - out = attention_torch(
    + padding = absorbed.new_zeros(end - len(q), *absorbed.shape[1:])
    + absorbed = torch.cat([absorbed, padding])
    + out = attention_torch(
    - out, w_uv)
    + out[: len(q)], w_uv)

    decompresses: Right, and as slow as before: k and v of every head are made again at each step.
    - q_nope, q_pe = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    + latent, key = rows.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
    + k_nope, v = (torch.einsum("tor,hdr->thd", latent, w) for w in (w_uk, w_uv))
    + k = torch.cat([k_nope, key.expand(-1, q.shape[1], -1)], dim=-1)
    + return attention_torch(q, k, v, self.config.softmax_scale)
    + q_nope, q_pe = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)

    decompresses_chunks: A chunk of four tokens expands the whole context. Absorb there, too.
    - q_nope, q_pe = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    + if len(q) > 1:
    +     latent, key = rows.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
    +     k_nope, v = (torch.einsum("tor,hdr->thd", latent, w) for w in (w_uk, w_uv))
    +     k = torch.cat([k_nope, key.expand(-1, q.shape[1], -1)], dim=-1)
    +     return attention_torch(q, k, v, self.config.softmax_scale)
    + q_nope, q_pe = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)

    copies_rows_for_every_head: The one KV head is copied for every query head: lesson 2's naive
        `attention` repeats it.
    - out = attention_torch(
    + out = attention(
    """,
)


@answers.alternative("6.2")
class ConcatenatedLatents(AbsorbedCache):
    """Scores of the two parts added, in place of one product over both."""

    def attend(self, layer, q, k_pe, c_kv):
        end, mla = self.append(layer, k_pe, c_kv), self.config.mla
        latent, key = self.rows[layer, :end].split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        weight = self.model.layers[layer].self_attn.kv_b_proj.weight
        out = []
        for h, head in enumerate(weight.chunk(q.shape[1])):
            q_nope, q_pe = q[:, h].split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
            scores = (q_nope @ head[: mla.qk_nope_head_dim]) @ latent.T + q_pe @ key.T
            sees = naive.causal_mask(len(q), end)
            probs = naive.masked_softmax(scores * self.config.softmax_scale, sees)
            out.append(probs @ latent @ head[mla.qk_nope_head_dim :].T)
        return torch.stack(out, 1)


# ---------------------------------------------------------------- 6.3 predict


answers.slips(
    "6.3",
    """
    latent_alone: The rotary key is kept as well: rank + rope values.
    - row = rank + mla.qk_rope_head_dim
    + row = rank

    latent_as_k_and_v: You count the row twice. It is key and value at once, and kept once.
    - row = rank + mla.qk_rope_head_dim
    + row = 2 * (rank + mla.qk_rope_head_dim)

    value_twice: You keep the latent once as key and once as value; one row serves as both.
    - row = rank + mla.qk_rope_head_dim
    + row = 2 * rank + mla.qk_rope_head_dim

    key_of_each_head: You keep a rotary key for each head. There is one for all.
    - row = rank + mla.qk_rope_head_dim
    + row = rank + num_attention_heads * mla.qk_rope_head_dim

    one_layer: Every layer keeps its own rows.
    - num_hidden_layers * bytes_per_value / 1024
    + bytes_per_value / 1024

    kilobytes: You divide by 1000: that is kB. A KiB has 1024 bytes.
    - bytes_per_value / 1024
    + bytes_per_value / 1000

    always_two_bytes: You count 2 bytes a value whatever bytes_per_value says.
    - bytes_per_value / 1024
    + 2 / 1024
    - row * bytes_per_value
    + row * 2

    heads_without_rope: Expanded keys have their rotary part, in every head.
    - * (nope + mla.qk_rope_head_dim + v_dim)
    + * (nope + v_dim)

    heads_sharing_rope: Expanded, the rotary key is in every head's k.
    - * (nope + mla.qk_rope_head_dim + v_dim)
    + * (nope + mla.qk_rope_head_dim / num_attention_heads + v_dim)

    heads_k_twice: v has its own width, v_dim.
    - * (nope + mla.qk_rope_head_dim + v_dim)
    + * 2 * (nope + mla.qk_rope_head_dim)

    gqa_k_alone: A KV head keeps k and v: 2 · gqa_head_dim values.
    - (2 * gqa_head_dim)
    + gqa_head_dim

    scores_alone: You count q · row only; weight · latent is as long again, without the rotary part.
    - num_attention_heads * 2 * flops_per_pair["absorbed"]
    + num_attention_heads * 2 * row

    values_of_the_whole_row: The value is the latent alone: rank products, not rank + rope.
    - num_attention_heads * 2 * flops_per_pair["absorbed"]
    + num_attention_heads * 2 * 2 * row

    one_flop: A multiply and an add are two FLOPs.
    - num_attention_heads * 2 * flops_per_pair["absorbed"]
    + num_attention_heads * flops_per_pair["absorbed"]

    intensity_of_one_head: All heads use the row that was read once: multiply by their number.
    - num_attention_heads * 2 * flops_per_pair["absorbed"]
    + 2 * flops_per_pair["absorbed"]

    row_read_twice: You read the latent twice, as key and as value. A kernel loads it once.
    - (row * bytes_per_value)
    + ((row + rank) * bytes_per_value)

    crossover_of_scores: Values count as well: expanding makes k and v, a pair costs score and
        value.
    - rank * (nope + v_dim) / (flops_per_pair["absorbed"] - flops_per_pair["expanded"])
    + rank * nope / (rank - nope)

    crossover_half: You halve the crossover; both sides count two FLOPs, so the factor cancels.
    - rank * (nope + v_dim) / (flops_per_pair["absorbed"]
    + rank * (nope + v_dim) / 2 / (flops_per_pair["absorbed"]

    crossover_ratio: That is how much dearer a pair is. The crossover is a number of tokens.
    - rank * (nope + v_dim) / (flops_per_pair["absorbed"] - flops_per_pair["expanded"])
    + flops_per_pair["absorbed"] / flops_per_pair["expanded"]

    crossover_without_subtraction: The expanded form pays for its pairs, too: subtract them.
    - (flops_per_pair["absorbed"] - flops_per_pair["expanded"])
    + flops_per_pair["absorbed"]

    crossover_lopsided: The rotary part costs the same in both forms: it cancels.
    - "expanded": nope + mla.qk_rope_head_dim + v_dim
    + "expanded": nope + v_dim
    """,
)


@answers.alternative("6.3")
def by_counting(num_hidden_layers, num_attention_heads, mla, bytes_per_value, gqa_head_dim):
    rank, parts = mla.kv_lora_rank, mla.qk_nope_head_dim + mla.v_head_dim
    kept = (rank + mla.qk_rope_head_dim) * bytes_per_value
    return (
        num_hidden_layers * kept / 2**10,
        num_hidden_layers
        * num_attention_heads
        * bytes_per_value
        * (parts + mla.qk_rope_head_dim)
        / 2**10,
        kept / bytes_per_value / gqa_head_dim / 2,
        sum(2 * (2 * rank + mla.qk_rope_head_dim) for _ in range(num_attention_heads)) / kept,
        1 / (2 / parts - 1 / rank),
    )


# ---------------------------------------------------------------- 6.4 token by token


answers.slips(
    "6.4",
    """
    as_given: That is the code as it was given.
    = key_kept_before_rotation, values_from_the_last_columns, scale_of_the_row

    key_kept_before_rotation: k_pe is kept unrotated, and every key is turned to the newest
        position: all tokens seem to be where the query is.
    - torch.cat([c_kv[t], turn(k_pe[t], t)])
    + torch.cat([c_kv[t], k_pe[t]])
    - query @ rows.T
    + query @ torch.cat([rows[:, :rank], turn(rows[:, rank:], t)], dim=-1).T

    key_never_rotated: k_pe is never rotated.
    - turn(k_pe[t], t)
    + k_pe[t]

    query_never_rotated: q_pe is not rotated, or every key is once too often.
    - turn(q[t, :, nope:], t)
    + q[t, :, nope:]

    values_from_the_last_columns: The value is the latent, the first rank columns of a row; yours
        end with the rotary key.
    - rows[:, :rank]
    + rows[:, -rank:]

    scale_of_the_row: √(rank + rope) belongs to the row. The scores are those of heads of nope +
        rope.
    - q.shape[-1] ** -0.5
    + query.shape[-1] ** -0.5

    scale_of_the_latent: √rank belongs to the latent. The scores are those of heads of nope + rope.
    - q.shape[-1] ** -0.5
    + rank**-0.5

    no_scale: The scores are not scaled.
    - * q.shape[-1] ** -0.5

    not_itself: A token sees itself, too.
    - scores = query @ rows.T
    + seen = rows[:-1] if t else rows
    + scores = query @ seen.T
    - rows[:, :rank]
    + seen[:, :rank]

    two_of_three_found: The scale is right now. Two bugs are left.
    = key_kept_before_rotation, values_from_the_last_columns
    """,
)


@answers.alternative("6.4")
def whole_prompt_absorbed(q, c_kv, k_pe, w_uk, w_uv, cos, sin):
    def turned(pe):
        a, b, c, s = *pe.chunk(2, -1), cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    nope = w_uk.shape[1]
    rows = torch.cat([c_kv[:, None], turned(k_pe[:, None])], -1)
    absorbed = torch.cat(
        [torch.einsum("thn,hnr->thr", q[..., :nope], w_uk), turned(q[..., nope:])], -1
    )
    out = naive.attention(absorbed, rows, c_kv[:, None], q.shape[-1] ** -0.5)
    return torch.einsum("thr,hvr->thv", out, w_uv)
