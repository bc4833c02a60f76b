"""The kernels of fused.py: a token for each row of logits [B, V], without a sort.

Read them in the order of their launches. A row is cut into parts, one program each, because one
program alone would take the whole row's latency.

    tile_maxima_kernel   reads the logits: the largest of every TILE tokens
    weigh_kernel         reads them again: each part's mass, and the few tokens that a cut may keep
    draw_kernel          reads these few, finds the cut, and reads the one part that is drawn from

A token's weight is exp((x - largest x) / temperature), counted in units of 2^-40. Sums of integers
do not depend on their order. So a row gives the same token however many parts it is cut into, and a
running sum never ends beside the sum that it is compared with.
"""

from lessons.toolbox.kernels.triton_ import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(2.0**40)  # units of the likeliest token; 2^22 tokens of it still fit in int64
COLDEST, HOTTEST = tl.constexpr(1e-30), tl.constexpr(1e30)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # these three as in random_streams.py
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
SLACK = tl.constexpr(1 - 2.0**-10)  # far more than a float32 sum of the tile maxima is off by
LARGEST_INT, SMALLEST_INT = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))
BAD_LOGITS = tl.constexpr(-1)

# ---------------------------------------------------------------- what they share


@triton.jit
def settings(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """A row's numbers: 1 / temperature for exp2, top_k, top_p, min_p; and whether it is greedy."""
    temperature = tl.load(temperature_ptr + row)
    clamped = tl.minimum(tl.maximum(temperature, COLDEST), HOTTEST)
    scale = (1.0 / tl.where(temperature > 0, clamped, 1.0) * LOG2E).to(tl.float32)
    top_k = tl.minimum(tl.load(top_k_ptr + row), LARGEST_INT).to(tl.int32)  # inf: all tokens
    min_p = tl.load(min_p_ptr + row).to(tl.float32)
    return scale, top_k, tl.load(top_p_ptr + row), min_p, temperature <= 0


@triton.jit
def load_scores(scores_row, ids, vocab_size):
    """Some logits of a row in float32; -inf after the vocabulary's end. -0 becomes 0, its equal."""
    x = tl.load(scores_row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def weight_of(x, highest, scale):
    """The probability of x, relative to that of the likeliest token."""
    return tl.where(x == highest, 1.0, tl.exp2((x - highest) * scale))


@triton.jit
def units_of(x, highest, scale, min_p):
    """The weight in whole units, and 0 where min-p cuts."""
    weight = weight_of(x, highest, scale)
    units = (weight * UNIT + 0.5).to(tl.int64)
    return tl.where(weight >= min_p, units, 0)


@triton.jit
def key_of(x):
    """An int32 that orders as x does: the bits of a negative float fall as it rises."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ LARGEST_INT)


@triton.jit
def float_of(key):
    """What key_of made the key from."""
    bits = tl.where(key >= 0, key, key ^ LARGEST_INT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def random_bits(stream, drawn):
    """The 53 bits of random_streams.uniform, at the top of 64."""
    x = stream.to(tl.uint64) + (drawn + 1).to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * FIRST_FACTOR
    x = (x ^ (x >> 27)) * SECOND_FACTOR
    x = x ^ (x >> 31)
    return (x >> 11) << 11


# ---------------------------------------------------------------- the two passes over [B, V]


@triton.jit
def tile_maxima_kernel(
    scores_ptr, maxima_ptr, vocab_size, stride_s, TILES: tl.constexpr, TILE: tl.constexpr
):
    """A program for a part of a row, TILES · TILE tokens: the largest of each tile."""
    row, part = tl.program_id(0), tl.program_id(1)
    tiles = part * TILES + tl.arange(0, TILES)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = load_scores(scores_ptr + row.to(tl.int64) * stride_s, ids, vocab_size)
    x = tl.where(x == x, x, float("inf"))  # a maximum passes over NaN, and inf is refused too
    tl.store(maxima_ptr + row * tl.num_programs(1) * TILES + tiles, tl.max(x, axis=1))


@triton.jit
def pivots(maxima, highest, scale, top_k, top_p, vocab_size):
    """Lower bounds of what top-k and top-p keep, from the maxima of the tiles: (a key, a weight).

    At least k tokens are as large as the k-th largest maximum. And the tokens that weigh less than
    (1 - p) · Z / V weigh together no more than top-p leaves out, if all weigh Z or more.
    """
    key = tl.full((), SMALLEST_INT, tl.int32)
    weight = tl.zeros((), tl.float32)
    if top_k < vocab_size:
        keys = key_of(maxima)
        key = tl.where(tl.sum((keys >= 0).to(tl.int32), axis=0) >= top_k, 0, key)
        for step in range(15):  # half of the bits, because a bound need not be the best
            higher = key + (1 << (30 - step))
            is_enough = tl.sum((keys >= higher).to(tl.int32), axis=0) >= top_k
            key = tl.where(is_enough, higher, key)
    else:  # with top-k, p is a share of a mass that is not known yet
        mass = tl.sum(weight_of(maxima, highest, scale), axis=0)
        weight = (1.0 - top_p).to(tl.float32) * mass * SLACK / vocab_size
    return key, weight


@triton.jit
def weigh_kernel(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    masses_ptr,
    counts_ptr,
    candidates_ptr,
    vocab_size,
    num_tiles,
    stride_s,
    PART: tl.constexpr,
    ALL_TILES: tl.constexpr,
):
    """A program for a part of a row: the units that it weighs, and its tokens that may be kept."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale, top_k, top_p, min_p, _ = settings(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    tiles = tl.arange(0, ALL_TILES)
    maxima = tl.load(
        maxima_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")
    )
    highest = tl.max(maxima, axis=0)
    x = load_scores(scores_ptr + row * stride_s, part * PART + tl.arange(0, PART), vocab_size)
    units = units_of(x, highest, scale, min_p)
    cell = row * tl.num_programs(1) + part
    tl.store(masses_ptr + cell, tl.sum(units, axis=0))
    if (top_k < vocab_size) | (top_p < 1):
        key, weight = pivots(maxima, highest, scale, top_k, top_p, vocab_size)
        may_stay = (units > 0) & (key_of(x) >= key) & (weight_of(x, highest, scale) >= weight)
        place = tl.cumsum(may_stay.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + cell * PART + place, x, mask=may_stay)
        tl.store(counts_ptr + cell, tl.sum(may_stay.to(tl.int32), axis=0))


# ---------------------------------------------------------------- the cut


@triton.jit
def load_candidates(list_ptr, counts, start, PART: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr):
    """Some candidates of every part, [PARTS, COLS]; -inf after the end of a part's list."""
    columns = start + tl.arange(0, COLS)[None, :]
    at = tl.arange(0, PARTS)[:, None] * PART + columns
    return tl.load(list_ptr + at, mask=columns < counts[:, None], other=float("-inf"))


@triton.jit
def lowest_kept(
    list_ptr,
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
    """The largest x for which the candidates from x on are `wanted` or more, as a number of tokens
    or, if WEIGHTED, in units. -inf if all together are fewer.

    Keys are in the order of x, so the key of x is found bit by bit, as in batch_cuts.lowest_kept.
    """
    longest = tl.max(counts, axis=0)
    cut = tl.full((), SMALLEST_INT, tl.int32)
    for step in range(32):
        # the sign first, whose bit says the opposite
        higher = tl.where(step == 0, 0, cut + (1 << (31 - tl.maximum(step, 1))))
        reached = tl.zeros((PARTS, COLS), tl.int64)
        for start in range(0, longest, COLS):
            x = load_candidates(list_ptr, counts, start, PART, PARTS, COLS)
            worth = units_of(x, highest, scale, min_p) if WEIGHTED else (x > float("-inf")).to(tl.int64)
            reached += tl.where(key_of(x) >= higher, worth, 0)
        cut = tl.where(tl.sum(tl.sum(reached, axis=1), axis=0) >= wanted, higher, cut)
    return tl.where(cut == SMALLEST_INT, float("-inf"), float_of(cut))


@triton.jit
def mass_from(
    list_ptr, counts, cut, highest, scale, min_p, PART: tl.constexpr, PARTS: tl.constexpr, COLS: tl.constexpr
):
    """Of each part: the units of its candidates above the cut, and the number of those that equal
    it, both [PARTS] int64.
    """
    above = tl.zeros((PARTS, COLS), tl.int64)
    ties = tl.zeros((PARTS, COLS), tl.int64)
    for start in range(0, tl.max(counts, axis=0), COLS):
        x = load_candidates(list_ptr, counts, start, PART, PARTS, COLS)
        above += tl.where(x > cut, units_of(x, highest, scale, min_p), 0)
        ties += (x == cut).to(tl.int64)
    return tl.sum(above, axis=1), tl.sum(ties, axis=1)


@triton.jit
def shares_of_parts(
    list_ptr,
    counts,
    mass,
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
    """Where top-k and top-p cut a row of so many units: the lowest x that stays; of each part, how
    many of its tokens that equal it stay, and the units of all that stay, both [PARTS] int64.
    """
    cut = tl.full((), float("-inf"), tl.float32)
    if top_k < vocab_size:
        cut = lowest_kept(list_ptr, counts, top_k, highest, scale, min_p, False, PART, PARTS, COLS)
        above, ties = mass_from(list_ptr, counts, cut, highest, scale, min_p, PART, PARTS, COLS)
        mass = tl.sum(above + ties * units_of(cut, highest, scale, min_p), axis=0)
    wanted = mass
    if top_p < 1:
        wanted = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
        cut = lowest_kept(list_ptr, counts, wanted, highest, scale, min_p, True, PART, PARTS, COLS)
    above, ties = mass_from(list_ptr, counts, cut, highest, scale, min_p, PART, PARTS, COLS)
    each = tl.maximum(units_of(cut, highest, scale, min_p), 1)
    # Of equal tokens at the cut the first ones stay, as many as it takes.
    number = (wanted - tl.sum(above, axis=0) + each - 1) // each
    in_front = tl.cumsum(ties, axis=0) - ties
    ties = tl.minimum(tl.maximum(number - in_front, 0), ties)
    return cut, ties, above + ties * each


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
    candidates_ptr,
    tokens_ptr,
    vocab_size,
    num_tiles,
    num_parts,
    stride_s,
    PART: tl.constexpr,
    TILES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program for a row: its token, by inverse CDF in the order of the ids."""
    row = tl.program_id(0).to(tl.int64)
    scale, top_k, top_p, min_p, is_greedy = settings(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    tiles, parts = tl.arange(0, ALL_TILES), tl.arange(0, PARTS)
    maxima = tl.load(
        maxima_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")
    )
    highest = tl.max(maxima, axis=0)
    cut = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), BAD_LOGITS, tl.int32)
    if (highest > float("-inf")) & (highest < float("inf")):
        cells = row * num_parts + parts
        if is_greedy:
            # its first largest token, as if one unit were all that stays
            cut = highest
            first = tl.min(tl.where(maxima == highest, tiles, num_tiles), axis=0)
            ties = (parts == first // TILES).to(tl.int64)
            units = ties
        else:
            ties = tl.zeros((PARTS,), tl.int64)
            units = tl.load(masses_ptr + cells, mask=parts < num_parts, other=0)
            if (top_k < vocab_size) | (top_p < 1):
                cut, ties, units = shares_of_parts(
                    candidates_ptr + row * num_parts * PART,
                    tl.load(counts_ptr + cells, mask=parts < num_parts, other=0),
                    tl.sum(units, axis=0),
                    top_k,
                    top_p,
                    vocab_size,
                    highest,
                    scale,
                    min_p,
                    PART,
                    PARTS,
                    COLS,
                )
        bits = random_bits(tl.load(stream_ptr + row), tl.load(drawn_ptr + row))
        # floor(u · units), exactly: below the number of units for every u below 1
        target = tl.umulhi(bits, tl.sum(units, axis=0).to(tl.uint64)).to(tl.int64)
        part = tl.sum((tl.cumsum(units, axis=0) <= target).to(tl.int32), axis=0)
        target -= tl.sum(tl.where(parts < part, units, 0), axis=0)
        ties_here = tl.sum(tl.where(parts == part, ties, 0), axis=0)
        token = drawn_from_part(
            scores_ptr + row * stride_s,
            part,
            target,
            cut,
            ties_here,
            highest,
            scale,
            min_p,
            vocab_size,
            PART,
        )
    tl.store(tokens_ptr + row, token.to(tl.int64))


# ---------------------------------------------------------------- penalties


@triton.jit
def penalize_kernel(
    logits_ptr,
    scores_ptr,
    tokens_ptr,
    counts_ptr,
    distinct_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    width,
    stride_l,
    stride_s,
    BLOCK: tl.constexpr,
):
    """A program for some of a row's seen tokens: SeenTokens.penalize_, from logits to scores. Two
    places of the list may hold one token: both write the same.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < tl.minimum(width, tl.load(distinct_ptr + row))
    token = tl.load(tokens_ptr + row * width + places, mask=inside, other=0)
    count = tl.load(counts_ptr + row * width + places, mask=inside, other=0)
    repetition = tl.load(repetition_ptr + row).to(tl.float32)
    presence = tl.load(presence_ptr + row).to(tl.float32)
    frequency = tl.load(frequency_ptr + row).to(tl.float32)
    x = tl.load(logits_ptr + row * stride_l + token, mask=inside, other=0.0).to(tl.float32)
    # A negative logit is multiplied, because dividing it would make the token likelier.
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = x - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    tl.store(scores_ptr + row * stride_s + token, x, mask=inside)
