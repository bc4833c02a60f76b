"""Wrong answers to lesson 06's exercises: real slips, and the hint for whoever made them."""

import math
from functools import partial

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.optimized import attention_torch
from solutions.l06_mla import AbsorbedCache
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 6.1 from the weights


def slipped_layer(
    x,
    weights,
    mla,
    num_heads,
    cos,
    sin,
    factor=1.0,
    mscale_all_dim=0.0,
    *,
    layout="pairs",
    q_layout=None,
    turn=("q", "k"),
    whole_head=False,
    norm="latent",
    eps=1e-6,
    norm_weight=True,
    kv_b="per head",
    q_split="nope first",
    width="qk",
    m_power=2,
    own_keys=False,
    causal=True,
    key_first=False,
    out_dtype=None,
):
    """The layer with one slip. The keyword switches exist only here, to spell the wrong answers
    briefly.
    """
    rank, nope, rope, v_dim = (
        mla.kv_lora_rank,
        mla.qk_nope_head_dim,
        mla.qk_rope_head_dim,
        mla.v_head_dim,
    )

    def rotated(pe, how):
        a, b = (pe[..., 0::2], pe[..., 1::2]) if how == "pairs" else pe.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        both = (
            (a * c - b * s, b * c + a * s) if how != "backwards" else (a * c + b * s, b * c - a * s)
        )
        return torch.cat(both, -1) if how != "pairs" else torch.stack(both, -1).flatten(-2)

    q = (x @ weights["q_proj"].T).unflatten(-1, (num_heads, nope + rope))
    q_nope, q_pe = (
        (q[..., :nope], q[..., nope:])
        if q_split == "nope first"
        else (q[..., rope:], q[..., :rope])
    )
    down = x @ weights["kv_a_proj_with_mqa"].T
    if norm == "both":
        down = down * torch.rsqrt(down.square().mean(-1, keepdim=True) + eps)
    c_kv, k_pe = (
        (down[:, :rank], down[:, rank:]) if not key_first else (down[:, rope:], down[:, :rope])
    )
    if norm == "latent":
        c_kv = c_kv * torch.rsqrt(c_kv.square().mean(-1, keepdim=True) + eps)
    if norm != "none" and norm_weight:
        c_kv = c_kv * weights["kv_a_layernorm"]
    if "latent" in turn:
        c_kv = torch.cat([rotated(c_kv[:, None, :rope], layout)[:, 0], c_kv[:, rope:]], -1)
    up = c_kv @ weights["kv_b_proj"].T
    if kv_b == "per head":
        k_nope, v = up.unflatten(-1, (num_heads, -1)).split([nope, v_dim], -1)
    elif kv_b == "v first":
        v, k_nope = up.unflatten(-1, (num_heads, -1)).split([v_dim, nope], -1)
    else:
        k_nope, v = (
            part.unflatten(-1, (num_heads, -1))
            for part in up.split([num_heads * nope, num_heads * v_dim], -1)
        )
    if whole_head and nope >= rope:
        q_nope, k_nope = (
            torch.cat([rotated(y[..., :rope], layout), y[..., rope:]], -1) for y in (q_nope, k_nope)
        )
    elif whole_head:
        q_nope, k_nope = (y * cos[:, None, :1] for y in (q_nope, k_nope))
    keys = k_pe[:, None].expand(-1, num_heads, -1)
    if own_keys:
        keys = torch.stack([k_pe.roll(2 * h, -1) for h in range(num_heads)], 1)
    q_pe = rotated(q_pe, q_layout or layout) if "q" in turn else q_pe
    keys = rotated(keys, layout) if "k" in turn else keys
    scale = {
        "qk": nope + rope,
        "latent and key": rank + rope,
        "latent": rank,
        "nope": nope,
        "v": v_dim,
    }[width] ** -0.5
    scale *= (0.1 * mscale_all_dim * math.log(factor) + 1) ** m_power
    out = naive.attention(
        torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, keys], -1), v, scale, causal=causal
    )
    return (out.flatten(-2) @ weights["o_proj"].T).to(out_dtype or x.dtype)


