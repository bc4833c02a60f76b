"""Wrong answers to lesson 20's exercises: slips of people who cut a model for several GPUs, with a
hint for each.
"""

import math
from functools import reduce

import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l08_online_softmax.naive import Partial, finish, from_scores, merge
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 20.1 attention

answers.slips(
    "20.1",
    """
    shard_returned: Each rank returns what its own heads add to the result. The parts have to be
        summed.
    - ranks.all_reduce(parts)
    + parts

    all_reduce_after_a_column_split: q, k and v of different heads are not parts of a sum: after a
        column split there is nothing to reduce.
    - out = attention(*(part.unflatten(-1, (-1, head_dim)) for part in (q, k, v)))
    - parts.append(out.flatten(-2) @ weights.o_proj[:, q_rows].T)
    + parts.append((q, k, v, q_rows))
    - return [total
    + *projected, rows = map(list, zip(*parts))
    + parts = []
    + for *summed, q_rows in zip(*map(ranks.all_reduce, projected), rows):
    +     out = attention(*(part.unflatten(-1, (-1, head_dim)) for part in summed))
    +     parts.append(out.flatten(-2) @ weights.o_proj[:, q_rows].T)
    + return [total

    all_reduce_of_the_heads: You summed the heads of different ranks. Multiply each rank's heads by
        their columns of o_proj first; those products are the parts of a sum.
    - parts.append(out.flatten(-2) @ weights.o_proj[:, q_rows].T)
    + parts.append((out.flatten(-2), weights.o_proj[:, q_rows]))
    - return [total
    + outs, columns = map(list, zip(*parts))
    + parts = [out @ own.T for out, own in zip(ranks.all_reduce(outs), columns)]
    + return [total

    bias_on_every_rank: o_bias is added on every rank before the sum, so it counts size times. Add
        it once.
    - weights.o_proj[:, q_rows].T)
    + weights.o_proj[:, q_rows].T + weights.o_bias)
    - [total + weights.o_bias for total in ranks.all_reduce(parts)]
    + ranks.all_reduce(parts)

    bias_forgotten: o_bias is missing.
    - [total + weights.o_bias for total in ranks.all_reduce(parts)]
    + ranks.all_reduce(parts)

    bias_on_rank_0_after_the_sum: After the all-reduce every rank has its own copy of the sum, and
        each copy needs o_bias.
    - return [total + weights.o_bias for total in ranks.all_reduce(parts)]
    + total, *others = ranks.all_reduce(parts)
    + return [total + weights.o_bias, *others]

    kv_heads_split_beyond_their_number: With more ranks than KV heads a rank gets a piece of a head.
        It needs a whole one: a copy.
    - kv_rows = slice(first_kv * head_dim, (first_kv + own_kv) * head_dim)
    + width = kv_heads * head_dim // ranks.size
    + kv_rows = slice(rank * width, (rank + 1) * width)

    kv_head_by_rank_modulo: Neighbouring ranks share a KV head, as neighbouring query heads do: rank
        · Hkv / size.
    - first_kv = rank * kv_heads // ranks.size
    + first_kv = rank % kv_heads if ranks.size > kv_heads else rank * kv_heads // ranks.size

    every_rank_has_the_first_kv_heads: Every rank reads the same KV heads: begin at rank · Hkv /
        size.
    - first_kv = rank * kv_heads // ranks.size
    + first_kv = 0

    every_rank_has_all_kv_heads: With all KV heads on a rank, its few query heads form other groups,
        and read wrong ones.
    - first_kv = rank * kv_heads // ranks.size
    + first_kv, own_kv = 0, kv_heads

    kv_heads_counted_like_query_heads: The first KV head of a rank is rank · Hkv / size, not the
        number of its first query head.
    - first_kv = rank * kv_heads // ranks.size
    + first_kv = min(first, kv_heads - own_kv)

    heads_dealt_like_cards: Rank r takes heads side by side, so that a rank's heads share their KV
        heads.
    - q_rows = slice(first * head_dim, (first + own) * head_dim)
    + rows_of_head = torch.arange(heads * head_dim).view(heads, head_dim)
    + q_rows = rows_of_head[rank :: ranks.size].flatten()

    the_same_heads_on_each_rank: All ranks compute the first heads: begin at r · Hq / size.
    - first = rank * own
    + first = 0

    first_columns_of_o_proj: Every rank uses the first columns of o_proj. The columns belong to the
        heads of the rank.
    - weights.o_proj[:, q_rows]
    + weights.o_proj[:, : own * head_dim]

    first_part_of_the_q_bias: q_bias is cut like the rows of q_proj: each rank its own part.
    - weights.q_bias[q_rows]
    + weights.q_bias[: own * head_dim]

    q_bias_forgotten: q_bias is missing.
    - + weights.q_bias[q_rows]

    mean_of_the_parts: The parts are summed, not averaged.
    - [total + weights.o_bias
    + [total / ranks.size + weights.o_bias

    reduced_twice: After one all-reduce every rank has the sum. The second one adds up size copies
        of it.
    - ranks.all_reduce(parts)
    + ranks.all_reduce(ranks.all_reduce(parts))

    only_rank_0_has_the_sum: The next layer runs on every rank, so all of them need the sum.
    - ranks.all_reduce(parts)
    + [ranks.all_reduce(parts)[0], *parts[1:]]

    parts_side_by_side: The parts have the full width already. They are summed, not put side by
        side.
    - ranks.all_reduce(parts)
    + ranks.all_gather(parts)

    heads_gathered: The result is right, but now every rank multiplies by the whole o_proj. Cut
        o_proj by columns, and sum.
    - parts.append(out.flatten(-2) @ weights.o_proj[:, q_rows].T)
    + parts.append(out.flatten(-2))
    - [total + weights.o_bias for total in ranks.all_reduce(parts)]
    + [out @ weights.o_proj.T + weights.o_bias for out in ranks.all_gather(parts)]

    gathered_and_added: The result is right, but an all-gather moves more than the one all-reduce
        that the statement asks for.
    - ranks.all_reduce(parts)
    + [sum(part.chunk(ranks.size, -1)) for part in ranks.all_gather(parts)]

    added_without_a_wire: You added the entries of the list. Another rank's entry must come through
        `ranks`.
    - ranks.all_reduce(parts)
    + [sum(parts)] * ranks.size

    every_rank_does_everything: Every rank computes all heads, and the sum is divided by size:
        nothing is saved.
    - own, own_kv = heads // ranks.size, max(1, kv_heads // ranks.size)
    + own, own_kv = heads, kv_heads
    - first = rank * own
    - first_kv = rank * kv_heads // ranks.size
    + first = first_kv = 0
    - [total + weights.o_bias
    + [total / ranks.size + weights.o_bias

    rank_0_does_all: Rank 0 computes all heads, and the others add zeros. Each rank has heads of its
        own.
    - return [total
    + parts = [sum(parts), *(torch.zeros_like(part) for part in parts[1:])]
    + return [total

    ranks_from_the_end: Rank r begins at head r · Hq / size. You deal the heads from the last rank
        on.
    - return [total
    + parts = parts[::-1]
    + return [total

    takes_any_size: If size does not divide the query heads, raise ValueError that names size.
    - if heads % ranks.size:
    -     raise ValueError(f"size: got {ranks.size}; accepted: a divisor of {heads} heads")

    all_kv_heads_projected: You compute all KV heads and keep a rank's own: cut the weights, not the
        result.
    - k = x @ weights.k_proj[kv_rows].T
    - v = x @ weights.v_proj[kv_rows].T
    + k = (x @ weights.k_proj.T)[:, kv_rows]
    + v = (x @ weights.v_proj.T)[:, kv_rows]

    all_query_heads_projected: You compute all query heads and keep a rank's own: cut the weights,
        not the result.
    - q = x @ weights.q_proj[q_rows].T + weights.q_bias[q_rows]
    + q = (x @ weights.q_proj.T + weights.q_bias)[:, q_rows]

    added_beside_the_collective: The sum of the list is no collective: the one that you call carries
        zeros.
    - return [total + weights.o_bias for total in ranks.all_reduce(parts)]
    + whole = sum(parts) + weights.o_bias
    + ranks.all_reduce([torch.zeros_like(x) for _ in parts])
    + return [whole.clone() for _ in parts]

    refusal_of_another_class: A size that does not divide the heads is a ValueError.
    - raise ValueError(
    + raise AssertionError(

    a_tuple_of_ranks: The result is a list with an entry for each rank.
    - return [total + weights.o_bias for total in ranks.all_reduce(parts)]
    + return tuple(total + weights.o_bias for total in ranks.all_reduce(parts))
    """,
)


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

