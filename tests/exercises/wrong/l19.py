"""Wrong answers to lesson 19's exercises: real slips, and the hint for each."""

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l19_kv_quantization import smooth_linear
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 19.1 predict

answers.slips(
    "19.1",
    """
    k_alone: K and V are both stored: two values where you count one.
    - values = 2 * num_layers
    + values = num_layers

    no_scales: The scales are stored and read too: 16 bits for each group of values.
    - + 2 * values // group

    a_scale_a_token: A scale belongs to `group` values of one head, not to a whole token of a layer.
    - 2 * values // group
    + 2 * (2 * num_layers * context)

    a_scale_a_head: One scale for a head's whole context? Every token has groups of its own.
    - 2 * values // group
    + 2 * (2 * num_layers * num_kv_heads)

    scales_of_32_bits: A scale has 16 bits, two bytes.
    - 2 * values // group
    + 4 * values // group

    weights_take_no_room: The weights are in the same memory: the cache gets what they leave.
    - memory_bytes - weight_bytes
    + memory_bytes

    smaller_weights: Only the cache is quantized here. The weights keep their bytes.
    - left // small
    + (memory_bytes - weight_bytes * bits // 16) // small
    - seconds_after = weight_bytes
    + seconds_after = weight_bytes * bits // 16

    parts_of_sequences: Half a sequence cannot run: whole ones only.
    - left // plain, left // small
    + left / plain, left / small

    one_more: You round up: the last sequence does not fit.
    - left // plain, left // small
    + -(-left // plain), -(-left // small)

    requests_for_tokens: More sequences are more bytes a step. Divide the tokens of a step by its
        bytes.
    - (many / seconds_after) / (few / seconds_before)
    + many / few

    weights_are_not_read: A step reads the weights too, whatever the cache looks like.
    - seconds_before = weight_bytes + few * plain
    - seconds_after = weight_bytes + many * small
    + seconds_before = few * plain
    + seconds_after = many * small

    time_of_a_step: This compares the time of a step. Each step gives as many tokens as sequences
        run.
    - (many / seconds_after) / (few / seconds_before)
    + seconds_before / seconds_after

    the_same_batch: The smaller cache runs as many sequences as fit into it, not as many as before.
    - (many / seconds_after) / (few / seconds_before)
    + seconds_before / (weight_bytes + few * small)

    upside_down: This is how much slower 16 bits are: turn the ratio around.
    - (many / seconds_after) / (few / seconds_before)
    + (few / seconds_before) / (many / seconds_after)

    seconds_in_the_wrong_place: Tokens a second are tokens divided by seconds: you multiply by them.
    - (many / seconds_after) / (few / seconds_before)
    + (many * seconds_after) / (few * seconds_before)
    """,
)


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