for name, slip, hint in [
    (
        "latent_rotated",
        dict(turn=("q", "k", "latent")),
        "You rotate the latent. W_UK could then never move into the query: only k_pe and q_pe "
        "carry the position.",
    ),
    (
        "whole_head_rotated",
        dict(whole_head=True),
        "You rotate the coordinates without position too. Only the last `rope` turn.",
    ),
    ("key_not_rotated", dict(turn=("q",)), "k_pe is not rotated."),
    ("query_not_rotated", dict(turn=("k",)), "q_pe is not rotated."),
    (
        "halves",
        dict(layout="halves"),
        "You rotate coordinate i with i + rope / 2. In these weights the pairs are (2i, 2i + 1).",
    ),
    (
        "layouts_mixed",
        dict(q_layout="halves"),
        "q_pe and k_pe are rotated in different layouts; their product means nothing then.",
    ),
    (
        "backwards",
        dict(layout="backwards"),
        "Halves in place of pairs, and the angle's sign is turned.",
    ),
    (
        "key_of_each_head",
        dict(own_keys=True),
        "Each head gets a rotary key of its own. There is one, and all heads share it.",
    ),
    ("norm_forgotten", dict(norm="none"), "The latent's RMSNorm is missing."),
    (
        "norm_over_both",
        dict(norm="both"),
        "You norm the latent together with the rotary key: only the latent is normed.",
    ),
    ("norm_weight_forgotten", dict(norm_weight=False), "kv_a_layernorm's weight is not used."),
    ("norm_eps", dict(eps=1e-5), "The norm adds 1e-6, whatever the model's other norms add."),
    (
        "all_k_then_all_v",
        dict(kv_b="all k first"),
        "kv_b_proj lies head by head, nope rows and then v_dim rows; you take all of W_UK first.",
    ),
    ("v_before_k", dict(kv_b="v first"), "In each head of kv_b_proj k's rows come before v's."),
    (
        "rope_before_nope",
        dict(q_split="rope first"),
        "A head of q holds its nope coordinates first, the rotary ones last.",
    ),
    (
        "key_before_latent",
        dict(key_first=True),
        "kv_a_proj_with_mqa gives the latent first, the rotary key last.",
    ),
    (
        "scale_of_the_row",
        dict(width="latent and key"),
        "1 / √(rank + rope) is the cache row's width. The scores are those of heads of nope + "
        "rope.",
    ),
    (
        "scale_of_the_latent",
        dict(width="latent"),
        "1 / √rank is the latent's width. The scores are those of heads of nope + rope.",
    ),
    ("scale_without_rope", dict(width="nope"), "A head of q and k is nope + rope wide, not nope."),
    (
        "scale_of_v",
        dict(width="v"),
        "The scale comes from the width of q and k, not from that of v.",
    ),
    (
        "mscale_forgotten",
        dict(m_power=0),
        "The scale lacks m²: a stretched model sharpens its softmax.",
    ),
    (
        "mscale_once",
        dict(m_power=1),
        "m enters once. q and k are scaled by m each, so their product by m².",
    ),
    ("not_causal", dict(causal=False), "Your tokens see their future."),
    ("returns_float64", dict(out_dtype=torch.float64), "The result has another dtype than x."),
]:
    answers.wrong("6.1", hint, name)(partial(slipped_layer, **slip))


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