answers.slips(
    "20.2",
    """
    nearly_the_largest: Equal is equal: a logit that is larger in its last bit wins.
    - winner = best.argmax(-1, keepdim=True)
    + winner = (best >= best.amax(-1, keepdim=True) - 1e-5).int().argmax(-1, keepdim=True)

    softmax_over_local_logits: The sum is that of the winner's rank alone. All ranks' tokens belong
        to the softmax.
    - (total * (best - largest).exp()).sum(-1)
    + total.gather(-1, winner).flatten()

    sums_added_as_they_are: Each rank's sum lacks its own maximum. Multiply it by exp(its maximum −
        the largest).
    - (total * (best - largest).exp()).sum(-1)
    + total.sum(-1)

    rescaled_the_wrong_way: A rank with a small maximum counts less: exp(its maximum − the largest),
        not the reverse.
    - (best - largest).exp()
    + (largest - best).clamp(max=80).exp()

    rescaled_in_base_2: The sums are of exp, so rescale them by exp.
    - (best - largest).exp()
    + (best - largest).exp2()

    the_largest_sum: The whole sum is the sum of all ranks' rescaled sums, not the largest one.
    - (total * (best - largest).exp()).sum(-1)
    + total.max(-1).values

    winner_counted_twice: The winner's own exp(0) = 1 is in its rank's sum already.
    - (total * (best - largest).exp()).sum(-1)
    + (total * (best - largest).exp()).sum(-1) + 1

    local_token_numbers: The place within a rank is not a token: add rank · C.
    - (rank * width + place).float()
    + place.float()

    offset_without_padding: Rank r begins at r · C, and C counts padding. vocab_size / size is
        smaller.
    - (rank * width + place)
    + (rank * (vocab_size // ranks.size) + place)

    offset_one_more: Rank r begins at r · C, without a gap.
    - (rank * width + place)
    + (rank * (width + 1) + place)

    padding_wins: Columns from vocab_size on are no tokens. They may hold anything: take them as
        −inf.
    - logits.masked_fill(token >= vocab_size, -torch.inf)
    + logits

    padding_counts_in_the_sum: Padding cannot win, but it still counts in your sum.
    - (own - best.clamp
    + (logits - best.clamp

    padding_is_zero: A logit of 0 is no neutral one: it wins over negative ones, and exp(0) is 1.
    - -torch.inf
    + 0.0

    padding_times_zero: NaN · 0 is NaN, and −inf is the logit that counts nothing, not 0.
    - logits.masked_fill(token >= vocab_size, -torch.inf)
    + logits * (token < vocab_size)

    padding_one_off: The token with the number vocab_size does not exist: the last one is vocab_size
        − 1.
    - token >= vocab_size
    + token > vocab_size

    empty_rank_is_nan: A rank without an allowed token computes −inf − (−inf), which is NaN.
    - best.clamp(min=torch.finfo(own.dtype).min)
    + best

    without_a_maximum: exp of a logit above 88 overflows in float32: subtract the rank's own maximum
        first.
    - (own - best.clamp(min=torch.finfo(own.dtype).min)).exp()
    + own.exp()
    - (best - largest).exp()
    + (-largest).exp()

    the_largest_sum_wins: The winner has the largest logit. A rank's sum says how many tokens are
        near its best.
    - winner = best.argmax
    + winner = total.argmax

    the_likeliest_rank_wins: You took the rank that is likeliest as a whole. The winner is a token.
    - winner = best.argmax
    + winner = (total * best.exp()).argmax

    rank_0_wins: The winner may live on any rank.
    - best.argmax(-1, keepdim=True)
    + torch.zeros(len(best), 1, dtype=torch.int64)

    ties_to_the_last: Of several equal logits the lowest token number counts, as with one rank.
    - own.argmax(-1, keepdim=True)
    + width - 1 - own.flip(-1).argmax(-1, keepdim=True)
    - best.argmax(-1, keepdim=True)
    + ranks.size - 1 - best.flip(-1).argmax(-1, keepdim=True)

    ties_to_the_last_rank: If two ranks have equal maxima, the first of them has the lower token
        number.
    - best.argmax(-1, keepdim=True)
    + ranks.size - 1 - best.flip(-1).argmax(-1, keepdim=True)

    whole_logits_gathered: The whole logits travel. A maximum, a sum and a token number of each row
        are enough.
    - best, total, token =
    + ranks.all_gather(local_logits)
    + best, total, token =

    read_from_the_list: Another rank's numbers must come through `ranks`. You read them from the
        list.
    - ranks.all_gather(parts, dim=1)[0]
    + torch.cat(parts, dim=1)

    probability: Asked for is the logarithm of the probability.
    - -whole.log()
    + 1 / whole

    log_sum_exp: That is the log-sum-exp. Subtract it from the largest logit.
    - -whole.log()
    + largest.flatten() + whole.log()

    logit: That is the winner's logit, not its log-probability.
    - -whole.log()
    + largest.flatten()

    positive: A log-probability is not above 0: the sign is wrong.
    - -whole.log()
    + whole.log()

    log2: Take the natural logarithm.
    - -whole.log()
    + -whole.log2()

    maximum_forgotten_in_the_end: The sum has the largest logit taken out, so it must not be there
        in front either.
    - -whole.log()
    + largest.flatten() - whole.log()

    token_in_16_bits: A token's number needs up to 17 bits, and float16 has 11: float32 has 24.
    - (rank * width + place).float()
    + (rank * width + place).half().float()

    token_in_bfloat16: A token's number needs up to 17 bits, and bfloat16 has 8: float32 has 24.
    - (rank * width + place).float()
    + (rank * width + place).bfloat16().float()

    an_empty_rank_counts_as_0: −inf is not 0: exp(0 − the largest) is infinite where all logits are
        far below 0.
    - best.clamp(min=torch.finfo(own.dtype).min)
    + best.nan_to_num(neginf=0.0)
    - (total * (best - largest).exp())
    + (total * (best.nan_to_num(neginf=0.0) - largest).exp())

    filled_with_1e4: -1e4 is larger than some logits, and then padding wins. Nothing is below -inf.
    - logits.masked_fill(token >= vocab_size, -torch.inf)
    + logits.masked_fill(token >= vocab_size, -1e4)

    filled_with_1e9: -1e9 is larger than some logits, and then padding wins. Nothing is below -inf.
    - logits.masked_fill(token >= vocab_size, -torch.inf)
    + logits.masked_fill(token >= vocab_size, -1e9)
    """,
)


