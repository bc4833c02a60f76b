"""The kernels of fused.py: a token for each row of logits [B, V], without a sort.

Read them in the order of their launches. A row is cut into parts, a program for each, because a
single program would need the time of the whole row. Four launches read the logits:

    largest_kernel   the largest of each part
    bands_kernel     about how much is above each of 16 heights, so one band must hold the cut
    narrow_kernel    the same once more, inside that band
    lists_kernel     each part's exact mass above the narrow band, and a list of its tokens inside
    draw_kernel      finds the cut in the lists, and reads the one part that it draws from

draw_kernel is in draw_kernel.py. What a token weighs is in kernel_math.py.
"""

from lessons.l02_naive_attention.batched.kernel_math import (
    UNIT,
    largest_of_row,
    load_scores,
    settings,
    weights_of,
)
from lessons.toolbox.kernels.triton_ import tl, triton

NO_UNIT = tl.constexpr(2.0**-41)  # a weight that rounds to no unit
BANDS = tl.constexpr(16)
NO_HEIGHT = tl.constexpr(-42.0)  # log2 of half of it
SLACK = tl.constexpr(2.0**-16)  # ten times what the bands' float32 sums are off by
EDGE = tl.constexpr(2.0**-12)  # more than two kernels may differ in where a band begins

# ---------------------------------------------------------------- passes over [B, V]