class SlippedCache(AbsorbedCache):
    """The cache with one slip: the attributes named in `slip` differ from what the class says here."""

    order = "latent first"
    start = "length"  # where new rows go
    eager = False  # length moves with the first layer of a pass
    step_by_one = False
    whole = drop_new = False  # attends to all rows, or only to the old ones
    causal = True
    top_left = False
    scale = "config"
    weights = "per head"
    transposed = False  # W_UK's values read along the wrong axis
    values = "first"  # which columns of a row are its value
    pe = True  # q_pe takes part
    v_from_k = False
    expand = None  # None, or from how many new tokens on k and v are expanded
    repeat = False  # rows copied for every head
    anew = False  # the buffer is built anew by every append

    def __init__(self, model, capacity, **slip):
        super().__init__(model, capacity)
        vars(self).update(slip)

    def append(self, layer, k_pe, c_kv):
        start = max(self.length - 1, 0) if self.start == "over the last" else self.length
        end = start + len(c_kv)
        if self.anew:
            self.rows = self.rows.clone()
        self.rows[layer, start:end] = torch.cat(
            [c_kv, k_pe] if self.order == "latent first" else [k_pe, c_kv], -1
        )[:, 0]
        if layer == (0 if self.eager else 1):
            self.length = self.length + 1 if self.step_by_one else end
        return end

    def attend(self, layer, q, k_pe, c_kv):
        mla, heads = self.config.mla, q.shape[1]
        rank, nope, v_dim = mla.kv_lora_rank, mla.qk_nope_head_dim, mla.v_head_dim
        end = self.append(layer, k_pe, c_kv) - (len(q) if self.drop_new else 0)
        rows = self.rows[layer, : len(self.rows[layer]) if self.whole else end, None]
        weight = self.model.layers[layer].self_attn.kv_b_proj.weight
        if self.weights == "per head":
            w_uk, w_uv = weight.unflatten(0, (heads, -1)).split([nope, v_dim], 1)
        elif self.weights == "v first":
            w_uv, w_uk = weight.unflatten(0, (heads, -1)).split([v_dim, nope], 1)
        else:
            w_uk, w_uv = (
                weight[: heads * nope].unflatten(0, (heads, nope)),
                weight[heads * nope :].unflatten(0, (heads, v_dim)),
            )
        if self.transposed:
            w_uk = w_uk.mT.reshape(heads, nope, rank)
        w_uv = weight.unflatten(0, (heads, -1))[:, :v_dim] if self.v_from_k else w_uv
        scale = {
            "config": self.config.softmax_scale,
            "row": (rank + mla.qk_rope_head_dim) ** -0.5,
            "latent": rank**-0.5,
            "plain": mla.qk_head_dim**-0.5,
        }[self.scale]
        if self.expand is not None and len(q) >= self.expand:
            both = torch.einsum("tor,hdr->thd", rows[..., :rank], torch.cat([w_uk, w_uv], 1))
            k = torch.cat([both[..., :nope], rows[..., rank:].expand(-1, heads, -1)], -1)
            return attention_torch(q, k, both[..., nope:], scale)
        q_pe = q[..., nope:] if self.pe else 0 * q[..., nope:]
        absorbed = torch.cat([torch.einsum("thn,hnr->thr", q[..., :nope], w_uk), q_pe], -1)
        values = rows[..., :rank] if self.values == "first" else rows[..., -rank:]
        if self.top_left:
            absorbed = torch.cat(
                [absorbed, absorbed.new_zeros(len(rows) - len(q), *absorbed.shape[1:])]
            )
        attend = naive.attention if self.repeat else attention_torch
        out = attend(absorbed, rows, values, scale, causal=self.causal)[: len(q)]
        return torch.einsum("thr,hvr->thv", out, w_uv)


for name, slip, hint in [
    (
        "rows_built_anew",
        dict(anew=True),
        "Each append copies the whole buffer. Write into the rows there are.",
    ),
    (
        "scale_of_the_row",
        dict(scale="row"),
        "1 / √(rank + rope): absorbing changes how the products are grouped, not the scores. The "
        "scale stays that of nope + rope.",
    ),
    (
        "scale_of_the_latent",
        dict(scale="latent"),
        "1 / √rank: the scale stays that of the heads, nope + rope.",
    ),
    (
        "mscale_forgotten",
        dict(scale="plain"),
        "1 / √(nope + rope) lacks what config.softmax_scale knows: the stretched context.",
    ),
    (
        "w_uk_transposed",
        dict(transposed=True),
        "W_UK is read along the wrong axis: q_nope W_UK sums over nope.",
    ),
    (
        "all_k_then_all_v",
        dict(weights="all k first"),
        "kv_b_proj lies head by head; you take all of W_UK's rows first.",
    ),
    (
        "v_before_k",
        dict(weights="v first"),
        "In each head of kv_b_proj W_UK's rows come before W_UV's.",
    ),
    (
        "values_from_w_uk",
        dict(v_from_k=True),
        "Your values come from the first v_dim rows of a head, which are W_UK's.",
    ),
    (
        "values_from_the_last_columns",
        dict(values="last"),
        "A row's value is its latent, the first rank columns. The rotary key is no value.",
    ),
    (
        "rotary_part_dropped",
        dict(pe=False),
        "q_pe takes no part in your scores: the order of the tokens is lost.",
    ),
    (
        "key_before_latent",
        dict(order="key first"),
        "A row is the latent, then the rotary key. Yours, or your query, has them the other way "
        "round.",
    ),
    (
        "overwrites_last_row",
        dict(start="over the last"),
        "Your new row replaces the last old one: it belongs at row `length`.",
    ),
    (
        "length_moves_early",
        dict(eager=True),
        "length moves with layer 0, so layer 1 writes the same tokens one pass further.",
    ),
    (
        "counts_passes",
        dict(step_by_one=True),
        "length grows by one per pass. A prompt brings more than one token.",
    ),
    (
        "attends_to_whole_buffer",
        dict(whole=True),
        "You attend to the whole capacity. Only rows up to `end` hold tokens.",
    ),
    ("no_causal_mask", dict(causal=False), "The tokens of a pass see each other's future."),
    (
        "top_left_mask",
        dict(top_left=True),
        "A chunk's first query stands behind all old rows, not at row 0.",
    ),
    (
        "decompresses",
        dict(expand=1),
        "Right, and as slow as before: k and v of every head are made again at each step.",
    ),
    (
        "decompresses_chunks",
        dict(expand=2),
        "A chunk of four tokens expands the whole context. Absorb there, too.",
    ),
    (
        "copies_rows_for_every_head",
        dict(repeat=True),
        "The one KV head is copied for every query head: lesson 2's naive `attention` repeats it.",
    ),
]:
    answers.wrong("6.2", hint, name)(partial(SlippedCache, **slip))


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


