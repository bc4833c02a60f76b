"""Wrong answers to lesson 02's exercises: real slips, each with a hint."""

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 2.1 attention

answers.slips(
    "2.1",
    """
    top_left_mask: Your mask is aligned top left. Which key belongs to the LAST query when Tk > Tq?
    - sees.tril(num_keys - num_queries)
    + sees.tril()
    - sees.triu(num_keys - num_queries - window + 1)
    + sees.triu(1 - window)

    strict_mask: Your queries do not see their own key: j <= i + Tk - Tq, not <.
    - sees.tril(num_keys - num_queries)
    + sees.tril(num_keys - num_queries - 1)

    no_scale: The scores are not scaled by 1 / √D.
    - head_dim**-0.5
    + 1.0

    scale_without_root: You divide by D, not by √D.
    - head_dim**-0.5
    + 1 / head_dim

    scale_by_heads: You take √ of the number of heads. Which dimension does the dot product sum
        over?
    - head_dim**-0.5
    + num_heads**-0.5

    ignores_scale: softmax_scale is given, and you use 1 / √D all the same.
    - scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    + scale = head_dim**-0.5

    scale_or_default: `softmax_scale or …` takes 0.0 for None. Ask whether it is None.
    - head_dim**-0.5 if softmax_scale is None else softmax_scale
    + softmax_scale or head_dim**-0.5

    finite_mask: You mask with -10000. Scores may be smaller; nothing is smaller than -inf.
    - masked_fill(~sees, -torch.inf)
    + masked_fill(~sees, -1e4)

    finite_first_max: Your maximum cannot fall below a number of yours. Scores may: start at -inf.
    - weights = torch.softmax(scores.masked_fill(~sees, -torch.inf), dim=-1)
    + weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e4)).exp() * sees
    + weights = weights / weights.sum(-1, keepdim=True)

    strides_ignored: You read q, k or v as if its rows followed each other. Its strides say where
        they are.
    - group = num_heads // num_kv_heads
    + group = num_heads // num_kv_heads
    + k = k.as_strided(k.shape, (num_kv_heads * head_dim, head_dim, 1))

    softmax_over_queries: Your softmax runs over the queries. Each query's weights, over the keys,
        sum to 1.
    - -torch.inf), dim=-1)
    + -torch.inf), dim=-2)

    softmax_over_heads: Your softmax runs over the heads. Each query's weights, over the keys, sum
        to 1.
    - -torch.inf), dim=-1)
    + -torch.inf), dim=0)

    zeros_in_mask: A masked score of 0 weighs exp(0) = 1. Which score has weight 0?
    - masked_fill(~sees, -torch.inf)
    + masked_fill(~sees, 0)
    - weights = weights.masked_fill(~sees, 0)

    masked_after_softmax: You mask after the softmax, so a row's weights no longer sum to 1.
    - scores.masked_fill(~sees, -torch.inf)
    + scores

    tiled_heads: `repeat` gives KV heads 0, 1, 0, 1; query heads 0 and 1 share KV head 0: 0, 0, 1,
        1.
    - k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    + k.repeat(1, group, 1), v.repeat(1, group, 1)

    nan_rows: A query that sees no key: softmax divides 0 by 0. The docstring asks for zeros.
    - weights = weights.masked_fill(~sees, 0)

    uniform_rows: With -1e9 a query that sees no key weighs all alike. It gets zeros.
    - masked_fill(~sees, -torch.inf)
    + masked_fill(~sees, -1e9)
    - weights = weights.masked_fill(~sees, 0)

    in_place: `q *= …` scales the caller's tensor too: write q = q * …
    - torch.einsum("qhd,khd->hqk", q, k) * scale
    + torch.einsum("qhd,khd->hqk", q.mul_(scale), k)

    no_max: You exponentiate raw scores. What is exp(120) in float32?
    - weights = torch.softmax(scores.masked_fill(~sees, -torch.inf), dim=-1)
    + weights = scores.exp() * sees
    + weights = weights / weights.sum(-1, keepdim=True)

    no_window: You ignore `window`.
    - if window is not None:
    + if False:

    window_off_by_one: Your window holds one key too many: it counts the query's own key.
    - window + 1)
    + window)

    always_causal: causal=False: every query sees every key.
    - if causal:
    + if True:

    returns_float32: You compute in float32, which is fine, and forget to return q's dtype.
    - torch.einsum("hqk,khd->qhd", weights, v)
    + torch.einsum("hqk,khd->qhd", weights, v).float()
    """,
)


answers.alternative("2.1")(naive.attention_per_head)

# ---------------------------------------------------------------- 2.2 sampling for a batch