@triton.jit
def largest_kernel(scores_ptr, maxima_ptr, vocab_size, stride_s, PART: tl.constexpr):
    """A program for a part of a row: its largest logit."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = load_scores(scores_ptr + row * stride_s, part * PART + tl.arange(0, PART), vocab_size)
    x = tl.where(x == x, x, float("inf"))  # a maximum passes over NaN, and inf is refused too
    tl.store(maxima_ptr + row * tl.num_programs(1) + part, tl.max(x, axis=0))


@triton.jit
def whole_range(top_k, top_p, vocab_size):
    """The heights, log2 of the weights, between which any cut must be: (low, high).

    With top-k from where a token has no unit. With top-p alone from (1 - p) / V, or half of it for
    the sake of rounding: the likeliest token weighs 1, so all tokens below weigh together less than
    top-p leaves out.
    """
    share = tl.where(top_k < vocab_size, 0.0, (1.0 - top_p).to(tl.float32)) / (2 * vocab_size)
    return tl.log2(tl.maximum(share, NO_UNIT)), 0.0


@triton.jit
def begin_of(band, low, high):
    """The height at which a band begins: the first at `high`, the last but one at `low`. The last
    one has no end.
    """
    height = high + (low - high) * band / (BANDS - 2)
    return tl.where(band < BANDS - 1, height, float("-inf"))


@triton.jit
def store_bands(
    bands_ptr,
    scores_row,
    part,
    highest,
    scale,
    min_p,
    low,
    high,
    top_k,
    vocab_size,
    PART: tl.constexpr,
):
    """The mass of a part from each band's begin on, or with top-k the number of its tokens, in
    float32.
    """
    x = load_scores(scores_row, part * PART + tl.arange(0, PART), vocab_size)
    height, worth = weights_of(x, highest, scale, min_p)
    worth = tl.where((top_k < vocab_size) & (worth > 0), 1.0, worth)
    for band in tl.static_range(BANDS):
        is_above = height >= begin_of(band, low, high)
        tl.store(bands_ptr + band, tl.sum(tl.where(is_above, worth, 0.0), axis=0))


@triton.jit
def bands_kernel(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bands_ptr,
    vocab_size,
    stride_s,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program for a part of a row: what is above each band's begin. bands_ptr: [B, parts,
    BANDS].
    """
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    scale, top_k, top_p, min_p, is_greedy = settings(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    if ((top_k < vocab_size) | (top_p < 1)) & (not is_greedy):
        _, highest = largest_of_row(maxima_ptr, row, num_parts, PARTS)
        low, high = whole_range(top_k, top_p, vocab_size)
        out = bands_ptr + (row * num_parts + part) * BANDS
        scores_row = scores_ptr + row * stride_s
        store_bands(
            out, scores_row, part, highest, scale, min_p, low, high, top_k, vocab_size, PART
        )


@triton.jit
def band_of_cut(
    bands_ptr, row, num_parts, low, high, top_k, top_p, vocab_size, PARTS: tl.constexpr
):
    """The heights between which a row's cut must be, out of the bands between low and high."""
    parts, bands = tl.arange(0, PARTS)[:, None], tl.arange(0, BANDS)
    at = bands_ptr + (row * num_parts + parts) * BANDS + bands[None, :]
    reached = tl.sum(tl.load(at, mask=parts < num_parts, other=0.0), axis=0)
    begins = tl.maximum(begin_of(bands, low, high), NO_HEIGHT)
    total = top_p.to(tl.float32) * tl.max(reached, axis=0)
    wanted = tl.where(top_k < vocab_size, top_k.to(tl.float32), total)
    is_enough = reached >= wanted * (1 + SLACK)
    is_short = reached <= wanted * (1 - SLACK)
    enough = tl.max(tl.where(is_enough, begins, NO_HEIGHT), axis=0)
    short = tl.min(tl.where(is_short, begins, high), axis=0)
    return enough - EDGE, short + EDGE


@triton.jit
def narrow_kernel(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bands_ptr,
    ranges_ptr,
    narrow_ptr,
    vocab_size,
    stride_s,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """bands_kernel for the band that holds the cut, which is cut into bands again. narrow_ptr: [B,
    parts, BANDS]; ranges_ptr: [B, parts, 2], the heights between which they are.
    """
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    scale, top_k, top_p, min_p, is_greedy = settings(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    if ((top_k < vocab_size) | (top_p < 1)) & (not is_greedy):
        _, highest = largest_of_row(maxima_ptr, row, num_parts, PARTS)
        low, high = whole_range(top_k, top_p, vocab_size)
        low, high = band_of_cut(
            bands_ptr, row, num_parts, low, high, top_k, top_p, vocab_size, PARTS
        )
        cell = row * num_parts + part
        tl.store(ranges_ptr + 2 * cell, low)
        tl.store(ranges_ptr + 2 * cell + 1, high)
        out, scores_row = narrow_ptr + cell * BANDS, scores_ptr + row * stride_s
        store_bands(
            out, scores_row, part, highest, scale, min_p, low, high, top_k, vocab_size, PART
        )


@triton.jit
def lists_kernel(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    ranges_ptr,
    narrow_ptr,
    masses_ptr,
    counts_ptr,
    lists_ptr,
    vocab_size,
    stride_s,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program for a part of a row: its units, those above the band, and a list of its tokens in
    the band. masses_ptr: [B, parts, 2], counts_ptr: [B, parts], lists_ptr: [B, parts, PART].
    """
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    scale, top_k, top_p, min_p, is_greedy = settings(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    _, highest = largest_of_row(maxima_ptr, row, num_parts, PARTS)
    if (highest > float("-inf")) & (highest < float("inf")) & (not is_greedy):
        x = load_scores(scores_ptr + row * stride_s, part * PART + tl.arange(0, PART), vocab_size)
        height, weight = weights_of(x, highest, scale, min_p)
        units = (weight * UNIT + 0.5).to(tl.int64)
        cell = row * num_parts + part
        tl.store(masses_ptr + 2 * cell, tl.sum(units, axis=0))
        if (top_k < vocab_size) | (top_p < 1):
            low, high = tl.load(ranges_ptr + 2 * cell), tl.load(ranges_ptr + 2 * cell + 1)
            low, high = band_of_cut(
                narrow_ptr, row, num_parts, low, high, top_k, top_p, vocab_size, PARTS
            )
            # With top-k all above is listed, because top-p may cut there.
            high = tl.where(top_k < vocab_size, float("inf"), high)
            above = tl.where(height >= high, units, 0)
            tl.store(masses_ptr + 2 * cell + 1, tl.sum(above, axis=0))
            is_inside = (units > 0) & (height >= low) & (height < high)
            place = tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
            tl.store(lists_ptr + cell * PART + place, x, mask=is_inside)
            tl.store(counts_ptr + cell, tl.sum(is_inside.to(tl.int32), axis=0))


# ---------------------------------------------------------------- penalties


@triton.jit
def penalize_kernel(
    scores_ptr,
    tokens_ptr,
    counts_ptr,
    distinct_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    width,
    stride_s,
    BLOCK: tl.constexpr,
):
    """A program for some of a row's seen tokens: SeenTokens.penalize_, in place."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # What follows the distinct tokens repeats the first, and no token may be penalized twice.
    inside = places < tl.minimum(width, tl.load(distinct_ptr + row))
    token = tl.load(tokens_ptr + row * width + places, mask=inside, other=0)
    count = tl.load(counts_ptr + row * width + places, mask=inside, other=0)
    repetition = tl.load(repetition_ptr + row).to(tl.float32)
    presence = tl.load(presence_ptr + row).to(tl.float32)
    frequency = tl.load(frequency_ptr + row).to(tl.float32)
    x = tl.load(scores_ptr + row * stride_s + token, mask=inside, other=0.0)
    # A negative logit is multiplied, because dividing it would make the token likelier.
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = x - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    tl.store(scores_ptr + row * stride_s + token, x, mask=inside)
