"""Wrong answers to lesson 02's exercises: real slips, and the hint for whoever made them."""

import math
from functools import partial

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 2.1 attention


def slipped_attention(
    q,
    k,
    v,
    softmax_scale=None,
    causal=True,
    window=None,
    *,
    scale_by="D",
    top_left=False,
    strict=False,
    extra_key=0,
    axis=-1,
    fill=-torch.inf,
    first_max=-torch.inf,
    own_strides=True,
    heads="interleave",
    keep_zeros=True,
    subtract_max=True,
    mask_late=False,
    in_place=False,
    own_scale=True,
    use_window=True,
    always_causal=False,
    out_dtype=None,
):
    """Attention with one slip. The keyword switches exist only here, to spell the wrong answers
    briefly.
    """
    (tq, hq, dim), (tk, hkv, _) = q.shape, k.shape
    if not own_strides:
        k = k.as_strided(k.shape, (hkv * dim, dim, 1))
    spread = {
        "interleave": lambda x: x.repeat_interleave(hq // hkv, 1),
        "tile": lambda x: x.repeat(1, hq // hkv, 1),
    }[heads]
    scale = {"D": dim**-0.5, "none": 1.0, "1/D": 1 / dim, "H": hq**-0.5}[scale_by]
    if own_scale == "or":
        scale = softmax_scale or scale
    elif own_scale and softmax_scale is not None:
        scale = softmax_scale
    if in_place:
        q *= scale
        scale = 1.0
    scores = torch.einsum("qhd,khd->hqk", q, spread(k)) * scale
    offset = 0 if top_left else tk - tq
    sees = torch.ones(tq, tk, dtype=torch.bool)
    if causal or always_causal:
        sees = sees.tril(offset - strict)
    if window is not None and use_window:
        sees = sees.triu(offset - window + 1 - extra_key)
    if mask_late:
        weights = torch.softmax(scores, -1) * sees
    elif subtract_max:
        weights = torch.softmax(scores.masked_fill(~sees, fill), dim=axis)
        if first_max > -torch.inf:
            m = scores.amax(-1, keepdim=True).clamp(min=first_max)
            weights = (scores - m).exp() * sees
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights = scores.exp() * sees
        weights = weights / weights.sum(-1, keepdim=True)
    if keep_zeros:
        weights = weights.masked_fill(~sees, 0)
    return torch.einsum("hqk,khd->qhd", weights, spread(v)).to(out_dtype or q.dtype)


for name, slip, hint in [
    (
        "top_left_mask",
        dict(top_left=True),
        "Your mask is aligned top left. Which key belongs to the LAST query when Tk > Tq?",
    ),
    (
        "strict_mask",
        dict(strict=True),
        "Your queries do not see their own key: j <= i + Tk - Tq, not <.",
    ),
    ("no_scale", dict(scale_by="none"), "The scores are not scaled by 1 / √D."),
    ("scale_without_root", dict(scale_by="1/D"), "You divide by D, not by √D."),
    (
        "scale_by_heads",
        dict(scale_by="H"),
        "You take √ of the number of heads. Which dimension does the dot product sum over?",
    ),
    (
        "ignores_scale",
        dict(own_scale=False),
        "softmax_scale is given, and you use 1 / √D all the same.",
    ),
    (
        "scale_or_default",
        dict(own_scale="or"),
        "`softmax_scale or …` takes 0.0 for None. Ask whether it is None.",
    ),
    (
        "finite_mask",
        dict(fill=-1e4),
        "You mask with -10000. Scores may be smaller; nothing is smaller than -inf.",
    ),
    (
        "finite_first_max",
        dict(first_max=-1e4),
        "Your maximum cannot fall below a number of yours. Scores may: start at -inf.",
    ),
    (
        "strides_ignored",
        dict(own_strides=False),
        "You read q, k or v as if its rows followed each other. Its strides say where they are.",
    ),
    (
        "softmax_over_queries",
        dict(axis=-2),
        "Your softmax runs over the queries. Each query's weights, over the keys, sum to 1.",
    ),
    (
        "softmax_over_heads",
        dict(axis=0),
        "Your softmax runs over the heads. Each query's weights, over the keys, sum to 1.",
    ),
    (
        "zeros_in_mask",
        dict(fill=0.0, keep_zeros=False),
        "A masked score of 0 weighs exp(0) = 1. Which score has weight 0?",
    ),
    (
        "masked_after_softmax",
        dict(mask_late=True),
        "You mask after the softmax, so a row's weights no longer sum to 1.",
    ),
    (
        "tiled_heads",
        dict(heads="tile"),
        "`repeat` gives KV heads 0, 1, 0, 1; query heads 0 and 1 share KV head 0: 0, 0, 1, 1.",
    ),
    (
        "nan_rows",
        dict(keep_zeros=False),
        "A query that sees no key: softmax divides 0 by 0. The docstring asks for zeros.",
    ),
    (
        "uniform_rows",
        dict(fill=-1e9, keep_zeros=False),
        "With -1e9 a query that sees no key weighs all alike. It gets zeros.",
    ),
    ("in_place", dict(in_place=True), "`q *= …` scales the caller's tensor too: write q = q * …"),
    (
        "no_max",
        dict(subtract_max=False),
        "You exponentiate raw scores. What is exp(120) in float32?",
    ),
    ("no_window", dict(use_window=False), "You ignore `window`."),
    (
        "window_off_by_one",
        dict(extra_key=1),
        "Your window holds one key too many: it counts the query's own key.",
    ),
    ("always_causal", dict(always_causal=True), "causal=False: every query sees every key."),
    (
        "returns_float32",
        dict(out_dtype=torch.float32),
        "You compute in float32, which is fine, and forget to return q's dtype.",
    ),
]:
    answers.wrong("2.1", hint, name)(partial(slipped_attention, **slip))

answers.alternative("2.1")(naive.attention_per_head)

# ---------------------------------------------------------------- 2.2 sampling for a batch


def slipped_batch(
    logits,
    temperature,
    top_k,
    top_p,
    *,
    union=False,
    first_row_only=False,
    crossing="kept",
    ties="kept",
    renormalise_k=True,
    renormalise=True,
    late_temperature=False,
    no_temperature=False,
    unsorted=False,
    off="exact",
    in_place=False,
    clamp=True,
    at_equality="enough",
    slack=0.0,
    maximum="row",
    own_strides=True,
):
    """Batch sampling with one slip, spelled by a switch."""
    vocab_size = logits.shape[1]
    if not own_strides:
        logits = logits.as_strided(logits.shape, (vocab_size, 1))
    if in_place:
        logits /= temperature[:, None]
        p = torch.softmax(logits.double(), -1)
    else:
        p = torch.softmax(
            logits.double() / (1 if late_temperature or no_temperature else temperature[:, None]),
            -1,
        )
    if maximum != "row":
        logits = logits.double() / temperature[:, None]
        p = (logits - (logits.max() if maximum == "batch" else 0)).exp()
        p = p / p.sum(-1, keepdim=True)
    if first_row_only:
        top_k, top_p = top_k[:1].expand(len(p)), top_p[:1].expand(len(p))
    sorted_p, ids = p.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    k = k.clamp(max=vocab_size) if clamp else k
    kth = sorted_p.gather(1, k - 1)
    stays = sorted_p >= kth - slack if ties == "kept" else torch.arange(vocab_size)[None] < k
    mass = sorted_p * stays
    mass = mass / mass.sum(-1, keepdim=True) if renormalise_k else mass
    short = mass.cumsum(-1) < top_p[:, None] + 1e-12 * (at_equality == "one_more")
    if crossing == "kept":
        short = torch.cat([torch.ones_like(short[:, :1]), short[:, :-1]], 1)
    elif crossing == "cut_but_first":
        short[:, 0] = True
    stays = stays & (short | (top_p[:, None] == 1) if off == "exact" else short)
    kept = stays if unsorted else torch.zeros_like(stays).scatter(1, ids, stays)
    if union:
        kept = kept.any(0, keepdim=True)
    if late_temperature:
        p = torch.softmax(logits.double() / temperature[:, None], -1)
    p = p * kept
    return p / p.sum(-1, keepdim=True) if renormalise else p


for name, slip, hint in [
    (
        "union_of_rows",
        dict(union=True),
        "You keep a token in all rows if one row keeps it. Each row has its own set.",
    ),
    (
        "first_row_settings",
        dict(first_row_only=True),
        "Every row is cut with row 0's top_k and top_p.",
    ),
    (
        "cuts_crossing_token",
        dict(crossing="cut_but_first"),
        "You drop the token that brings the mass to p.",
    ),
    (
        "may_keep_nothing",
        dict(crossing="cut"),
        "If the likeliest token alone exceeds p, you keep none: 0 / 0 is NaN.",
    ),
    (
        "below_p_as_printed",
        dict(crossing="cut", off="rounded"),
        "You keep tokens whose running sum is below p. The one that reaches p stays too: compare "
        "the mass before a token.",
    ),
    (
        "not_renormalised",
        dict(renormalise=False),
        "What you return no longer sums to 1: divide by the mass that stayed.",
    ),
    (
        "p_of_whole_mass",
        dict(renormalise_k=False),
        "top_p counts a share of what top-k left: renormalise between the two.",
    ),
    (
        "late_temperature",
        dict(late_temperature=True),
        "You choose the tokens before the temperature. It comes first.",
    ),
    (
        "no_temperature",
        dict(no_temperature=True),
        "The temperature changes nothing in your result: divide the logits before the softmax.",
    ),
    (
        "one_more_at_equality",
        dict(at_equality="one_more"),
        "Tokens that reach p exactly are enough; you keep one more.",
    ),
    ("about_as_likely", dict(slack=1e-6), "Of two tokens almost as likely you keep both."),
    ("raw_exp", dict(maximum="none"), "You exponentiate raw logits: exp overflows above 709."),
    (
        "maximum_of_batch",
        dict(maximum="batch"),
        "You subtract the largest logit of the whole batch. Each row has its own maximum.",
    ),
    (
        "strides_ignored",
        dict(own_strides=False),
        "You read the logits as if their rows followed each other.",
    ),
    (
        "cuts_ties",
        dict(ties="cut"),
        "Your top-k keeps exactly k tokens. One as likely as the k-th stays too.",
    ),
    (
        "sorted_mask",
        dict(unsorted=True),
        "Your mask is in sorted order, the tokens are not: scatter it back to their ids.",
    ),
    (
        "rounded_top_p_1",
        dict(off="rounded"),
        "The running sum rounds to 1 early and you cut the rest: top_p=1 is off.",
    ),
    ("no_clamp", dict(clamp=False), "top_k may exceed the vocabulary: then it keeps everything."),
    ("in_place", dict(in_place=True), "`logits /= …` divides the caller's logits too."),
]:
    answers.wrong("2.2", hint, name)(partial(slipped_batch, **slip))


@answers.wrong("2.2", "top_k = 0 is off; you keep no token then.")
def zero_keeps_none(logits, temperature, top_k, top_p):
    p = slipped_batch(logits, temperature, top_k, top_p)
    return p.masked_fill((top_k == 0)[:, None], 0)


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


def slipped_loop(
    model,
    prompt,
    max_new_tokens,
    stop_token_ids,
    attending,
    *,
    stale_row=False,
    first_row=False,
    restart=False,
    drop_stop=False,
    one_more=False,
    never_stops=False,
    echo=False,
    stops_at_prompt=False,
    extend=False,
    stops_at="any",
    flat=False,
    index=torch.int64,
):
    """The greedy loop with some slips, spelled by switches."""
    output, given = [], prompt if extend else list(prompt)
    while len(output) < max_new_tokens + one_more:
        if stops_at_prompt and stop_token_ids & {*given, *output}:
            break
        tokens = torch.tensor(list(prompt) if extend else given + output)
        new = torch.arange(len(output)) if restart else torch.arange(len(prompt), len(tokens))
        positions = torch.cat([torch.arange(len(tokens) - len(new)), new])
        hidden = model(tokens.to(index), attending(positions.to(index)))
        row = len(prompt) - 1 if stale_row else 0 if first_row else -1
        logits = model.logits(hidden)
        token = int((logits if flat else logits[row]).argmax())
        if drop_stop and token in stop_token_ids:
            break
        output.append(token)
        if extend:
            prompt.append(token)
        stop = stop_token_ids if stops_at == "any" else sorted(stop_token_ids)[:1]
        if token in stop and not never_stops:
            break
    return list(prompt) + output if echo else output


for name, slip, hint in [
    (
        "as_given",
        dict(stale_row=True, restart=True, drop_stop=True),
        "All three bugs are there. Trace two steps by hand.",
    ),
    (
        "stale_row",
        dict(stale_row=True),
        "Every step reads the logits at the prompt's end. Which row predicts the next token?",
    ),
    (
        "first_row",
        dict(first_row=True),
        "You read the logits of the first row. Which row predicts the next token?",
    ),
    (
        "positions_restart",
        dict(restart=True),
        "The positions of new tokens start at 0 again. Go on counting.",
    ),
    (
        "drops_stop_token",
        dict(drop_stop=True),
        "The stop token belongs to the answer: append it, then break.",
    ),
    ("one_too_many", dict(one_more=True), "You return one token more than max_new_tokens."),
    (
        "first_stop_token",
        dict(stops_at="first"),
        "Only one of stop_token_ids ends your row. Any of them does.",
    ),
    (
        "argmax_of_all_rows",
        dict(flat=True),
        "argmax over all rows at once. Which row predicts the next token?",
    ),
    ("int32", dict(index=torch.int32), "Tokens and positions are int64."),
    ("never_stops", dict(never_stops=True), "A stop token does not stop your loop."),
    (
        "stops_at_prompt",
        dict(stops_at_prompt=True),
        "A stop token inside the prompt ends your row. Only a generated one does.",
    ),
    (
        "echoes_prompt",
        dict(echo=True),
        "You return the prompt too; the new tokens alone are wanted.",
    ),
    ("extends_prompt", dict(extend=True), "You append to the caller's prompt. Copy it first."),
    (
        "two_bugs_left_row",
        dict(restart=True, drop_stop=True),
        "Two bugs are left: the positions, and the stop token.",
    ),
    (
        "two_bugs_left_positions",
        dict(stale_row=True, drop_stop=True),
        "Two bugs are left: the row, and the stop token.",
    ),
    (
        "two_bugs_left_stop",
        dict(stale_row=True, restart=True),
        "Two bugs are left: the row, and the positions.",
    ),
]:
    answers.wrong("2.3", hint, name)(partial(slipped_loop, **slip))


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


def slipped_fit(
    memory_gib,
    num_heads,
    num_kv_heads,
    dtype,
    *,
    unit=2**30,
    heads="query",
    itemsize=None,
    half=1,
    root=True,
    up=0,
):
    """The longest prompt, with one slip, spelled by a switch."""
    count = {"query": num_heads, "kv": num_kv_heads, "one": 1}[heads]
    elements = int(memory_gib * unit // (count * (itemsize or dtype.itemsize) * half))
    return (math.isqrt(elements) if root else elements) + up


for name, slip, hint in [
    ("gigabytes", dict(unit=10**9), "You count GB of 10^9 bytes. A GiB has 2^30."),
    (
        "kv_heads",
        dict(heads="kv"),
        "There is a score matrix for each QUERY head, however few KV heads it reads.",
    ),
    (
        "one_matrix",
        dict(heads="one"),
        "There is a score matrix for each query head, not one in all.",
    ),
    ("always_two_bytes", dict(itemsize=2), "You count 2 bytes an element whatever the dtype."),
    ("always_four_bytes", dict(itemsize=4), "You count 4 bytes an element whatever the dtype."),
    ("elements_not_bytes", dict(itemsize=1), "You count elements. How many bytes has one?"),
    (
        "half_the_matrix",
        dict(half=0.5),
        "You count the causal half. Naive attention computes the other half too, then masks it.",
    ),
    ("no_root", dict(root=False), "You found T². How long is the prompt?"),
    ("rounds_up", dict(up=1), "One token more than that does not fit: round down."),
]:
    answers.wrong("2.4", hint, name)(partial(slipped_fit, **slip))


@answers.wrong("2.4", "The number is right; a number of tokens is an int.")
def returns_float(memory_gib, num_heads, num_kv_heads, dtype):
    return float(slipped_fit(memory_gib, num_heads, num_kv_heads, dtype))


@answers.alternative("2.4")
def by_bisection(memory_gib, num_heads, num_kv_heads, dtype):
    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        fits = num_heads * middle**2 * dtype.itemsize <= memory_gib * 2**30
        low, high = (middle, high) if fits else (low, middle)
    return low
