"""Wrong answers to lesson 19's exercises: real slips, and the hint for whoever made them."""

from functools import partial

import torch

from lessons.l02_naive_attention.naive import attention
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 19.1 predict


def slipped_plan(
    num_layers,
    num_kv_heads,
    head_dim,
    context,
    bits,
    group,
    weight_bytes,
    memory_bytes,
    *,
    both=2,
    scales="group",
    divide=lambda left, bytes: left // bytes,
    left="rest",
    weights="read",
    gain="tokens",
):
    """cache_plan with one slip, spelled by a switch."""
    values = both * num_layers * num_kv_heads * head_dim * context
    count = {
        "group": values // group,
        "none": 0,
        "token": 2 * num_layers * context,
        "head": 2 * num_layers * num_kv_heads,
        "four_bytes": 2 * values // group,
    }[scales]
    plain, small = 2 * values, values * bits // 8 + 2 * count
    small_weights = weight_bytes if weights == "read" else weight_bytes * bits // 16
    room = memory_bytes if left == "all" else memory_bytes - weight_bytes
    room_after = memory_bytes - small_weights if weights == "smaller" else room
    few, many = divide(room, plain), divide(room_after, small)
    read = 0 if weights == "not_read" else weight_bytes
    before = read + few * plain
    after = (small_weights if weights == "smaller" else read) + many * small
    return (
        plain,
        small,
        few,
        many,
        {
            "tokens": (many / after) / (few / before),
            "requests": many / few,
            "time": before / after,
            "same_batch": before / (read + few * small),
            "upside_down": (few / before) / (many / after),
        }[gain],
    )