answers.slips(
    "19.2",
    """
    x_alone_is_smoothed: You divide x and leave the weight as it is: the product changes. Who takes
        s over?
    - x, weight = x / s, weight * s
    + x = x / s

    the_weight_alone_is_smoothed: You multiply the weight and leave x as it is: the product changes.
    - x, weight = x / s, weight * s
    + weight = weight * s

    upside_down: You multiply x by s, so its outlier channels become larger: divide x, multiply the
        weight.
    - x / s, weight * s
    + x * s, weight / s

    not_smoothed: Neither x nor the weight was smoothed.
    - x, weight = x / s, weight * s

    alpha_reversed: alpha belongs to the activations, 1 - alpha to the weight: at 1, x loses all
        outliers.
    - act_max**alpha / weight_max ** (1 - alpha)
    + act_max ** (1 - alpha) / weight_max**alpha

    its_own_maximum: s is folded into the weights once, so it comes from the calibration, not from
        this x.
    - weight_max = weight.abs().amax(dim=0)
    + weight_max, act_max = weight.abs().amax(dim=0), x.abs().amax(dim=0)

    one_number_for_the_weight: The weight counts channel by channel: the largest |weight[:, k]| over
        the outputs.
    - weight.abs().amax(dim=0)
    + weight.abs().amax()

    mean_of_the_weight: Asked is the largest |weight| of the channel, not the mean.
    - weight.abs().amax(dim=0)
    + weight.abs().mean(dim=0)

    dead_channels: A channel without activations or weights gives s = 0 or infinity, and then 0 / 0:
        let s be 1.
    - s = torch.where((act_max > 0) & (weight_max > 0), s, 1.0)

    dead_channels_by_a_small_number: Where a maximum is 0, s is 1, not a very small or very large
        number.
    - torch.where((act_max > 0) & (weight_max > 0), s, 1.0)
    + s.clamp(1e-5, 1e5)

    a_scale_for_the_tensor: One scale for all tokens: a token of large magnitude takes the bits of
        the others. One a token.
    - x_scale = row_scale(x)
    + x_scale = row_scale(x.abs().amax().expand(len(x), 1))

    signed_maximum: The largest value is not the largest |value|: what about the negative ones?
    - x_scale = row_scale(x)
    + x_scale = row_scale(x.clamp(min=0))

    a_scale_for_the_weight: The weight has a scale for each row, which is one output.
    - w_scale = row_scale(weight)
    + w_scale = row_scale(weight.abs().amax().expand(len(weight), 1))

    zero_rows: A row of zeros has the largest value 0, and 0 / 0 is NaN: its scale is 1.
    - torch.where(most > 0, most / largest, 1.0)
    + most / largest

    by_128: The largest code is 127 (or 448), so divide by that.
    - most / largest
    + most / 128

    always_127: float8 goes up to 448, so divide by 448 there.
    - most / largest
    + most / 127

    wraps_around: A value beyond 127 wraps around to a negative code: clamp before you convert.
    - values.round() if dtype == torch.int8
    + (rows / scale).round().int() if dtype == torch.int8

    nan_beyond_448: E4M3 has no infinity: beyond 448 a conversion may give NaN. Clamp before you
        convert.
    - else values)
    + else values.where((rows / scale).abs() <= 464, torch.nan))

    cut_off: A conversion to int8 cuts off the fraction: round first.
    - values.round()
    + values.trunc()

    rounds_down: Round to the nearest, not down.
    - values.round()
    + values.floor()

    scales_upside_down: You return 1 / scale. A value is its code times the scale.
    - return s, x_codes, x_scale, w_codes, w_scale, product
    + return s, x_codes, 1 / x_scale, w_codes, 1 / w_scale, product

    static_is_ignored: A given x_scale is the scale of all tokens, even if it is too small.
    - row_scale(x) if x_scale is None else x_scale
    + row_scale(x)

    codes_multiplied_as_they_are: int8 times int8 stays int8 and wraps around, and float8 has no
        product with a float: convert the codes to float32 first.
    - (x_codes.float() @ w_codes.float().T)
    + (x_codes @ w_codes.T)

    multiplies_in_int8: 127 · 127 does not fit into int8: multiply in a wider type.
    - product = (x_codes.float() @ w_codes.float().T)
    + product = x_codes.float() @ w_codes.float().T
    + product = product.int().to(dtype).float() if dtype == torch.int8 else product
    + product = product

    without_the_weights_scale: Both sides were divided by a scale: the product needs both scales.
    - * x_scale * w_scale.T
    + * x_scale

    without_the_scale_of_x: Both sides were divided by a scale: the product lacks that of x.
    - * x_scale * w_scale.T
    + * w_scale.T

    without_scales: This is the product of the codes: scale it back.
    - * x_scale * w_scale.T

    divided_by_scales: Codes times scales are the values: multiply the product by both scales.
    - * x_scale * w_scale.T
    + / (x_scale * w_scale.T)

    smoothed_back: s cancels already, because the weight was multiplied by it: do not undo it in x.
    - (x_codes.float() @
    + (x_codes.float() * s @

    minus_128: Whole numbers reach from -127 to 127.
    - (rows / scale).clamp(-largest, largest)
    + (rows / scale).clamp(-largest - (dtype == torch.int8), largest)

    product_of_what_was_given: The product is that of the dequantized matrices, not the exact one.
    - (x_codes.float() @ w_codes.float().T) * x_scale * w_scale.T
    + x @ weight.T

    scale_of_the_weight_before_smoothing: The weight's scale is that of its rows after they were
        multiplied by s.
    - w_scale = row_scale(weight)
    + w_scale = row_scale(weight / s)

    halves_away_from_0: torch.round takes a half to the even neighbour.
    - values.round()
    + (values.sign() * (values.abs() + 0.5).floor())

    scales_from_1e5_on: A row whose values are all tiny has a tiny scale. Only a row of zeros is a
        special case.
    - return torch.where(most > 0, most / largest, 1.0)
    + return torch.where(most > 0, most.clamp(min=1e-5) / largest, 1.0)

    s_from_1e5_on: s may be tiny. Only where a channel is all zeros it is 1.
    - s = torch.where((act_max > 0) & (weight_max > 0), s, 1.0)
    + s = torch.where((act_max > 0) & (weight_max > 0), s.clamp(min=1e-5), 1.0)

    tiny_taken_for_zero: A channel or a row is zero if its largest value is 0, not if it is small.
    - return torch.where(most > 0, most / largest, 1.0)
    + return torch.where(most > 1e-8, most / largest, 1.0)
    """,
)