answers.slips(
    "2.2",
    """
    union_of_rows: You keep a token in all rows if one row keeps it. Each row has its own set.
    - return kept / kept.sum(-1, keepdim=True)
    + kept = p * (kept > 0).any(0)
    + return kept / kept.sum(-1, keepdim=True)

    first_row_settings: Every row is cut with row 0's top_k and top_p.
    - sorted_p, ids =
    + top_k, top_p = top_k[:1].expand(len(p)), top_p[:1].expand(len(p))
    + sorted_p, ids =

    cuts_crossing_token: You drop the token that brings the mass to p.
    - torch.nn.functional.pad(short_of_p, (1, -1), value=True)
    + short_of_p | (torch.arange(vocab_size) == 0)

    may_keep_nothing: If the likeliest token alone exceeds p, you keep none: 0 / 0 is NaN.
    - torch.nn.functional.pad(short_of_p, (1, -1), value=True)
    + short_of_p

    below_p_as_printed: You keep tokens whose running sum is below p. The one that reaches p stays
        too: compare the mass before a token.
    = may_keep_nothing, rounded_top_p_1

    not_renormalised: What you return no longer sums to 1: divide by the mass that stayed.
    - return kept / kept.sum(-1, keepdim=True)
    + return p * (kept > 0)

    p_of_whole_mass: top_p counts a share of what top-k left: renormalise between the two.
    - sorted_p = sorted_p / sorted_p.sum(-1, keepdim=True)

    late_temperature: You choose the tokens before the temperature. It comes first.
    - torch.softmax(logits.double() / temperature[:, None], dim=-1)
    + torch.softmax(logits.double(), dim=-1)
    - return kept / kept.sum(-1, keepdim=True)
    + kept = torch.softmax(logits.double() / temperature[:, None], dim=-1) * (kept > 0)
    + return kept / kept.sum(-1, keepdim=True)

    no_temperature: The temperature changes nothing in your result: divide the logits before the
        softmax.
    - logits.double() / temperature[:, None]
    + logits.double()

    one_more_at_equality: Tokens that reach p exactly are enough; you keep one more.
    - < top_p[:, None]
    + < top_p[:, None] + 1e-12

    about_as_likely: Of two tokens almost as likely you keep both.
    - sorted_p < kth
    + sorted_p < kth - 1e-6

    raw_exp: You exponentiate raw logits: exp overflows above 709.
    - torch.softmax(logits.double() / temperature[:, None], dim=-1)
    + (logits.double() / temperature[:, None]).exp()
    + p = p / p.sum(-1, keepdim=True)

    maximum_of_batch: You subtract the largest logit of the whole batch. Each row has its own
        maximum.
    - p = torch.softmax(logits.double() / temperature[:, None], dim=-1)
    + p = logits.double() / temperature[:, None]
    + p = (p - p.max()).exp()
    + p = p / p.sum(-1, keepdim=True)

    strides_ignored: You read the logits as if their rows followed each other.
    - logits.double()
    + logits.as_strided(logits.shape, (vocab_size, 1)).double()

    cuts_ties: Your top-k keeps exactly k tokens. One as likely as the k-th stays too.
    - sorted_p.masked_fill(sorted_p < kth, 0)
    + sorted_p.masked_fill(torch.arange(vocab_size) >= k[:, None], 0)

    sorted_mask: Your mask is in sorted order, the tokens are not: scatter it back to their ids.
    - sorted_p = sorted_p.masked_fill(sorted_p < kth, 0)
    + few = sorted_p < kth
    + sorted_p = sorted_p.masked_fill(few, 0)
    - torch.zeros_like(p).scatter(1, ids, sorted_p.masked_fill(~stays, 0))
    + p * (stays & ~few)

    rounded_top_p_1: The running sum rounds to 1 early and you cut the rest: top_p=1 is off.
    - stays = stays | (top_p[:, None] == 1)

    no_clamp: top_k may exceed the vocabulary: then it keeps everything.
    - vocab_size).clamp(max=vocab_size)
    + vocab_size)

    in_place: `logits /= …` divides the caller's logits too.
    - logits.double() / temperature[:, None]
    + logits.div_(temperature[:, None]).double()

    zero_keeps_none: top_k = 0 is off; you keep no token then.
    - return kept / kept.sum(-1, keepdim=True)
    + return (kept / kept.sum(-1, keepdim=True)).masked_fill((top_k == 0)[:, None], 0)
    """,
)


@answers.wrong("2.2", "A loop over rows: a server samples hundreds of them at each step.")
def row_by_row(logits, temperature, top_k, top_p):
    params = [
        SamplingParams(float(t), int(k), float(p)) for t, k, p in zip(temperature, top_k, top_p)
    ]
    return torch.stack([probabilities(row, each, [], []) for row, each in zip(logits, params)])


@answers.alternative("2.2")
def by_rank(logits, temperature, top_k, top_p):
    """Sorts anew after top-k, and compares each token's rank with the number that stay."""
    vocab_size = logits.shape[1]
    p = torch.log_softmax(logits.double() / temperature[:, None], -1).exp()
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    p = p.masked_fill(p < p.sort(descending=True)[0].gather(1, k[:, None] - 1), 0)
    p = p / p.sum(-1, keepdim=True)
    order = p.argsort(dim=-1, descending=True, stable=True)
    stay = (p.gather(1, order).cumsum(-1) < top_p[:, None]).sum(-1) + 1
    stay = torch.where(top_p == 1, vocab_size, stay)
    p = p.masked_fill(order.argsort() >= stay[:, None], 0)
    return p / p.sum(-1, keepdim=True)


