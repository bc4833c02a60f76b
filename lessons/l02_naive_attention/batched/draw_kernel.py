"""The last launch of fused.py: a program for a row finds the cut in the row's lists, and draws.

The lists are short, so a program may walk through them often: once for each step of a bisection.
`lowest_kept` finds where top-k or top-p cuts, `shares_of_parts` what stays of each part, and
`drawn_from_part` the token.
"""

from lessons.l02_naive_attention.batched.kernel_math import (
    BAD_LOGITS,
    LARGEST_INT,
    float_of,
    key_of,
    largest_of_row,
    load_scores,
    random_bits,
    settings,
    units_of,
)
from lessons.toolbox.kernels.triton_ import tl, triton

# ---------------------------------------------------------------- the cut


@triton.jit
def load_lists(
    lists_row, counts, start, PART: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr
):
    """Some places of each part's list, -inf after its end, and whether a token is there: [PARTS,
    COLS] twice.
    """
    columns = start + tl.arange(0, COLS)[None, :]
    is_token = columns < counts[:, None]
    at = tl.arange(0, PARTS)[:, None] * PART + columns
    return tl.load(lists_row + at, mask=is_token, other=float("-inf")), is_token


@triton.jit
def lowest_kept(
    lists_row,
    counts,
    wanted,
    highest,
    scale,
    min_p,
    WEIGHTED: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The largest x from which on the listed tokens are `wanted` or more: tokens, or if WEIGHTED
    units. The lowest x of the lists if all together are fewer.

    Keys are in the order of x, so the key of x is found by bisection. After each step both ends are
    keys of the lists, so it takes about log2 of their length.
    """
    longest = tl.max(counts, axis=0)
    low = tl.full((), LARGEST_INT, tl.int32)
    high = -low
    for start in range(0, longest, COLS):
        x, is_token = load_lists(lists_row, counts, start, PART, PARTS, COLS)
        keys = key_of(x)
        low = tl.minimum(low, tl.min(tl.where(is_token, keys, LARGEST_INT)))
        high = tl.maximum(high, tl.max(keys))
    while low < high:
        # int64, because the keys of two floats may lie 2^32 apart
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        reached = tl.zeros((PARTS, COLS), tl.int64)
        above = tl.full((PARTS, COLS), LARGEST_INT, tl.int32)
        below = -above
        for start in range(0, longest, COLS):
            x, is_token = load_lists(lists_row, counts, start, PART, PARTS, COLS)
            worth = is_token.to(tl.int64)
            if WEIGHTED:
                worth = units_of(x, highest, scale, min_p)
            keys = key_of(x)
            reached += tl.where(keys >= middle, worth, 0)
            above = tl.minimum(above, tl.where(keys >= middle, keys, LARGEST_INT))
            below = tl.maximum(below, tl.where(keys < middle, keys, -LARGEST_INT))
        is_enough = tl.sum(reached) >= wanted
        low = tl.where(is_enough, tl.min(above), low)
        high = tl.where(is_enough, high, tl.max(below))
    return float_of(low)


@triton.jit
def mass_above(
    lists_row,
    counts,
    cut,
    highest,
    scale,
    min_p,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Of each part's list: the units above the cut, and how many tokens equal it. [PARTS] int64
    twice.
    """
    above = tl.zeros((PARTS, COLS), tl.int64)
    ties = tl.zeros((PARTS, COLS), tl.int64)
    for start in range(0, tl.max(counts, axis=0), COLS):
        x, _ = load_lists(lists_row, counts, start, PART, PARTS, COLS)
        above += tl.where(x > cut, units_of(x, highest, scale, min_p), 0)
        ties += (x == cut).to(tl.int64)
    return tl.sum(above, axis=1), tl.sum(ties, axis=1)


@triton.jit
def shares_of_parts(
    lists_row,
    counts,
    masses,
    above_band,
    top_k,
    top_p,
    vocab_size,
    highest,
    scale,
    min_p,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Where top-k and top-p cut: the lowest x that stays; of each part, how many tokens that equal
    it stay, and the units of all that stay, both [PARTS] int64.
    """
    everywhere = tl.sum(above_band, axis=0)
    wanted = tl.sum(masses, axis=0)
    cut = highest
    if top_k < vocab_size:
        cut = lowest_kept(lists_row, counts, top_k, highest, scale, min_p, False, PART, PARTS, COLS)
        above, ties = mass_above(lists_row, counts, cut, highest, scale, min_p, PART, PARTS, COLS)
        wanted = tl.sum(above + ties * units_of(cut, highest, scale, min_p), axis=0)
    if top_p < 1:
        wanted = tl.ceil(top_p * wanted.to(tl.float64)).to(tl.int64)
        cut = lowest_kept(
            lists_row, counts, wanted - everywhere, highest, scale, min_p, True, PART, PARTS, COLS
        )
    above, ties = mass_above(lists_row, counts, cut, highest, scale, min_p, PART, PARTS, COLS)
    each = tl.maximum(units_of(cut, highest, scale, min_p), 1)
    # Of equal tokens at the cut the first ones stay, as many as it takes.
    number = (wanted - everywhere - tl.sum(above, axis=0) + each - 1) // each
    in_front = tl.cumsum(ties, axis=0) - ties
    ties = tl.minimum(tl.maximum(number - in_front, 0), ties)
    return cut, ties, above_band + above + ties * each


# ---------------------------------------------------------------- the draw


@triton.jit
def drawn_from_part(
    scores_row, part, target, cut, ties, highest, scale, min_p, vocab_size, PART: tl.constexpr
):
    """The first token of a part at which the running sum of what stays exceeds the target."""
    x = load_scores(scores_row, part * PART + tl.arange(0, PART), vocab_size)
    is_tie = x == cut
    stays = (x > cut) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= ties))
    units = tl.where(stays, units_of(x, highest, scale, min_p), 0)
    reached = tl.cumsum(units, axis=0)
    return part * PART + tl.sum((reached <= target).to(tl.int32), axis=0)


@triton.jit
def draw_kernel(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stream_ptr,
    drawn_ptr,
    masses_ptr,
    counts_ptr,
    lists_ptr,
    tokens_ptr,
    vocab_size,
    num_parts,
    stride_s,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program for a row: its token, by inverse CDF in the order of the ids."""
    row = tl.program_id(0).to(tl.int64)
    scale, top_k, top_p, min_p, is_greedy = settings(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    maxima, highest = largest_of_row(maxima_ptr, row, num_parts, PARTS)
    parts = tl.arange(0, PARTS)
    cells, is_part = row * num_parts + parts, parts < num_parts
    token = tl.full((), BAD_LOGITS, tl.int32)
    if (highest > float("-inf")) & (highest < float("inf")):
        # Greedy: the first of the largest stays, as if it were one unit.
        cut = tl.where(is_greedy, highest, float("-inf"))
        first = tl.min(tl.where(maxima == highest, parts, num_parts), axis=0)
        ties = (parts == tl.where(is_greedy, first, PARTS)).to(tl.int64)
        units = ties
        if not is_greedy:
            units = tl.load(masses_ptr + 2 * cells, mask=is_part, other=0)
            if (top_k < vocab_size) | (top_p < 1):
                cut, ties, units = shares_of_parts(
                    lists_ptr + row * num_parts * PART,
                    tl.load(counts_ptr + cells, mask=is_part, other=0),
                    units,
                    tl.load(masses_ptr + 2 * cells + 1, mask=is_part, other=0),
                    top_k, top_p, vocab_size, highest, scale, min_p,
                    PART, PARTS, COLS,
                )  # fmt: skip
        bits = random_bits(tl.load(stream_ptr + row), tl.load(drawn_ptr + row))
        # floor(u · units), exactly: below the number of units for every u below 1
        target = tl.umulhi(bits, tl.sum(units, axis=0).to(tl.uint64)).to(tl.int64)
        part = tl.sum((tl.cumsum(units, axis=0) <= target).to(tl.int32), axis=0)
        target -= tl.sum(tl.where(parts < part, units, 0), axis=0)
        ties_here = tl.sum(tl.where(parts == part, ties, 0), axis=0)
        scores_row = scores_ptr + row * stride_s
        token = drawn_from_part(
            scores_row, part, target, cut, ties_here, highest, scale, min_p, vocab_size, PART
        )
    tl.store(tokens_ptr + row, token.to(tl.int64))