@answers.wrong(
    "19.2", "Your loop runs over tokens or outputs: the maximum of all rows is one call."
)
def row_by_row(x, weight, act_max, alpha, dtype, x_scale=None):
    parts = [smooth_linear(row[None], weight, act_max, alpha, dtype, x_scale) for row in x]
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


# ---------------------------------------------------------------- 19.3 a larger token

answers.slips(
    "19.3",
    """
    k_per_token: One scale of K for all channels of a head: an outlier channel takes the bits of the
        others.
    - k.abs() / 127
    + k.abs().amax(-1, keepdim=True) / 127

    k_per_page: One scale of K for all heads and channels of the page.
    - k.abs() / 127
    + k.abs().amax() / 127

    k_over_heads: Each head has channels, and scales, of its own.
    - k.abs() / 127
    + k.abs().amax(0, keepdim=True) / 127

    v_over_heads: V has a scale for each token and *head*: the maximum is taken over the head's
        values.
    - v.abs().amax(dim=-1)
    + v.abs().amax().expand(len(v))

    v_per_channel: V has one scale a head, so all its values are divided by the same number.
    - v / divisor[:, None]
    + v.sign() * 127

    reuses_the_pages_scale: The scale of the page is too small for a larger token, whose codes are
        cut off at 127.
    - torch.maximum(own, k.abs() / 127)
    + own if row else k.abs() / 127
    - (k / divisor).round()
    + (k / divisor).round().clamp(-128, 127)

    reuses_and_wraps: The page's scale is too small for a larger token, and its codes wrap around.
    - torch.maximum(own, k.abs() / 127)
    + own if row else k.abs() / 127
    - (k / divisor).round()
    + (k / divisor).round().int()

    zeros_take_the_scale: A token that is 0 in a channel leaves the scale of the tokens before it.
    - torch.maximum(own, k.abs() / 127)
    + torch.where(k == 0, 0.0, torch.maximum(own, k.abs() / 127))

    the_newest_scale: A quieter token makes the scale smaller, and the codes in front of it leave
        the range.
    - torch.maximum(own, k.abs() / 127)
    + k.abs() / 127
    - earlier.round()
    + earlier.round().clamp(-128, 127)

    never_again: The scale grew, and the codes in the page still mean multiples of the old one.
    - pages.k_codes[page, :row] = earlier.round().to(torch.int8)

    only_the_newest_again: Every row in front of the slot has the page's scale, not only the last
        one.
    - pages.k_codes[page, :row] = earlier.round().to(torch.int8)
    + newest = max(row - 1, 0)
    + pages.k_codes[page, newest:row] = earlier[newest:].round().to(torch.int8)

    upside_down: With a larger scale, codes become smaller: times old / new.
    - (own / divisor)
    + torch.where(own > 0, divisor / own, 0.0)
    - earlier.round()
    + earlier.round().clamp(-128, 127)

    upside_down_by_1: With a larger scale, codes become smaller: times old / new.
    - (own / divisor)
    + (divisor / torch.where(own > 0, own, 1.0))

    former_owner: Row 0 is the first of a sequence in this page: whose scale do you start from?
    - pages.k_scales[page] if row else torch.zeros_like(k)
    + pages.k_scales[page].nan_to_num(1.0)

    all_pages_again: Other pages have scales of their own: only this page's codes change.
    - pages.k_codes[page, :row] = earlier.round().to(torch.int8)
    + pages.k_codes[page, :row] = earlier.round().to(torch.int8)
    + others = torch.arange(len(pages.k_codes)) != page
    + pages.k_codes[others] = (pages.k_codes[others] * 0.5).to(torch.int8)

    by_128: The largest code is 127, so a scale is the maximum / 127.
    - k.abs() / 127
    + k.abs() / 128
    - (k / divisor).round()
    + (k / divisor).round().clamp(max=127)
    - v.abs().amax(dim=-1) / 127
    + v.abs().amax(dim=-1) / 128
    - (v / divisor[:, None]).round()
    + (v / divisor[:, None]).round().clamp(max=127)

    cut_off: int8 cuts the fraction off: round first.
    - earlier.round()
    + earlier
    - (k / divisor).round()
    + (k / divisor)
    - (v / divisor[:, None]).round()
    + (v / divisor[:, None])

    zero_by_zero: A channel of zeros has the scale 0, and 0 / 0 is no code: divide by 1 there.
    - (k / divisor).round()
    + (k / scale).round().nan_to_num(-128)
    - (v / divisor[:, None]).round()
    + (v / scale[:, None]).round().nan_to_num(-128)

    v_scale_of_the_page: You store V's scale in row 0 of the page: each token overwrites that of the
        first.
    - pages.v_scales[page, row]
    + pages.v_scales[page, 0]

    v_scale_of_the_next_slot: V's scale is a row too far: it belongs to the slot of its token.
    - pages.v_scales[page, row]
    + pages.v_scales[page, (row + 1) % pages.v_scales.shape[1]]

    v_scale_everywhere: You store V's scale in all rows of the page, and the earlier tokens lose
        theirs.
    - pages.v_scales[page, row]
    + pages.v_scales[page]

    v_scale_turned: Slot i is page i // page_size, row i mod page_size: V's scale went to another
        slot.
    - pages.v_scales[page, row]
    + pages.v_scales.flatten(0, 1)[row * len(pages.k_codes) + page]

    v_scale_inverse: You store 1 / scale: a value is its code times the scale.
    - pages.v_scales[page, row] = scale
    + pages.v_scales[page, row] = 1 / scale

    k_by_the_scale_of_v: K's codes were made with V's scale. Each has scales of its own.
    - (k / divisor).round()
    + (k / v.abs().amax(-1, keepdim=True) * 127).round().clamp(-128, 127)

    v_by_the_scale_of_k: V's codes were made with K's largest value. Each has scales of its own.
    - (v / divisor[:, None]).round()
    + (v / k.abs().amax(-1, keepdim=True) * 127).round().clamp(-128, 127)

    page_and_row_turned: divmod gives the page first, then the row.
    - page, row = divmod(slot, pages.k_codes.shape[1])
    + row, page = divmod(slot, pages.k_codes.shape[1])
    + row, page = row % pages.k_codes.shape[1], page % len(pages.k_codes)

    k_divided_by_0: Where all values of a channel are 0, 0 / 0 is NaN, and no integer is a NaN.
    - divisor = torch.where(scale > 0, scale, 1.0)
    - earlier
    + divisor = scale
    + earlier

    v_divided_by_0: Where all values of a head are 0, 0 / 0 is NaN, and no integer is a NaN.
    - divisor = torch.where(scale > 0, scale, 1.0)
    - pages.v_codes
    + divisor = scale
    + pages.v_codes

    other_tensors: The pages get new tensors, and who holds the old ones sees nothing of the token.
    - own = pages.k_scales[page]
    + pages.k_codes, pages.k_scales = pages.k_codes.clone(), pages.k_scales.clone()
    + own = pages.k_scales[page]

    halves_away_from_0: torch.round takes a half to the even neighbour.
    - earlier.round()
    + (earlier.sign() * (earlier.abs() + 0.5).floor())
    - (v / divisor[:, None]).round()
    + ((v / divisor[:, None]).sign() * ((v / divisor[:, None]).abs() + 0.5).floor())

    divided_by_1e8_at_least: A channel of tiny values has a tiny scale, and it has to be divided by
        it.
    - scale = torch.maximum(own, k.abs() / 127)
    - divisor = torch.where(scale > 0, scale, 1.0)
    + scale = torch.maximum(own, k.abs() / 127)
    + divisor = scale.clamp(min=1e-8)

    tiny_v_taken_for_zero: A head is zero if its largest value is 0, not if it is small.
    - scale = v.abs().amax(dim=-1) / 127
    - divisor = torch.where(scale > 0, scale, 1.0)
    + scale = v.abs().amax(dim=-1) / 127
    + divisor = scale + 1e-9
    """,
)


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