# ---------------------------------------------------------------- 2.3 the generation loop

answers.slips(
    "2.3",
    """
    as_given: All three bugs are there. Trace two steps by hand.
    = stale_row, positions_restart, drops_stop_token

    stale_row: Every step reads the logits at the prompt's end. Which row predicts the next token?
    - model.logits(hidden[-1:])
    + model.logits(hidden)[len(prompt) - 1]

    first_row: You read the logits of the first row. Which row predicts the next token?
    - model.logits(hidden[-1:])
    + model.logits(hidden)[0]

    positions_restart: The positions of new tokens start at 0 again. Go on counting.
    - attending(torch.arange(len(tokens)))
    + attending(torch.cat([torch.arange(len(prompt)), torch.arange(len(output))]))

    drops_stop_token: The stop token belongs to the answer: append it, then break.
    - output.append(token)
    - if token in stop_token_ids:
    -     break
    + if token in stop_token_ids:
    +     break
    + output.append(token)

    one_too_many: You return one token more than max_new_tokens.
    - < max_new_tokens
    + <= max_new_tokens

    first_stop_token: Only one of stop_token_ids ends your row. Any of them does.
    - in stop_token_ids
    + in sorted(stop_token_ids)[:1]

    argmax_of_all_rows: argmax over all rows at once. Which row predicts the next token?
    - hidden[-1:]
    + hidden

    int32: Tokens and positions are int64.
    - tokens = torch.tensor(prompt + output)
    + tokens = torch.tensor(prompt + output, dtype=torch.int32)
    - torch.arange(len(tokens))
    + torch.arange(len(tokens), dtype=torch.int32)

    never_stops: A stop token does not stop your loop.
    - if token in stop_token_ids:
    -     break

    stops_at_prompt: A stop token inside the prompt ends your row. Only a generated one does.
    - while len(output) < max_new_tokens:
    + while len(output) < max_new_tokens and not stop_token_ids & {*prompt, *output}:

    echoes_prompt: You return the prompt too; the new tokens alone are wanted.
    - return output
    + return prompt + output

    extends_prompt: You append to the caller's prompt. Copy it first.
    - output.append(token)
    + output.append(token)
    + prompt.append(token)
    - prompt + output
    + prompt

    two_bugs_left_row: Two bugs are left: the positions, and the stop token.
    = positions_restart, drops_stop_token

    two_bugs_left_positions: Two bugs are left: the row, and the stop token.
    = stale_row, drops_stop_token

    two_bugs_left_stop: Two bugs are left: the row, and the positions.
    = stale_row, positions_restart
    """,
)


@answers.alternative("2.3")
def grow_one_tensor(model, prompt, max_new_tokens, stop_token_ids, attending):
    tokens = torch.tensor(prompt)
    for _ in range(max_new_tokens):
        logits = model.logits(model(tokens, attending(torch.arange(len(tokens)))))
        tokens = torch.cat([tokens, logits[-1:].argmax(-1)])
        if tokens[-1].item() in stop_token_ids:
            break
    return tokens[len(prompt) :].tolist()


# ---------------------------------------------------------------- 2.4 predict

answers.slips(
    "2.4",
    """
    gigabytes: You count GB of 10^9 bytes. A GiB has 2^30.
    - 2**30
    + 10**9

    kv_heads: There is a score matrix for each QUERY head, however few KV heads it reads.
    - (num_heads *
    + (num_kv_heads *

    one_matrix: There is a score matrix for each query head, not one in all.
    - (num_heads * dtype.itemsize)
    + dtype.itemsize

    always_two_bytes: You count 2 bytes an element whatever the dtype.
    - dtype.itemsize
    + 2

    always_four_bytes: You count 4 bytes an element whatever the dtype.
    - dtype.itemsize
    + 4

    elements_not_bytes: You count elements. How many bytes has one?
    - num_heads * dtype.itemsize
    + num_heads

    half_the_matrix: You count the causal half. Naive attention computes the other half too, then
        masks it.
    - dtype.itemsize)
    + dtype.itemsize / 2)

    no_root: You found T². How long is the prompt?
    - math.isqrt(int(budget_bytes // (num_heads * dtype.itemsize)))
    + int(budget_bytes // (num_heads * dtype.itemsize))

    rounds_up: One token more than that does not fit: round down.
    - dtype.itemsize)))
    + dtype.itemsize))) + 1

    returns_float: The number is right; a number of tokens is an int.
    - return math.isqrt(int(budget_bytes // (num_heads * dtype.itemsize)))
    + return float(math.isqrt(int(budget_bytes // (num_heads * dtype.itemsize))))
    """,
)


@answers.alternative("2.4")
def by_bisection(memory_gib, num_heads, num_kv_heads, dtype):
    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        fits = num_heads * middle**2 * dtype.itemsize <= memory_gib * 2**30
        low, high = (middle, high) if fits else (low, middle)
    return low