OWN_ENTRY = (
    "A rank has its own logits. What the others have must come through a collective of `ranks`."
)


@answers.wrong("20.2", OWN_ENTRY)
def reads_all_logits(local_logits, vocab_size, ranks):
    """And gathers numbers that nobody needs."""
    ranks.all_gather([own[:, :1] for own in local_logits])
    whole = torch.cat(local_logits, -1)[:, :vocab_size]
    best = whole.max(-1, keepdim=True)
    return whole.argmax(-1), -(whole - best.values).exp().sum(-1).log()


@answers.wrong("20.2", OWN_ENTRY)
def reads_the_maxima(local_logits, vocab_size, ranks):
    """Python's numbers, not tensors; the sums are gathered."""
    width = local_logits[0].shape[1]
    kept = [own[:, : max(0, vocab_size - r * width)].tolist() for r, own in enumerate(local_logits)]
    rows = [[value for own in kept for value in own[b]] for b in range(len(kept[0]))]
    best = torch.tensor([max(row) for row in rows])
    sums = [
        torch.tensor([[sum(math.exp(v - m) for v in row)] for row, m in zip(own, best.tolist())])
        for own in kept
    ]
    total = ranks.all_gather(sums)[0].sum(-1)
    return torch.tensor([row.index(max(row)) for row in rows]), -total.log()


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