def slipped_numbers(
    num_hidden_layers,
    num_attention_heads,
    mla,
    bytes_per_value,
    gqa_head_dim,
    *,
    row="latent and key",
    layers=True,
    kib=1024,
    itemsize=None,
    heads="k and v",
    gqa_kv=2,
    pair="both",
    flops=2,
    over="row",
    per_head=False,
    crossing="pairs",
    rope_in_pairs=True,
):
    """The five numbers with one slip, spelled by a switch."""
    rank, nope, rope, v_dim = (
        mla.kv_lora_rank,
        mla.qk_nope_head_dim,
        mla.qk_rope_head_dim,
        mla.v_head_dim,
    )
    size = {
        "latent and key": rank + rope,
        "latent": rank,
        "k and v of it": 2 * (rank + rope),
        "value twice": 2 * rank + rope,
        "key of each head": rank + num_attention_heads * rope,
    }[row]
    of_heads = {
        "k and v": nope + rope + v_dim,
        "no rope": nope + v_dim,
        "k twice": 2 * (nope + rope),
        "shared rope": nope + v_dim + rope / num_attention_heads,
    }[heads]
    unit = (num_hidden_layers if layers else 1) * (itemsize or bytes_per_value) / kib
    absorbed = {"both": 2 * rank + rope, "scores": rank + rope, "row twice": 2 * (rank + rope)}[
        pair
    ]
    intensity = (
        flops
        * absorbed
        * (1 if per_head else num_attention_heads)
        / ({"row": size, "values twice": absorbed}[over] * (itemsize or bytes_per_value))
    )
    expanded = nope + rope + v_dim if rope_in_pairs else nope + v_dim
    dearer = 2 * rank + (rope if rope_in_pairs or crossing == "lopsided" else 0) - expanded
    crossover = {
        "pairs": rank * (nope + v_dim) / dearer,
        "lopsided": rank * (nope + v_dim) / dearer,
        "scores alone": rank * nope / (rank - nope),
        "half": rank * (nope + v_dim) / (2 * dearer),
        "ratio": (2 * rank + rope) / (nope + rope + v_dim),
        "no subtraction": rank * (nope + v_dim) / (2 * rank + rope),
    }[crossing]
    return (
        size * unit,
        num_attention_heads * of_heads * unit,
        size / (gqa_kv * gqa_head_dim),
        intensity,
        crossover,
    )


for name, slip, hint in [
    ("latent_alone", dict(row="latent"), "The rotary key is kept as well: rank + rope values."),
    (
        "latent_as_k_and_v",
        dict(row="k and v of it"),
        "You count the row twice. It is key and value at once, and kept once.",
    ),
    (
        "value_twice",
        dict(row="value twice"),
        "You keep the latent once as key and once as value; one row serves as both.",
    ),
    (
        "key_of_each_head",
        dict(row="key of each head"),
        "You keep a rotary key for each head. There is one for all.",
    ),
    ("one_layer", dict(layers=False), "Every layer keeps its own rows."),
    ("kilobytes", dict(kib=1000), "You divide by 1000: that is kB. A KiB has 1024 bytes."),
    (
        "always_two_bytes",
        dict(itemsize=2),
        "You count 2 bytes a value whatever bytes_per_value says.",
    ),
    (
        "heads_without_rope",
        dict(heads="no rope"),
        "Expanded keys have their rotary part, in every head.",
    ),
    (
        "heads_sharing_rope",
        dict(heads="shared rope"),
        "Expanded, the rotary key stands in every head's k.",
    ),
    ("heads_k_twice", dict(heads="k twice"), "v has its own width, v_dim."),
    ("gqa_k_alone", dict(gqa_kv=1), "A KV head keeps k and v: 2 · gqa_head_dim values."),
    (
        "scores_alone",
        dict(pair="scores"),
        "You count q · row only; weight · latent is as long again, without the rotary part.",
    ),
    (
        "values_of_the_whole_row",
        dict(pair="row twice"),
        "The value is the latent alone: rank products, not rank + rope.",
    ),
    ("one_flop", dict(flops=1), "A multiply and an add are two FLOPs."),
    (
        "intensity_of_one_head",
        dict(per_head=True),
        "All heads use the row that was read once: multiply by their number.",
    ),
    (
        "row_read_twice",
        dict(over="values twice"),
        "You read the latent twice, as key and as value. A kernel loads it once.",
    ),
    (
        "crossover_of_scores",
        dict(crossing="scores alone"),
        "Values count as well: expanding makes k and v, a pair costs score and value.",
    ),
    (
        "crossover_half",
        dict(crossing="half"),
        "You halve the crossover; both sides count two FLOPs, so the factor cancels.",
    ),
    (
        "crossover_ratio",
        dict(crossing="ratio"),
        "That is how much dearer a pair is. The crossover is a number of tokens.",
    ),
    (
        "crossover_without_subtraction",
        dict(crossing="no subtraction"),
        "The expanded form pays for its pairs, too: subtract them.",
    ),
    (
        "crossover_lopsided",
        dict(crossing="lopsided", rope_in_pairs=False),
        "The rotary part costs the same in both forms: it cancels.",
    ),
]:
    answers.wrong("6.3", hint, name)(partial(slipped_numbers, **slip))


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