answers.slips(
    "19.4",
    """
    nibbles_swapped: Value 2i is in the low four bits of byte i, value 2i + 1 in the high four.
    - column % 2 * 4
    + (1 - column % 2) * 4

    a_byte_for_each_value: Two values share a byte: value c is in byte c // 2. You read byte c, which
        is another value's, and after half of the columns another row's.
    - column // 2,
    + column,

    halves: Here neighbours share a byte: value c is in byte c // 2, not in byte c mod (D / 2).
    - column // 2,
    + column % (column.shape[1] // 2),
    - column % 2 * 4
    + column // (column.shape[1] // 2) * 4

    the_whole_byte: The low value still has the high four bits in it: & 15.
    - (byte >> (column % 2 * 4)) & 15
    + byte >> (column % 2 * 4)

    no_lowest: Code 0 means `lowest`, not 0: add it.
    - * scale + lowest
    + * scale

    centred: Codes count from 0 to 15 up from `lowest`: there is no 8 to take away.
    - code.to(tl.float32) * scale
    + (code.to(tl.float32) - 8.0) * scale

    signed: You read the four bits as a signed number. Codes are 0 to 15.
    - code.to(tl.float32) * scale
    + (code.to(tl.float32) - tl.where(code > 7, 16.0, 0.0)) * scale

    no_scale: A code counts steps of `scale`: multiply it.
    - * scale + lowest
    + + lowest

    lowest_is_scaled: `lowest` is a value already. Only the code is multiplied by the scale.
    - code.to(tl.float32) * scale + lowest
    + (code.to(tl.float32) + lowest) * scale

    divided: Multiply by the scale: it was divided by when the value was written.
    - scale = tl.load(pair, mask=mask, other=0.0)
    + scale = tl.load(pair, mask=mask, other=1.0)
    - * scale + lowest
    + / scale + lowest

    pair_swapped: The first number of a slot is the scale, the second is the lowest value.
    - * scale + lowest
    + * lowest + scale

    scale_of_the_key: You read the scale by the key's number in the sequence. Scales are stored by
        slot, as the rows are.
    - slot[:, None] * 2
    + tl.arange(0, slot.shape[0])[:, None] * 2

    scale_of_the_block: All rows of a block get the scale of its first: each slot has a pair of its
        own.
    - out = q.new_empty
    + k_scales, v_scales = (x[:, :, :1].repeat(1, 1, x.shape[2], 1) for x in (k_scales, v_scales))
    + out = q.new_empty

    scale_of_the_next_slot: You read the pair of the next slot.
    - slot[:, None] * 2
    + (slot[:, None] + 1) * 2

    pairs_not_counted: There are two numbers for each slot, so slot i's pair begins at 2i.
    - slot[:, None] * 2
    + slot[:, None]

    scales_of_k_for_v: V was read with the scales of K: use the pointer that the hook gets.
    - v_scales,
    - head_dim
    + k_scales,
    + head_dim

    scales_turned: K was read with the scales of V, and V with those of K.
    - k_scales,
    - v_scales,
    - head_dim
    + v_scales,
    + k_scales,
    + head_dim

    unmasked_scales: Scales of unused slots are NaN, and 0 · NaN is NaN: mask the loads of scales,
        too.
    - tl.load(pair, mask=mask, other=0.0)
    + tl.load(pair)
    - tl.load(pair + 1, mask=mask, other=0.0)
    + tl.load(pair + 1)

    unpacks_the_cache: You unpack the whole cache, which is what the smaller cache was to avoid.
    - out = q.new_empty
    + unpacked = [torch.stack([x & 15, x >> 4], -1).float() for x in (k_cache, v_cache)]
    + out = q.new_empty

    lowest_is_1_where_nothing_is: Values that the mask leaves out must be 0: both numbers of a slot
        need other=0.
    - tl.load(pair + 1, mask=mask, other=0.0)
    + tl.load(pair + 1, mask=mask, other=1.0)
    """,
)