# ---------------------------------------------------------------- 20.3 shared tokens

answers.slips(
    "20.3",
    """
    parts_averaged: Each rank's part counts by how much weight of the row it has, not equally.
    - (factor * acc).sum(0) / (factor * l).sum(0)
    + (acc / l.clamp(min=1e-30)).mean(0)

    parts_added: The rows of the ranks are added with their factors, exp(m - the largest m).
    - factor = (m - m.amax(0)).exp()
    + factor = torch.ones_like(m)

    factor_for_acc_alone: l is relative to the rank's own m as well: rescale both.
    - (factor * l).sum(0)
    + l.sum(0)

    factor_for_l_alone: acc is relative to the rank's own m as well: rescale both.
    - (factor * acc).sum(0)
    + acc.sum(0)

    rescaled_the_wrong_way: A part with a small maximum counts less: exp(its m - the largest m).
    - (m - m.amax(0)).exp()
    + (m.amax(0) - m).clamp(max=80).exp()

    rescaled_in_base_2: The sums are of exp, so rescale them by exp.
    - (m - m.amax(0)).exp()
    + (m - m.amax(0)).exp2()

    largest_of_rank_0: Subtract the largest m of all ranks. With rank 0's own exp may overflow.
    - m.amax(0)
    + m[0]

    never_divided: Divide the sum of acc by the sum of l.
    - / (factor * l).sum(0)

    one_part_is_enough: Every rank has seen some of the tokens: merge the parts of all.
    - outs.append((factor * acc).sum(0) / (factor * l).sum(0))
    + outs.append(acc[0] / l[0].clamp(min=1e-30))

    the_part_with_the_largest_score: The rank with the largest score has not all of the weight.
    - outs.append((factor * acc).sum(0) / (factor * l).sum(0))
    + best = (factor == 1).float()
    + outs.append((best * acc).sum(0) / (best * l).sum(0))

    padding_is_zero: A score of 0 has the weight exp(0) = 1. Mask with -inf.
    - scores.masked_fill(~is_token[:, None], -torch.inf)
    + scores.masked_fill(~is_token[:, None], 0.0)

    padding_counts: Rows after a rank's last token are no tokens: mask their scores.
    - scores = scores.masked_fill(~is_token[:, None], -torch.inf)

    values_of_padding: 0 * NaN is NaN: mask the values of rows without a token, too.
    - v.masked_fill(~is_token[..., None], 0.0)
    + v

    filled_with_1e4: A score may be smaller than -1e4 times anything: nothing is below -inf.
    - -torch.inf
    + -10.0

    empty_rank_is_nan: A rank without a token computes -inf - (-inf), which is NaN.
    - .clamp(min=torch.finfo(scores.dtype).min)

    an_empty_rank_counts_as_0: The m of a rank without a token is -inf, or very small. With 0 the
        others' factors are all 0 where their scores are far below 0.
    - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    + scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    - factor = (m - m.amax(0)).exp()
    + factor = (m - m.amax(0)).exp() * torch.where(m.amax(0) < -1, torch.ones_like(m), l.sign())

    without_a_maximum: exp of a score above 88 overflows in float32: subtract the maximum first.
    - m = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    + m = torch.zeros_like(scores[..., :1])

    tokens_in_one_piece: Token i is on rank i % size, so row j of rank r is token r + size * j.
    - place = rank + ranks.size * torch.arange(k.shape[1])
    + place = rank * k.shape[1] + torch.arange(k.shape[1])

    one_token_too_many: Row j of rank r is token r + size * j, and it exists below context_lens.
    - place < context_lens[:, None]
    + place <= context_lens[:, None]

    as_many_on_each_rank: The first ranks have one token more where size does not divide.
    - place < context_lens[:, None]
    + (place // ranks.size) < (context_lens // ranks.size)[:, None]

    first_sequence_for_all: Each sequence has a length of its own.
    - context_lens[:, None]
    + context_lens[:1, None]

    scale_forgotten: softmax_scale is missing.
    - * softmax_scale

    scaled_twice: The scores are scaled once.
    - * softmax_scale
    + * softmax_scale * softmax_scale

    own_queries_alone: A rank's tokens are needed by the heads of all ranks: gather the queries.
    - zip(ranks.all_gather(qs, dim=1), keys, values)
    + zip([torch.cat([q] * ranks.size, 1) for q in qs], keys, values)

    gathered_beside_each_other: Heads are dimension 1. Along the last one they are cut to pieces.
    - zip(ranks.all_gather(qs, dim=1), keys, values)
    + zip([q.unflatten(-1, (ranks.size, -1)).transpose(1, 2).flatten(1, 2) for q in ranks.all_gather(qs, dim=-1)], keys, values)
    - return outs
    + return [out.flip(1) for out in outs]

    heads_dealt_like_cards: After the gather the heads of a rank are side by side.
    - list(part.split(own, dim=1))
    + [part[:, rank :: ranks.size] for rank in range(ranks.size)]

    another_ranks_heads: Piece r of what you send belongs to rank r.
    - sent.append(list(part.split(own, dim=1)))
    + sent.append(list(part.split(own, dim=1))[::-1])

    read_from_the_list: Another rank's part must come through `ranks`. You read it from the list.
    - in ranks.all_to_all(sent):
    + in [[own_parts[to] for own_parts in sent] for to in range(ranks.size)]:

    queries_from_the_list: Another rank's queries must come through `ranks`.
    - ranks.all_gather(qs, dim=1)
    + [torch.cat(qs, 1)] * ranks.size

    keys_and_values_gathered: Keys and values stay where they are; what travels is small.
    - own = qs[0].shape[1]
    + own = qs[0].shape[1]
    + ranks.all_gather(keys, dim=1), ranks.all_gather(values, dim=1)

    a_tuple_of_ranks: The result is a list with an entry for each rank.
    - return outs
    + return tuple(outs)
    """,
)