def slipped_tokens(
    q,
    c_kv,
    k_pe,
    w_uk,
    w_uv,
    cos,
    sin,
    *,
    key="rotated",
    values="first",
    scale="heads",
    see="all",
    query="rotated",
):
    """Absorbed decoding with one slip, or the stub's."""

    def turn(pe, t):
        a, b = pe.chunk(2, dim=-1)
        return torch.cat([a * cos[t] - b * sin[t], b * cos[t] + a * sin[t]], dim=-1)

    nope, rank = w_uk.shape[1:]
    rows, outs = c_kv.new_empty(0, rank + k_pe.shape[1]), []
    for t in range(len(q)):
        rows = torch.cat(
            [rows, torch.cat([c_kv[t], turn(k_pe[t], t) if key == "rotated" else k_pe[t]])[None]]
        )
        q_pe = turn(q[t, :, nope:], t) if query == "rotated" else q[t, :, nope:]
        absorbed = torch.cat([torch.einsum("hn,hnr->hr", q[t, :, :nope], w_uk), q_pe], -1)
        keys = (
            torch.cat([rows[:, :rank], turn(rows[:, rank:], t)], -1)
            if key == "turned when read"
            else rows
        )
        if see == "before":
            keys = keys[:-1] if t else keys
        width = {"heads": q.shape[-1], "row": absorbed.shape[-1], "latent": rank, "none": 1}[scale]
        probs = torch.softmax(absorbed @ keys.T * width**-0.5, -1)
        value = {"first": rows[:, :rank], "last": rows[:, -rank:]}[values][: len(keys)]
        outs.append(torch.einsum("hr,hvr->hv", probs @ value, w_uv))
    return torch.stack(outs)


for name, slip, hint in [
    (
        "as_given",
        dict(key="turned when read", values="last", scale="row"),
        "That is the code as it was given.",
    ),
    (
        "key_kept_before_rotation",
        dict(key="turned when read"),
        "k_pe is kept unrotated, and every key is turned to the newest position: all tokens seem "
        "to stand where the query does.",
    ),
    ("key_never_rotated", dict(key="raw"), "k_pe is never rotated."),
    (
        "query_never_rotated",
        dict(query="raw"),
        "q_pe is not rotated, or every key is once too often.",
    ),
    (
        "values_from_the_last_columns",
        dict(values="last"),
        "The value is the latent, the first rank columns of a row; yours end with the rotary key.",
    ),
    (
        "scale_of_the_row",
        dict(scale="row"),
        "√(rank + rope) belongs to the row. The scores are those of heads of nope + rope.",
    ),
    (
        "scale_of_the_latent",
        dict(scale="latent"),
        "√rank belongs to the latent. The scores are those of heads of nope + rope.",
    ),
    ("no_scale", dict(scale="none"), "The scores are not scaled."),
    ("not_itself", dict(see="before"), "A token sees itself, too."),
    (
        "two_of_three_found",
        dict(key="turned when read", values="last"),
        "The scale is right now. Two bugs are left.",
    ),
]:
    answers.wrong("6.4", hint, name)(partial(slipped_tokens, **slip))


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
