"""Wrong answers to lesson 20's exercises: slips of people who cut a model for several GPUs, with a
hint for each.
"""

import math
from functools import partial

import torch

from lessons.l02_naive_attention.naive import attention
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 20.1 attention


def slipped_attention(
    x,
    weights,
    head_dim,
    ranks,
    *,
    kv_of="right",
    heads_of="blocks",
    o_columns="own",
    q_bias="own",
    after_q="nothing",
    after_heads="nothing",
    bias="once",
    reduce="sum",
    refuses=True,
    whole=False,
):
    """attention_on_ranks with one slip, spelled by a switch."""
    heads, kv_heads = len(weights.q_proj) // head_dim, len(weights.k_proj) // head_dim
    size = ranks.size
    if refuses and heads % size:
        raise ValueError(f"size: got {size}; accepted: a divisor of {heads}")
    own, own_kv = max(1, heads // size), max(1, kv_heads // size)
    columns_of_head = torch.arange(heads * head_dim).view(heads, head_dim)
    columns_of_kv = torch.arange(kv_heads * head_dim).view(kv_heads, head_dim)
    places = []
    for rank in range(size):
        if whole:
            places.append((columns_of_head.flatten(), columns_of_kv.flatten()))
            continue
        mine = {
            "blocks": [(rank * own + at) % heads for at in range(own)],
            "interleaved": list(range(rank, heads, size)) or [0],
            "first": list(range(own)),
        }[heads_of]
        first = {
            "right": rank * kv_heads // size,
            "modulo": rank % kv_heads if size > kv_heads else rank * kv_heads // size,
            "first": 0,
            "all": 0,
            "split": 0,
            "like q": min(rank * own, kv_heads - own_kv),
        }[kv_of]
        count = kv_heads if kv_of == "all" else own_kv
        their = [(first + at) % kv_heads for at in range(count)]
        places.append((columns_of_head[mine].flatten(), columns_of_kv[their].flatten()))
    if kv_of == "split":  # a piece of a head on each rank
        width = kv_heads * head_dim // size
        pieces = [torch.arange(rank * width, (rank + 1) * width) for rank in range(size)]
        places = [(q_rows, piece) for (q_rows, _), piece in zip(places, pieces)]
    q, k, v = [], [], []
    for q_rows, kv_rows in places:
        by = {
            "own": weights.q_bias[q_rows],
            "first": weights.q_bias[: len(q_rows)],
            "none": 0.0,
        }[q_bias]
        q.append(x @ weights.q_proj[q_rows].T + by)
        k.append(x @ weights.k_proj[kv_rows].T)
        v.append(x @ weights.v_proj[kv_rows].T)
    if after_q == "all_reduce":
        q, k, v = (ranks.all_reduce(parts) for parts in (q, k, v))
    outs = []
    for rank in range(size):
        split = (part[rank].unflatten(-1, (-1, head_dim)) for part in (q, k, v))
        outs.append(attention(*split).flatten(-2))
    if after_heads == "all_reduce":
        outs = ranks.all_reduce(outs)
    if after_heads == "gather":  # then every rank multiplies by the whole o_proj
        outs = ranks.all_gather(outs)
        return [out @ weights.o_proj.T + weights.o_bias for out in outs]
    parts = []
    for out, (q_rows, _) in zip(outs, places):
        columns = dict(own=q_rows, first=torch.arange(len(q_rows)))[o_columns]
        part = out @ weights.o_proj[:, columns].T
        if bias == "each":
            part = part + weights.o_bias
        if whole:
            part = part / size
        parts.append(part)
    if reduce == "sum":
        parts = ranks.all_reduce(parts)
    elif reduce == "mean":
        parts = [part / size for part in ranks.all_reduce(parts)]
    elif reduce == "twice":
        parts = ranks.all_reduce(ranks.all_reduce(parts))
    elif reduce == "rank 0":
        parts = [ranks.all_reduce(parts)[0], *parts[1:]]
    elif reduce == "gather":
        parts = ranks.all_gather(parts)
    elif reduce == "by hand":
        parts = [sum(parts[1:], parts[0])] * size
    elif reduce == "gather, then add":
        width = len(weights.o_bias)
        parts = [sum(part.split(width, -1)) for part in ranks.all_gather(parts)]
    if bias == "rank 0":
        return [part + weights.o_bias * (rank == 0) for rank, part in enumerate(parts)]
    return [part + weights.o_bias if bias == "once" else part for part in parts]


for name, slip, hint in [
    (
        "shard_returned",
        dict(reduce="none"),
        "Each rank returns what its own heads add to the result. The parts have to be summed.",
    ),
    (
        "all_reduce_after_a_column_split",
        dict(after_q="all_reduce"),
        "q, k and v of different heads are not parts of a sum: after a column split there is "
        "nothing to reduce.",
    ),
    (
        "all_reduce_of_the_heads",
        dict(after_heads="all_reduce"),
        "You summed the heads of different ranks. Multiply each rank's heads by their columns of "
        "o_proj first; those products are the parts of a sum.",
    ),
    (
        "bias_on_every_rank",
        dict(bias="each"),
        "o_bias is added on every rank before the sum, so it counts size times. Add it once.",
    ),
    ("bias_forgotten", dict(bias="none"), "o_bias is missing."),
    (
        "bias_on_rank_0_after_the_sum",
        dict(bias="rank 0"),
        "After the all-reduce every rank has its own copy of the sum, and each copy needs o_bias.",
    ),
    (
        "kv_heads_split_beyond_their_number",
        dict(kv_of="split"),
        "With more ranks than KV heads a rank gets a piece of a head. It needs a whole one: a copy.",
    ),
    (
        "kv_head_by_rank_modulo",
        dict(kv_of="modulo"),
        "Neighbouring ranks share a KV head, as neighbouring query heads do: rank · Hkv / size.",
    ),
    (
        "every_rank_has_the_first_kv_heads",
        dict(kv_of="first"),
        "Every rank reads the same KV heads: begin at rank · Hkv / size.",
    ),
    (
        "every_rank_has_all_kv_heads",
        dict(kv_of="all"),
        "With all KV heads on a rank, its few query heads form other groups, and read wrong ones.",
    ),
    (
        "kv_heads_counted_like_query_heads",
        dict(kv_of="like q"),
        "The first KV head of a rank is rank · Hkv / size, not the number of its first query head.",
    ),
    (
        "heads_dealt_like_cards",
        dict(heads_of="interleaved"),
        "Rank r takes heads side by side, so that a rank's heads share their KV heads.",
    ),
    (
        "the_same_heads_on_each_rank",
        dict(heads_of="first"),
        "All ranks compute the first heads: begin at r · Hq / size.",
    ),
    (
        "first_columns_of_o_proj",
        dict(o_columns="first"),
        "Every rank uses the first columns of o_proj. The columns belong to the heads of the rank.",
    ),
    (
        "first_part_of_the_q_bias",
        dict(q_bias="first"),
        "q_bias is cut like the rows of q_proj: each rank its own part.",
    ),
    ("q_bias_forgotten", dict(q_bias="none"), "q_bias is missing."),
    ("mean_of_the_parts", dict(reduce="mean"), "The parts are summed, not averaged."),
    (
        "reduced_twice",
        dict(reduce="twice"),
        "After one all-reduce every rank has the sum. The second one adds up size copies of it.",
    ),
    (
        "only_rank_0_has_the_sum",
        dict(reduce="rank 0"),
        "The next layer runs on every rank, so all of them need the sum.",
    ),
    (
        "parts_side_by_side",
        dict(reduce="gather"),
        "The parts have the full width already. They are summed, not put side by side.",
    ),
    (
        "heads_gathered",
        dict(after_heads="gather"),
        "The result is right, but now every rank multiplies by the whole o_proj. Cut o_proj by "
        "columns, and sum.",
    ),
    (
        "gathered_and_added",
        dict(reduce="gather, then add"),
        "The result is right, but an all-gather moves more than the one all-reduce that the "
        "statement asks for.",
    ),
    (
        "added_without_a_wire",
        dict(reduce="by hand"),
        "You added the entries of the list. Another rank's entry must come through `ranks`.",
    ),
    (
        "every_rank_does_everything",
        dict(whole=True),
        "Every rank computes all heads, and the sum is divided by size: nothing is saved.",
    ),
    (
        "takes_any_size",
        dict(refuses=False),
        "If size does not divide the query heads, raise ValueError that names size.",
    ),
]:
    answers.wrong("20.1", hint, name)(partial(slipped_attention, **slip))


@answers.alternative("20.1")
def by_chunks(x, weights, head_dim, ranks):
    """Cut by chunk; the bias on rank 0 before the sum."""
    size, heads = ranks.size, weights.q_proj.shape[0] // head_dim
    if heads % size != 0:
        raise ValueError(f"size = {size} does not divide {heads}")

    def head_parts(matrix):
        heads_of = matrix.view(-1, head_dim, matrix.shape[1])
        copies = max(1, size // len(heads_of))
        return [part.flatten(0, 1) for part in heads_of.repeat_interleave(copies, 0).chunk(size)]

    q_parts, k_parts, v_parts = map(head_parts, (weights.q_proj, weights.k_proj, weights.v_proj))
    partials = []
    for rank, (bias, columns) in enumerate(
        zip(weights.q_bias.chunk(size), weights.o_proj.chunk(size, 1))
    ):
        q = torch.nn.functional.linear(x, q_parts[rank], bias).view(len(x), -1, head_dim)
        k, v = ((x @ parts[rank].T).view(len(x), -1, head_dim) for parts in (k_parts, v_parts))
        first = weights.o_bias if rank == 0 else None
        partials.append(torch.nn.functional.linear(attention(q, k, v).flatten(1), columns, first))
    return ranks.all_reduce(partials)


@answers.alternative("20.1")
def head_by_head(x, weights, head_dim, ranks):
    """Each head adds its own product, with its KV head computed once a rank."""
    heads, kv_heads = (len(part) // head_dim for part in (weights.q_proj, weights.k_proj))
    if heads / ranks.size != heads // ranks.size:
        raise ValueError("size")
    parts = []
    for rank in range(ranks.size):
        total, known = torch.zeros(len(x), len(weights.o_bias)), {}
        for head in range(rank * heads // ranks.size, (rank + 1) * heads // ranks.size):
            rows = slice(head * head_dim, head * head_dim + head_dim)
            shared = head // (heads // kv_heads)
            if shared not in known:
                columns = slice(shared * head_dim, shared * head_dim + head_dim)
                known[shared] = [x @ m[columns].T for m in (weights.k_proj, weights.v_proj)]
            q = x @ weights.q_proj[rows].T + weights.q_bias[rows]
            out = attention(*(part[:, None] for part in (q, *known[shared])))
            total = total + out[:, 0] @ weights.o_proj[:, rows].T
        parts.append(total)
    return [part + weights.o_bias for part in ranks.all_reduce(parts)]


# ---------------------------------------------------------------- 20.2 greedy


def slipped_greedy(
    local_logits,
    vocab_size,
    ranks,
    *,
    pad="hidden",
    offset="right",
    merge="rescaled",
    winner="largest",
    tie="first",
    guard=True,
    local_max=True,
    gather="three",
    result="logprob",
):
    """greedy_on_ranks with one slip, spelled by a switch."""
    width, size = local_logits[0].shape[1], ranks.size
    parts = []
    for rank, logits in enumerate(local_logits):
        first = {
            "right": rank * width,
            "none": 0,
            "of vocab_size": rank * (vocab_size // size),
            "one more": rank * width + rank,
        }[offset]
        token = rank * width + torch.arange(width)
        is_padding = token >= vocab_size
        own = logits.clone()
        if pad in ("hidden", "counted"):
            own = own.masked_fill(is_padding, -math.inf)
        elif pad == "zero":
            own = own.masked_fill(is_padding, 0.0)
        elif pad == "multiplied":
            own = own * ~is_padding
        elif pad == "one off":
            own = own.masked_fill(token > vocab_size, -math.inf)
        place = own.argmax(-1)
        if tie == "last":
            place = width - 1 - own.flip(-1).argmax(-1)
        best = own.gather(-1, place[:, None])[:, 0]
        summed = logits if pad == "counted" else own
        shift = best if local_max else torch.zeros_like(best)
        if guard:
            shift = shift.clamp(min=torch.finfo(shift.dtype).min)
        total = (summed - shift[:, None]).exp().sum(-1)
        parts.append(torch.stack([best, total, (first + place).float()], -1)[:, None])
    if gather == "all":
        ranks.all_gather(local_logits)
    if gather == "none":
        every = torch.cat(parts, 1)
    else:
        every = ranks.all_gather(parts, dim=1)[0]
    best, total, token = every.unbind(-1)
    if not local_max:
        total = total / best.clamp(min=torch.finfo(best.dtype).min).exp()
    key = dict(largest=best, sum=total, product=total * best.exp(), rank_0=best)[winner]
    where = key.argmax(-1, keepdim=True)
    if winner == "rank_0":
        where = torch.zeros_like(where)
    if tie in ("last", "last rank"):
        where = size - 1 - key.flip(-1).argmax(-1, keepdim=True)
    largest = best.gather(-1, where)
    merged = {
        "rescaled": (total * (best - largest).exp()).sum(-1),
        "added": total.sum(-1),
        "local": total.gather(-1, where)[:, 0],
        "other way": (total * (largest - best).clamp(max=80).exp()).sum(-1),
        "base 2": (total * (best - largest).exp2()).sum(-1),
        "largest sum": total.max(-1).values,
        "winner counts once more": (total * (best - largest).exp()).sum(-1) + 1,
    }[merge]
    value = {
        "logprob": -merged.log(),
        "probability": 1 / merged,
        "lse": largest[:, 0] + merged.log(),
        "logit": largest[:, 0],
        "positive": merged.log(),
        "base 2": -merged.log2(),
        "logit minus log of sum": largest[:, 0] - merged.log(),
    }[result]
    tokens = token.gather(-1, where)[:, 0]
    return tokens.int() if result == "int32" else tokens.long(), value


for name, slip, hint in [
    (
        "softmax_over_local_logits",
        dict(merge="local"),
        "The sum is that of the winner's rank alone. All ranks' tokens belong to the softmax.",
    ),
    (
        "sums_added_as_they_are",
        dict(merge="added"),
        "Each rank's sum lacks its own maximum. Multiply it by exp(its maximum − the largest).",
    ),
    (
        "rescaled_the_wrong_way",
        dict(merge="other way"),
        "A rank with a small maximum counts less: exp(its maximum − the largest), not the reverse.",
    ),
    ("rescaled_in_base_2", dict(merge="base 2"), "The sums are of exp, so rescale them by exp."),
    (
        "the_largest_sum",
        dict(merge="largest sum"),
        "The whole sum is the sum of all ranks' rescaled sums, not the largest one.",
    ),
    (
        "winner_counted_twice",
        dict(merge="winner counts once more"),
        "The winner's own exp(0) = 1 is in its rank's sum already.",
    ),
    (
        "local_token_numbers",
        dict(offset="none"),
        "The place within a rank is not a token: add rank · C.",
    ),
    (
        "offset_without_padding",
        dict(offset="of vocab_size"),
        "Rank r begins at r · C, and C counts padding. vocab_size / size is smaller.",
    ),
    ("offset_one_more", dict(offset="one more"), "Rank r begins at r · C, without a gap."),
    (
        "padding_wins",
        dict(pad="kept"),
        "Columns from vocab_size on are no tokens. They may hold anything: take them as −inf.",
    ),
    (
        "padding_counts_in_the_sum",
        dict(pad="counted"),
        "Padding cannot win, but it still counts in your sum.",
    ),
    (
        "padding_is_zero",
        dict(pad="zero"),
        "A logit of 0 is no neutral one: it wins over negative ones, and exp(0) is 1.",
    ),
    (
        "padding_times_zero",
        dict(pad="multiplied"),
        "NaN · 0 is NaN, and −inf is the logit that counts nothing, not 0.",
    ),
    (
        "padding_one_off",
        dict(pad="one off"),
        "The token with the number vocab_size does not exist: the last one is vocab_size − 1.",
    ),
    (
        "empty_rank_is_nan",
        dict(guard=False),
        "A rank without an allowed token computes −inf − (−inf), which is NaN.",
    ),
    (
        "without_a_maximum",
        dict(local_max=False),
        "exp of a logit above 88 overflows in float32: subtract the rank's own maximum first.",
    ),
    (
        "the_largest_sum_wins",
        dict(winner="sum"),
        "The winner has the largest logit. A rank's sum says how many tokens are near its best.",
    ),
    (
        "the_likeliest_rank_wins",
        dict(winner="product"),
        "You took the rank that is likeliest as a whole. The winner is a token.",
    ),
    ("rank_0_wins", dict(winner="rank_0"), "The winner may live on any rank."),
    (
        "ties_to_the_last",
        dict(tie="last"),
        "Of several equal logits the lowest token number counts, as with one rank.",
    ),
    (
        "ties_to_the_last_rank",
        dict(tie="last rank"),
        "If two ranks have equal maxima, the first of them has the lower token number.",
    ),
    (
        "whole_logits_gathered",
        dict(gather="all"),
        "The whole logits travel. A maximum, a sum and a token number of each row are enough.",
    ),
    (
        "read_from_the_list",
        dict(gather="none"),
        "Another rank's numbers must come through `ranks`. You read them from the list.",
    ),
    ("probability", dict(result="probability"), "Asked for is the logarithm of the probability."),
    (
        "log_sum_exp",
        dict(result="lse"),
        "That is the log-sum-exp. Subtract it from the largest logit.",
    ),
    ("logit", dict(result="logit"), "That is the winner's logit, not its log-probability."),
    ("positive", dict(result="positive"), "A log-probability is not above 0: the sign is wrong."),
    ("log2", dict(result="base 2"), "Take the natural logarithm."),
    (
        "maximum_forgotten_in_the_end",
        dict(result="logit minus log of sum"),
        "The sum has the largest logit taken out, so it must not be there in front either.",
    ),
]:
    answers.wrong("20.2", hint, name)(partial(slipped_greedy, **slip))


@answers.alternative("20.2")
def by_log_sum_exp(local_logits, vocab_size, ranks):
    """Three separate gathers, with logsumexp."""
    width = local_logits[0].shape[-1]
    maxima, sums, places = [], [], []
    for rank, logits in enumerate(local_logits):
        kept = max(0, min(width, vocab_size - rank * width))
        real = torch.full_like(logits, -torch.inf)
        real[:, :kept] = logits[:, :kept]
        maxima.append(real.amax(-1, keepdim=True))
        sums.append(real.logsumexp(-1, keepdim=True))
        first = (real == maxima[-1]).float().argmax(-1, keepdim=True)
        places.append(first + rank * width)
    best, lse, place = (ranks.all_gather(parts)[-1] for parts in (maxima, sums, places))
    token = place.masked_fill(best < best.amax(-1, keepdim=True), 2**30).amin(-1)
    return token, best.amax(-1) - lse.logsumexp(-1)


@answers.alternative("20.2")
def row_by_row(local_logits, vocab_size, ranks):
    """In float64, in Python."""
    width, rows = local_logits[0].shape[1], len(local_logits[0])
    parts = []
    for rank, logits in enumerate(local_logits):
        lines = []
        for row in logits.double().tolist():
            real = [value for j, value in enumerate(row) if rank * width + j < vocab_size]
            best = max(real, default=-math.inf)
            allowed = [math.exp(value - best) for value in real if value > -math.inf]
            lines.append([best, sum(allowed), real.index(best) if real else 0])
        parts.append(torch.tensor(lines, dtype=torch.float64))
    every = ranks.all_gather(parts, dim=-1)[0].view(rows, ranks.size, 3).tolist()
    tokens, values = [], []
    for line in every:
        best = max(entry[0] for entry in line)
        rank = [entry[0] for entry in line].index(best)
        tokens.append(rank * width + int(line[rank][2]))
        values.append(-math.log(sum(s * math.exp(m - best) for m, s, _ in line)))
    return torch.tensor(tokens), torch.tensor(values, dtype=torch.float32)