@answers.alternative("20.3")
def by_log_sum_exp_and_a_sum(qs, keys, values, context_lens, softmax_scale, ranks):
    """What vLLM does: all-gather of lse, reduce-scatter of the weighted results."""
    size, lses, results = ranks.size, [], []
    for rank, q in enumerate(ranks.all_gather(qs, dim=1)):
        own = (context_lens - rank + size - 1) // size
        is_padding = torch.arange(keys[rank].shape[1])[None] >= own[:, None]
        scores = torch.einsum("bhd,bcd->bhc", q, keys[rank]) * softmax_scale
        scores[is_padding[:, None].expand_as(scores)] = -math.inf
        lse = scores.logsumexp(-1)
        p = torch.where(is_padding[:, None], 0.0, (scores - lse[..., None]).exp())
        v = torch.where(is_padding[..., None], 0.0, values[rank])
        lses.append(lse)
        results.append(torch.einsum("bhc,bcd->hbd", p.nan_to_num(), v))
    total = [part.logsumexp(0) for part in ranks.all_gather([lse[None] for lse in lses], dim=0)]
    shares = [(lse - whole).exp().T[..., None] for lse, whole in zip(lses, total)]
    sums = ranks.reduce_scatter([out * share for out, share in zip(results, shares)])
    return [out.transpose(0, 1) for out in sums]


@answers.alternative("20.3")
def sequence_by_sequence(qs, keys, values, context_lens, softmax_scale, ranks):
    """One sequence after another, with lesson 8's Partial, and pieces sent to their rank."""
    size, heads = ranks.size, qs[0].shape[1]
    everyone = ranks.all_gather(qs, dim=1)
    sent = []
    for rank in range(size):
        rows = []
        for b, length in enumerate(context_lens.tolist()):
            count = len(range(rank, length, size))
            scores = everyone[rank][b] @ keys[rank][b, :count].T * softmax_scale
            m, l, acc = from_scores(scores, values[rank][b, :count])
            rows.append(torch.cat([acc, m[:, None], l[:, None]], -1))
        whole = torch.stack(rows)
        sent.append([whole[:, to * heads : (to + 1) * heads] for to in range(size)])
    outs = []
    for pieces in ranks.all_to_all(sent):
        parts = [Partial(piece[..., -2], piece[..., -1], piece[..., :-2]) for piece in pieces]
        outs.append(finish(reduce(merge, parts))[0])
    return outs