def halves_of(bytes):
    """[…, D / 2] uint8 -> […, D] codes."""
    return torch.stack([bytes & 15, bytes >> 4], -1).flatten(-2)


def in_pytorch(q, k_cache, v_cache, k_scales, v_scales, block_table, context_lens):
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


attacks(answers, "19.4", in_pytorch)


@triton.jit
def values_of(cache, scales, row, slot, column, mask):
    """Of one key: its codes by division, and its pair of numbers."""
    byte = tl.load(cache + row + column // 2, mask=mask, other=0).to(tl.int32)
    code = tl.where(column % 2 == 0, byte % 16, byte // 16).to(tl.float32)
    value = code * tl.load(scales + 2 * slot) + tl.load(scales + 2 * slot + 1)
    return tl.where(mask, value, 0.0)


@triton.jit
def key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    num_slots,
    max_blocks,
    stride_kblock,
    stride_kn,
    stride_kh,
    stride_vblock,
    stride_vn,
    stride_vh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program for each query head, which goes key by key."""
    b, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    at, inside, own = (b * tl.num_programs(1) + head) * HEAD_DIM + d, d < HEAD_DIM, head // GROUP
    q = tl.load(q_ptr + at, mask=inside, other=0.0) / tl.sqrt(HEAD_DIM * 1.0)
    k_scales_ptr += own * num_slots * 2
    v_scales_ptr += own * num_slots * 2
    m, l, acc = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for key in range(0, tl.load(lens_ptr + b)):
        block = tl.load(table_ptr + b * max_blocks + key // PAGE_SIZE).to(tl.int64)
        slot = block * PAGE_SIZE + key % PAGE_SIZE
        row = block * stride_kblock + key % PAGE_SIZE * stride_kn + own * stride_kh
        score = tl.sum(q * values_of(k_ptr, k_scales_ptr, row, slot, d, inside), axis=0)
        new = tl.maximum(m, score)
        alpha, p = tl.exp(m - new), tl.exp(score - new)
        row = block * stride_vblock + key % PAGE_SIZE * stride_vn + own * stride_vh
        acc = acc * alpha + p * values_of(v_ptr, v_scales_ptr, row, slot, d, inside)
        l, m = l * alpha + p, new
    tl.store(out_ptr + at, acc / tl.maximum(l, 1e-30), mask=inside)


@answers.alternative("19.4")
def key_by_key(q, k_cache, v_cache, k_scales, v_scales, block_table, context_lens):
    out = torch.empty_like(q)
    key_kernel[q.shape[:2]](
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_table,
        context_lens,
        out,
        k_scales.shape[1] * k_scales.shape[2],
        block_table.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=q.shape[1] // k_cache.shape[2],
        HEAD_DIM=q.shape[2],
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_D=triton.next_power_of_2(q.shape[2]),
    )
    return out


@triton.jit
def halves_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    num_slots,
    max_blocks,
    stride_kblock,
    stride_kn,
    stride_kh,
    stride_vblock,
    stride_vn,
    stride_vh,
    GROUP: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A page is a tile. Even and odd values apart, so each byte is loaded once, and no value is
    made: q · (code · scale + lowest) = scale · (q · code) + lowest · Σ q, and likewise for V.
    """
    b, head = tl.program_id(0), tl.program_id(1)
    i, n, own = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N), head // GROUP
    at, inside = (b * tl.num_programs(1) + head) * HALF_DIM * 2 + 2 * i, i < HALF_DIM
    root = tl.sqrt(HALF_DIM * 2.0)
    q_even = tl.load(q_ptr + at, mask=inside, other=0.0) / root
    q_odd = tl.load(q_ptr + at + 1, mask=inside, other=0.0) / root
    q_sum = tl.sum(q_even + q_odd, axis=0)
    length = tl.load(lens_ptr + b)
    m, l, shared = -float("inf"), 0.0, 0.0
    even, odd = tl.zeros((BLOCK_H,), tl.float32), tl.zeros((BLOCK_H,), tl.float32)
    for page in range(0, tl.cdiv(length, PAGE_SIZE)):
        block = tl.load(table_ptr + b * max_blocks + page).to(tl.int64)
        held = (n < PAGE_SIZE) & (page * PAGE_SIZE + n < length)
        mask = held[:, None] & inside[None, :]
        pair = (own * num_slots + block * PAGE_SIZE + n) * 2
        k_at = block * stride_kblock + n[:, None] * stride_kn + own * stride_kh + i[None, :]
        k = tl.load(k_ptr + k_at, mask=mask, other=0)
        low, high = (k & 15).to(tl.float32), (k >> 4).to(tl.float32)
        product = tl.sum(low * q_even[None, :] + high * q_odd[None, :], axis=1)
        scores = product * tl.load(k_scales_ptr + pair, mask=held, other=0.0)
        scores += q_sum * tl.load(k_scales_ptr + pair + 1, mask=held, other=0.0)
        scores = tl.where(held, scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, axis=0))
        alpha, p = tl.exp(m - new), tl.exp(scores - new)
        v_at = block * stride_vblock + n[:, None] * stride_vn + own * stride_vh + i[None, :]
        v = tl.load(v_ptr + v_at, mask=mask, other=0)
        weight = (p * tl.load(v_scales_ptr + pair, mask=held, other=0.0))[:, None]
        even = even * alpha + tl.sum(weight * (v & 15).to(tl.float32), axis=0)
        odd = odd * alpha + tl.sum(weight * (v >> 4).to(tl.float32), axis=0)
        lowest = tl.load(v_scales_ptr + pair + 1, mask=held, other=0.0)
        shared = shared * alpha + tl.sum(p * lowest, axis=0)
        l, m = l * alpha + tl.sum(p, axis=0), new
    divisor = tl.maximum(l, 1e-30)
    tl.store(out_ptr + at, (even + shared) / divisor, mask=inside)
    tl.store(out_ptr + at + 1, (odd + shared) / divisor, mask=inside)


@answers.alternative("19.4")
def halves_apart(q, k_cache, v_cache, k_scales, v_scales, block_table, context_lens):
    out, size = torch.empty_like(q), k_cache.shape[1]
    halves_kernel[q.shape[:2]](
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_table,
        context_lens,
        out,
        k_scales.shape[1] * size,
        block_table.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=q.shape[1] // k_cache.shape[2],
        HALF_DIM=k_cache.shape[3],
        PAGE_SIZE=size,
        BLOCK_N=triton.next_power_of_2(size),
        BLOCK_H=triton.next_power_of_2(k_cache.shape[3]),
    )
    return out