for name, slip, hint in [
    ("k_alone", dict(both=1), "K and V are both stored: two values where you count one."),
    (
        "no_scales",
        dict(scales="none"),
        "The scales are stored and read too: 16 bits for each group of values.",
    ),
    (
        "a_scale_a_token",
        dict(scales="token"),
        "A scale belongs to `group` values of one head, not to a whole token of a layer.",
    ),
    (
        "a_scale_a_head",
        dict(scales="head"),
        "One scale for a head's whole context? Every token has groups of its own.",
    ),
    ("scales_of_32_bits", dict(scales="four_bytes"), "A scale has 16 bits, two bytes."),
    (
        "weights_take_no_room",
        dict(left="all"),
        "The weights lie in the same memory: the cache gets what they leave.",
    ),
    (
        "smaller_weights",
        dict(weights="smaller"),
        "Only the cache is quantized here. The weights keep their bytes.",
    ),
    (
        "parts_of_sequences",
        dict(divide=lambda left, bytes: left / bytes),
        "Half a sequence cannot run: whole ones only.",
    ),
    (
        "one_more",
        dict(divide=lambda left, bytes: -(-left // bytes)),
        "You round up: the last sequence does not fit.",
    ),
    (
        "requests_for_tokens",
        dict(gain="requests"),
        "More sequences are more bytes a step. Divide the tokens of a step by its bytes.",
    ),
    (
        "weights_are_not_read",
        dict(weights="not_read"),
        "A step reads the weights too, whatever the cache looks like.",
    ),
    (
        "time_of_a_step",
        dict(gain="time"),
        "This compares the time of a step. Each step gives as many tokens as sequences run.",
    ),
    (
        "the_same_batch",
        dict(gain="same_batch"),
        "The smaller cache runs as many sequences as fit into it, not as many as before.",
    ),
    (
        "upside_down",
        dict(gain="upside_down"),
        "This is how much slower 16 bits are: turn the ratio around.",
    ),
]:
    answers.wrong("19.1", hint, name)(partial(slipped_plan, **slip))


@answers.alternative("19.1")
def by_tokens(num_layers, num_kv_heads, head_dim, context, bits, group, weight_bytes, memory_bytes):
    rows = 2 * num_layers * num_kv_heads * context
    sizes = [rows * head_dim * 2, rows * (head_dim // group) * (group * bits // 8 + 2)]
    counts = [(memory_bytes - weight_bytes) // size for size in sizes]
    rates = [count / (weight_bytes + count * size) for count, size in zip(counts, sizes)]
    return (*sizes, *counts, rates[1] / rates[0])


@answers.alternative("19.1")
def by_filling(
    num_layers, num_kv_heads, head_dim, context, bits, group, weight_bytes, memory_bytes
):
    kappa = 2 * num_layers * num_kv_heads * head_dim * 16
    small_bits = kappa * bits // 16 + kappa // group
    plain, small = kappa // 8 * context, small_bits // 8 * context
    if small_bits % 8:
        small = small_bits * context // 8
    fits = []
    for size in (plain, small):
        used = weight_bytes + size * ((memory_bytes - weight_bytes) // size)
        fits.append(((used - weight_bytes) // size, used))
    (few, before), (many, after) = fits
    return plain, small, few, many, many * before / (few * after)


# ---------------------------------------------------------------- 19.2 SmoothQuant


def to_codes(values, dtype, overflow="saturates", rounding=torch.round):
    """Values -> codes. overflow: "saturates", "wraps" (int8), "nan" (float8)."""
    if dtype != torch.int8:
        beyond = values.abs() > 464  # halfway from 448 to the next number, if there were one
        codes = values.clamp(-448, 448)
        if overflow == "nan":
            codes = torch.where(beyond, torch.nan, codes)
        return codes.to(dtype)
    values = rounding(values)
    if overflow == "saturates":
        values = values.clamp(-127, 127)
    return values.to(torch.int32).to(torch.int8)


def slipped_smooth(
    x,
    weight,
    act_max,
    alpha,
    dtype,
    x_scale=None,
    *,
    of_x=lambda x, s: x / s,
    of_weight=lambda weight, s: weight * s,
    turned=False,
    by="calibration",
    weight_max="column",
    dead="one",
    scale_of_x="token",
    scale_of_w="row",
    zero_rows="one",
    largest=None,
    overflow="saturates",
    rounding=torch.round,
    inverse=False,
    ignore_static=False,
    product="right",
):
    """smooth_linear with some slips, spelled by switches."""
    most = largest or (127.0 if dtype == torch.int8 else 448.0)
    x, weight, dim = x.clone(), weight.clone(), {"column": 0, "mean": 0}.get(weight_max)
    of_w = weight.abs().mean(0) if weight_max == "mean" else weight.abs().amax(dim)
    of_act = act_max if by == "calibration" else x.abs().amax(0)
    a = 1 - alpha if turned else alpha
    s = of_act**a / of_w.expand_as(of_act) ** (1 - a)
    if dead == "one":
        s = torch.where((of_act > 0) & (of_w > 0), s, 1.0)
    elif dead == "epsilon":
        s = s.clamp(1e-5, 1e5)
    rows_x, rows_w = of_x(x, s), of_weight(weight, s)

    def scale(rows, kind):
        if kind == "tensor":
            found = rows.abs().max().expand(len(rows), 1) / most
        elif kind == "signed":
            found = rows.amax(1, keepdim=True) / most
        else:
            found = rows.abs().amax(1, keepdim=True) / most
        return torch.where(found > 0, found, 1.0) if zero_rows == "one" else found

    if x_scale is None or ignore_static:
        x_scale = scale(rows_x, scale_of_x)
    w_scale = scale(rows_w, scale_of_w)
    x_codes, w_codes = (
        to_codes(rows / of, dtype, overflow, rounding)
        for rows, of in ((rows_x, x_scale), (rows_w, w_scale))
    )
    if product == "int8":
        sums = (x_codes.float() @ w_codes.float().T).to(torch.int32).to(torch.int8).float()
        sums = sums if dtype == torch.int8 else (x_codes.float() @ w_codes.float().T)
    else:
        sums = x_codes.float() @ w_codes.float().T
    out = {
        "right": lambda: sums * x_scale * w_scale.T,
        "int8": lambda: sums * x_scale * w_scale.T,
        "x_scale_only": lambda: sums * x_scale,
        "w_scale_only": lambda: sums * w_scale.T,
        "none": lambda: sums,
        "divided": lambda: sums / (x_scale * w_scale.T),
        "smoothed_again": lambda: ((x_codes.float() * s) @ w_codes.float().T) * x_scale * w_scale.T,
    }[product]()
    if inverse:
        x_scale, w_scale = 1 / x_scale, 1 / w_scale
    return s, x_codes, x_scale, w_codes, w_scale, out


SMOOTHS = [
    (
        "x_alone_is_smoothed",
        dict(of_weight=lambda weight, s: weight),
        "You divide x and leave the weight as it is: the product changes. Who takes s over?",
    ),
    (
        "the_weight_alone_is_smoothed",
        dict(of_x=lambda x, s: x),
        "You multiply the weight and leave x as it is: the product changes.",
    ),
    (
        "upside_down",
        dict(of_x=lambda x, s: x * s, of_weight=lambda weight, s: weight / s),
        "You multiply x by s, so its loud channels become louder: divide x, multiply the weight.",
    ),
    (
        "not_smoothed",
        dict(of_x=lambda x, s: x, of_weight=lambda weight, s: weight),
        "Neither x nor the weight was smoothed.",
    ),
    (
        "alpha_reversed",
        dict(turned=True),
        "alpha belongs to the activations, 1 - alpha to the weight: at 1, x loses all outliers.",
    ),
    (
        "its_own_maximum",
        dict(by="batch"),
        "s is folded into the weights once, so it comes from the calibration, not from this x.",
    ),
    (
        "one_number_for_the_weight",
        dict(weight_max="all"),
        "The weight counts channel by channel: the largest |weight[:, k]| over the outputs.",
    ),
    (
        "mean_of_the_weight",
        dict(weight_max="mean"),
        "Asked is the largest |weight| of the channel, not the mean.",
    ),
    (
        "dead_channels",
        dict(dead="nan"),
        "A channel without activations or weights gives s = 0 or infinity, and then 0 / 0: let s be 1.",
    ),
    (
        "dead_channels_by_a_small_number",
        dict(dead="epsilon"),
        "Where a maximum is 0, s is 1, not a very small or very large number.",
    ),
    (
        "a_scale_for_the_tensor",
        dict(scale_of_x="tensor"),
        "One scale for all tokens: a loud token takes the bits of the quiet ones. One a token.",
    ),
    (
        "signed_maximum",
        dict(scale_of_x="signed"),
        "The largest value is not the largest |value|: what about the negative ones?",
    ),
    (
        "a_scale_for_the_weight",
        dict(scale_of_w="tensor"),
        "The weight has a scale for each row, which is one output.",
    ),
    (
        "zero_rows",
        dict(zero_rows="nan"),
        "A row of zeros has the largest value 0, and 0 / 0 is NaN: its scale is 1.",
    ),
    ("by_128", dict(largest=128.0), "The largest code is 127 (or 448), so divide by that."),
    (
        "always_127",
        dict(largest=127.0),
        "float8 goes up to 448, so divide by 448 there.",
    ),
    (
        "wraps_around",
        dict(overflow="wraps"),
        "A value beyond 127 wraps around to a negative code: clamp before you convert.",
    ),
    (
        "nan_beyond_448",
        dict(overflow="nan"),
        "E4M3 has no infinity: beyond 448 a conversion may give NaN. Clamp before you convert.",
    ),
    (
        "cut_off",
        dict(rounding=torch.trunc),
        "A conversion to int8 cuts off the fraction: round first.",
    ),
    ("rounds_down", dict(rounding=torch.floor), "Round to the nearest, not down."),
    (
        "scales_upside_down",
        dict(inverse=True),
        "You return 1 / scale. A value is its code times the scale.",
    ),
    (
        "static_is_ignored",
        dict(ignore_static=True),
        "A given x_scale is the scale of all tokens, even if it is too small.",
    ),
    (
        "multiplies_in_int8",
        dict(product="int8"),
        "127 · 127 does not fit into int8: multiply in a wider type.",
    ),
    (
        "without_the_weights_scale",
        dict(product="x_scale_only"),
        "Both sides were divided by a scale: the product needs both scales.",
    ),
    (
        "without_the_scale_of_x",
        dict(product="w_scale_only"),
        "Both sides were divided by a scale: the product lacks that of x.",
    ),
    ("without_scales", dict(product="none"), "This is the product of the codes: scale it back."),
    (
        "divided_by_scales",
        dict(product="divided"),
        "Codes times scales are the values: multiply the product by both scales.",
    ),
    (
        "smoothed_back",
        dict(product="smoothed_again"),
        "s cancels already, because the weight was multiplied by it: do not undo it in x.",
    ),
]
for name, slip, hint in SMOOTHS:
    answers.wrong("19.2", hint, name)(partial(slipped_smooth, **slip))


@answers.wrong(
    "19.2", "Your loop runs over tokens or outputs: the maximum of all rows is one call."
)
def row_by_row(x, weight, act_max, alpha, dtype, x_scale=None):
    parts = [slipped_smooth(row[None], weight, act_max, alpha, dtype, x_scale) for row in x]
    s, _, _, w_codes, w_scale, _ = parts[0]
    x_codes, out = (torch.cat([part[at].float() for part in parts]) for at in (1, 5))
    scale = torch.cat([part[2] for part in parts]) if x_scale is None else x_scale
    return s, x_codes.to(dtype), scale, w_codes, w_scale, out


@answers.alternative("19.2")
def in_float64(x, weight, act_max, alpha, dtype, x_scale=None):
    most = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    x, weight, act_max = x.double(), weight.double(), act_max.double()
    widest = weight.abs().max(0).values
    alive = (act_max != 0) & (widest != 0)
    s = torch.ones_like(act_max)
    s[alive] = (alpha * act_max[alive].log() - (1 - alpha) * widest[alive].log()).exp()

    def quantized(rows, scale):
        if scale is None:
            scale = rows.abs().max(1).values[:, None] / most
            scale[scale == 0] = 1
        values = torch.minimum(torch.maximum(rows / scale, -1.0 * values_of(most)), values_of(most))
        codes = torch.round(values) if dtype == torch.int8 else values.float()
        return codes.to(dtype), scale

    def values_of(number):
        return torch.tensor(float(number), dtype=torch.float64)

    x_codes, xs = quantized(x / s, None if x_scale is None else x_scale.double())
    w_codes, ws = quantized(weight * s, None)
    out = (x_codes.double() * xs) @ (w_codes.double() * ws).T
    return s.float(), x_codes, xs.float(), w_codes, ws.float(), out.float()


@answers.alternative("19.2")
def with_reciprocals(x, weight, act_max, alpha, dtype, x_scale=None):
    is_int = dtype == torch.int8
    most = float(torch.iinfo(dtype).max if is_int else torch.finfo(dtype).max)
    columns = weight.abs().max(0)[0]
    s = torch.pow(act_max, alpha) * torch.pow(columns, alpha - 1)
    s = s.masked_fill((act_max == 0) | (columns == 0), 1.0)

    def row_scale(rows):
        widest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1, keepdim=True)
        return (widest / most).masked_fill(widest == 0, 1.0)

    smooth_x, smooth_w = x * s.reciprocal(), weight * s
    own_scale = x_scale if x_scale is not None else row_scale(smooth_x)
    w_scale = row_scale(smooth_w)
    codes = []
    for rows, scale in ((smooth_x, own_scale), (smooth_w, w_scale)):
        values = torch.clip(rows * scale.reciprocal(), -most, most)
        codes.append((values.round() if is_int else values).to(dtype))
    sums = torch.einsum("tk,nk->tn", codes[0].float(), codes[1].float())
    return s, codes[0], own_scale, codes[1], w_scale, sums * (own_scale * w_scale[:, 0])


# ---------------------------------------------------------------- 19.3 a louder token


def slipped_write(
    pages,
    k,
    v,
    slot,
    *,
    k_per="channel",
    v_per="head",
    grows=True,
    shrinks=False,
    again="right",
    fresh=True,
    most=127.0,
    rounding=torch.round,
    wraps=False,
    zero_scales=True,
    v_place="row",
    k_by_v=False,
    v_by_k=False,
    place=divmod,
):
    """write_token with some slips, spelled by switches."""
    page_size = pages.k_codes.shape[1]
    page, row = place(slot, page_size)
    page, row = page % len(pages.k_codes), row % page_size

    def codes_of(values, scale):
        divided = values / (torch.where(scale > 0, scale, 1.0) if zero_scales else scale)
        codes = rounding(divided.nan_to_num(0.0, 127, -127))
        if not zero_scales:
            codes = torch.where(divided.isnan(), -128.0, codes)  # what a conversion of NaN may give
        return (codes if wraps else codes.clamp(-128, 127)).to(torch.int32).to(torch.int8)

    own = pages.k_scales[page].nan_to_num(1.0).clone()
    if row == 0 and fresh:
        own = torch.zeros_like(k)
    largest = {
        "channel": k.abs(),
        "token": k.abs().amax(-1, keepdim=True).expand_as(k),
        "page": k.abs().max().expand_as(k),
        "over_heads": k.abs().amax(0, keepdim=True).expand_as(k),
    }[k_per]
    new = largest / most if shrinks or (row == 0 and fresh) else torch.maximum(own, largest / most)
    if not grows and row:
        new = own
    ratio = own / torch.where(new > 0, new, 1.0)
    rows = slice(0, row)
    if again == "inverse":
        ratio = torch.where(ratio > 0, 1 / ratio, 0.0)
    if again == "newest":
        rows = slice(max(row - 1, 0), row)
    if again != "never":
        earlier = rounding(pages.k_codes[page, rows].float() * ratio)
        pages.k_codes[page, rows] = earlier.clamp(-128, 127).to(torch.int8)
    if again == "all_pages":
        others = torch.arange(len(pages.k_codes)) != page
        pages.k_codes[others] = (pages.k_codes[others].float() * 0.5).to(torch.int8)

    v_scale = v.abs().amax(-1) / most
    if v_per == "token":
        v_scale = v.abs().max().expand_as(v_scale) / most
    pages.k_codes[page, row] = codes_of(k, v_scale[:, None].expand_as(k) if k_by_v else new)
    pages.k_scales[page] = new
    if v_per == "channel":
        pages.v_codes[page, row] = codes_of(v, v.abs() / most)
    else:
        by = k.abs().amax(-1) / most if v_by_k else v_scale
        pages.v_codes[page, row] = codes_of(v, by[:, None])
    if v_place == "row":
        pages.v_scales[page, row] = v_scale
    elif v_place == "page":
        pages.v_scales[page, 0] = v_scale
    elif v_place == "next":
        pages.v_scales[page, (row + 1) % page_size] = v_scale
    elif v_place == "whole_page":
        pages.v_scales[page] = v_scale
    elif v_place == "turned":
        pages.v_scales.flatten(0, 1)[row * len(pages.k_codes) + page] = v_scale
    else:
        pages.v_scales[page, row] = 1 / v_scale


WRITES = [
    (
        "k_per_token",
        dict(k_per="token"),
        "One scale of K for all channels of a head: a loud channel takes the bits of the others.",
    ),
    ("k_per_page", dict(k_per="page"), "One scale of K for all heads and channels of the page."),
    ("k_over_heads", dict(k_per="over_heads"), "Each head has channels, and scales, of its own."),
    (
        "v_over_heads",
        dict(v_per="token"),
        "V has a scale for each token and *head*: the maximum is taken over the head's values.",
    ),
    (
        "v_per_channel",
        dict(v_per="channel"),
        "V has one scale a head, so all its values are divided by the same number.",
    ),
    (
        "reuses_the_pages_scale",
        dict(grows=False),
        "The scale of the page is too small for a louder token, whose codes are cut off at 127.",
    ),
    (
        "reuses_and_wraps",
        dict(grows=False, wraps=True),
        "The page's scale is too small for a louder token, and its codes wrap around.",
    ),
    (
        "the_newest_scale",
        dict(shrinks=True),
        "A quieter token makes the scale smaller, and the codes in front of it leave the range.",
    ),
    (
        "never_again",
        dict(again="never"),
        "The scale grew, and the codes in the page still mean multiples of the old one.",
    ),
    (
        "only_the_newest_again",
        dict(again="newest"),
        "Every row in front of the slot has the page's scale, not only the last one.",
    ),
    (
        "upside_down",
        dict(again="inverse"),
        "With a larger scale, codes become smaller: times old / new.",
    ),
    (
        "former_owner",
        dict(fresh=False),
        "Row 0 is the first of a sequence in this page: whose scale do you start from?",
    ),
    (
        "all_pages_again",
        dict(again="all_pages"),
        "Other pages have scales of their own: only this page's codes change.",
    ),
    ("by_128", dict(most=128.0), "The largest code is 127, so a scale is the maximum / 127."),
    ("cut_off", dict(rounding=torch.trunc), "int8 cuts the fraction off: round first."),
    (
        "zero_by_zero",
        dict(zero_scales=False),
        "A channel of zeros has the scale 0, and 0 / 0 is no code: divide by 1 there.",
    ),
    (
        "v_scale_of_the_page",
        dict(v_place="page"),
        "You store V's scale in row 0 of the page: each token overwrites that of the first.",
    ),
    (
        "v_scale_of_the_next_slot",
        dict(v_place="next"),
        "V's scale stands a row too far: it belongs to the slot of its token.",
    ),
    (
        "v_scale_everywhere",
        dict(v_place="whole_page"),
        "You store V's scale in all rows of the page, and the earlier tokens lose theirs.",
    ),
    (
        "v_scale_turned",
        dict(v_place="turned"),
        "Slot i is page i // page_size, row i mod page_size: V's scale went to another slot.",
    ),
    (
        "v_scale_inverse",
        dict(v_place="inverse"),
        "You store 1 / scale: a value is its code times the scale.",
    ),
    (
        "k_by_the_scale_of_v",
        dict(k_by_v=True),
        "K's codes were made with V's scale. Each has scales of its own.",
    ),
    (
        "v_by_the_scale_of_k",
        dict(v_by_k=True),
        "V's codes were made with K's largest value. Each has scales of its own.",
    ),
    (
        "page_and_row_turned",
        dict(place=lambda slot, size: divmod(slot, size)[::-1]),
        "divmod gives the page first, then the row.",
    ),
]
for name, slip, hint in WRITES:
    answers.wrong("19.3", hint, name)(partial(slipped_write, **slip))


@answers.wrong("19.3", "Your loop runs over rows, heads or channels: let tensors do it.")
def channel_by_channel(pages, k, v, slot):
    page, row = divmod(slot, pages.k_codes.shape[1])
    for head in range(k.shape[0]):
        for channel in range(k.shape[1]):
            own = float(pages.k_scales[page, head, channel]) if row else 0.0
            new = max(own, float(k[head, channel].abs()) / 127)
            column = pages.k_codes[page, :, head, channel]
            column[:row] = (column[:row] * (own / new if new else 0.0)).round().to(torch.int8)
            column[row] = round(float(k[head, channel]) / new) if new else 0
            pages.k_scales[page, head, channel] = new
        scale = float(v[head].abs().max()) / 127
        pages.v_scales[page, row, head] = scale
        pages.v_codes[page, row, head] = (v[head] / (scale or 1.0)).round().to(torch.int8)


@answers.alternative("19.3")
def page_anew(pages, k, v, slot):
    """Dequantizes the rows in front, appends the new one, quantizes the page."""
    size = pages.k_codes.shape[1]
    page, row = slot // size, slot % size
    scale = k.abs().double() / 127
    values = k.double()[None]
    if row:
        old = pages.k_scales[page].double()
        values = torch.cat([pages.k_codes[page, :row].double() * old, values])
        scale = torch.maximum(scale, old)
    codes = torch.where(scale > 0, values / scale, 0.0)
    pages.k_codes[page, : row + 1] = codes.round().to(torch.int8)
    pages.k_scales[page] = scale.float()
    of_v = v.double().abs().max(-1, keepdim=True).values / 127
    pages.v_scales[page, row] = of_v[:, 0].float()
    pages.v_codes[page, row] = torch.where(of_v > 0, v / of_v, 0.0).round().to(torch.int8)


@answers.alternative("19.3")
def by_largest_values(pages, k, v, slot):
    """Thinks in the largest values of the page, and scales only where they grow."""
    page, row = divmod(slot, pages.k_codes.shape[1])
    codes, scales = pages.k_codes[page], pages.k_scales[page]
    if row == 0:
        scales.zero_()
    louder = k.abs() > 127 * scales
    grown = torch.where(louder, k.abs() / 127, scales)
    shrink = torch.where(louder, scales / torch.where(grown > 0, grown, 1.0), 1.0)
    codes[:row] = torch.round(codes[:row] * shrink).to(torch.int8)
    scales.copy_(grown)
    codes[row] = torch.round(k / grown.masked_fill(grown == 0, 1.0)).to(torch.int8)
    largest = v.abs().amax(1)
    pages.v_scales[page, row] = largest / 127
    shares = v / largest.masked_fill(largest == 0, 1.0)[:, None]
    pages.v_codes[page, row] = torch.round(127 * shares).to(torch.int8)


# ---------------------------------------------------------------- 19.4 the hook


def halves_of(bytes, order="low first"):
    """[…, D / 2] uint8 -> […, D] codes. order: "low first", "high first", "halves"."""
    low, high = bytes & 15, bytes >> 4
    if order == "halves":
        return torch.cat([low, high], -1)
    pair = (high, low) if order == "high first" else (low, high)
    return torch.stack(pair, -1).flatten(-2)


def slipped_four_bits(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    block_table,
    context_lens,
    *,
    order="low first",
    meaning=lambda code, scale, lowest: code * scale + lowest,
    slot_of=lambda key, block, row, size: (block, row),
    swap=False,
    scales_of="own",
    masked=True,
    dense=False,
    unmasked_high=False,
    itself=False,
):
    """By gathering in PyTorch, with one slip, spelled by a switch."""
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = torch.zeros_like(q)
    if dense:  # the whole cache as float32
        k_all, v_all = (halves_of(cache).float() for cache in (k_cache, v_cache))
        assert k_all.shape == v_all.shape
    pairs = (k_scales, v_scales)
    if scales_of == "turned":
        pairs = (v_scales, k_scales)
    elif scales_of == "k":
        pairs = (k_scales, k_scales)
    for b, length in enumerate(context_lens.tolist()):
        rows = []
        for cache, scales in zip((k_cache, v_cache), pairs):
            held = []
            for key in range(length):
                block, row = int(block_table[b, key // size]), key % size
                bytes = cache[block, row]
                if unmasked_high:  # the low value keeps the high four bits
                    codes = torch.stack([bytes, bytes >> 4], -1).flatten(-2).float()
                else:
                    codes = halves_of(bytes, order).float()
                at, place = slot_of(key, block, row, size)
                scale, lowest = scales[:, at % scales.shape[1], place % size, :, None].unbind(1)
                if swap:
                    scale, lowest = lowest, scale
                held.append(meaning(codes, scale, lowest))
            rows.append(held)
        if not length:
            out[b] = 0.0 if masked else torch.nan
            continue
        k, v = (torch.stack(held) for held in rows)
        if not masked and length % size:
            v = v * torch.nan
        out[b] = attention(q[b : b + 1], k, v)[0]
    assert out.shape[1] == group * k_cache.shape[2]
    return out


LOADS = [
    (
        "nibbles_swapped",
        dict(order="high first"),
        "Value 2i stands in the low four bits of byte i, value 2i + 1 in the high four.",
    ),
    (
        "halves",
        dict(order="halves"),
        "Here neighbours share a byte: value c lies in byte c // 2, not in byte c mod (D / 2).",
    ),
    (
        "the_whole_byte",
        dict(unmasked_high=True),
        "The low value still has the high four bits in it: & 15.",
    ),
    (
        "no_lowest",
        dict(meaning=lambda code, scale, lowest: code * scale),
        "Code 0 means `lowest`, not 0: add it.",
    ),
    (
        "centred",
        dict(meaning=lambda code, scale, lowest: (code - 8) * scale + lowest),
        "Codes count from 0 to 15 up from `lowest`: there is no 8 to take away.",
    ),
    (
        "signed",
        dict(meaning=lambda code, scale, lowest: (code - 16 * (code > 7).float()) * scale + lowest),
        "You read the four bits as a signed number. Codes are 0 to 15.",
    ),
    (
        "no_scale",
        dict(meaning=lambda code, scale, lowest: code + lowest),
        "A code counts steps of `scale`: multiply it.",
    ),
    (
        "lowest_is_scaled",
        dict(meaning=lambda code, scale, lowest: (code + lowest) * scale),
        "`lowest` is a value already. Only the code is multiplied by the scale.",
    ),
    (
        "divided",
        dict(meaning=lambda code, scale, lowest: code / scale + lowest),
        "Multiply by the scale: it was divided by when the value was written.",
    ),
    (
        "pair_swapped",
        dict(swap=True),
        "The first number of a slot is the scale, the second is the lowest value.",
    ),
    (
        "scale_of_the_key",
        dict(slot_of=lambda key, block, row, size: (key // size, row)),
        "You read the scale by the key's number in the sequence. Scales lie by slot, as the rows do.",
    ),
    (
        "scale_of_the_block",
        dict(slot_of=lambda key, block, row, size: (block, 0)),
        "All rows of a block get the scale of its first: each slot has a pair of its own.",
    ),
    (
        "scale_of_the_next_slot",
        dict(slot_of=lambda key, block, row, size: divmod(block * size + row + 1, size)),
        "You read the pair of the next slot.",
    ),
    (
        "pairs_not_counted",
        dict(slot_of=lambda key, block, row, size: divmod((block * size + row) // 2, size)),
        "There are two numbers for each slot, so slot i's pair begins at 2i.",
    ),
    (
        "scales_of_k_for_v",
        dict(scales_of="k"),
        "V was read with the scales of K: use the pointer that the hook gets.",
    ),
    (
        "scales_turned",
        dict(scales_of="turned"),
        "K was read with the scales of V, and V with those of K.",
    ),
    (
        "unmasked_scales",
        dict(masked=False),
        "Scales of slots that nobody uses are NaN, and 0 · NaN is NaN: mask the loads of scales, too.",
    ),
    (
        "unpacks_the_cache",
        dict(dense=True),
        "You unpack the whole cache, which is what the smaller cache was to avoid.",
    ),
]
for name, slip, hint in LOADS:
    answers.wrong("19.4", hint, name)(partial(slipped_four_bits, **slip))


@answers.alternative("19.4")
def by_sums_of_codes(q, k_cache, v_cache, k_scales, v_scales, block_table, context_lens):
    """Scores from the codes: q · (code · scale + lowest) = scale · (q · code) + lowest · Σ q."""
    (_, num_heads, dim), size = q.shape, k_cache.shape[1]
    group = num_heads // k_cache.shape[2]
    out = torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        keys = torch.arange(length)
        slots = block_table[b].long()[keys // size], keys % size
        for head in range(num_heads if length else 0):
            own = (*slots, torch.tensor(head // group))
            scale, lowest = k_scales[head // group][slots].unbind(-1)
            products = (q[b, head] * halves_of(k_cache[own]).float()).sum(-1)
            scores = (scale * products + lowest * q[b, head].sum()) * dim**-0.5
            p = torch.softmax(scores, 0)
            scale, lowest = v_scales[head // group][slots].unbind(-1)
            out[b, head] = (p * scale) @ halves_of(v_cache[own]).float() + (p * lowest).sum()
    return out


@answers.alternative("19.4")
def by_a_table(q, k_cache, v_cache, k_scales, v_scales, block_table, context_lens):
    """Each slot has a table of sixteen values, which its codes look up."""
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = q * 0
    steps = torch.arange(16.0)
    for b in range(len(q)):
        length = int(context_lens[b])
        rows = []
        for cache, scales in ((k_cache, k_scales), (v_cache, v_scales)):
            held = []
            for key in range(length):
                block = block_table[b, key // size]
                tables = [steps * pair[0] + pair[1] for pair in scales[:, block, key % size]]
                codes = halves_of(cache[block, key % size]).long()
                held.append([table[own] for table, own in zip(tables, codes)])
            rows.append(held)
        for head in range(q.shape[1] if length else 0):
            k, v = (torch.stack([row[head // group] for row in held]) for held in rows)
            out[b, head] = torch.softmax(k @ q[b, head] / q.shape[2] ** 0.5, 0) @ v
    return out
