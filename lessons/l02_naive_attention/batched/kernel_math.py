"""What the kernels of fused.py share: a row's settings, what a token weighs, the random number.

A token's weight is exp((x - largest x) / temperature), counted in units of 2^-40. Sums of integers
do not depend on their order. So a row gives the same token however many parts it is cut into, and
sums that should be equal are.
"""

from lessons.toolbox.kernels.triton_ import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(2.0**40)  # units of the likeliest token; 2^22 tokens of it still fit in int64
COLDEST = tl.constexpr(1e-30)  # below, a temperature would leave the range of float32
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # these three as in random_streams.py
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
LARGEST_INT = tl.constexpr(2**31 - 1)
BAD_LOGITS = tl.constexpr(-1)

# ---------------------------------------------------------------- a row


@triton.jit
def settings(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr):
    """A row's numbers: log2(e) / temperature, top_k, top_p, min_p; and whether it is greedy."""
    temperature = tl.load(temperature_ptr + row)
    clamped = tl.maximum(temperature, COLDEST)
    scale = (1.0 / tl.where(temperature > 0, clamped, 1.0) * LOG2E).to(tl.float32)
    top_k = tl.minimum(tl.load(top_k_ptr + row), LARGEST_INT).to(tl.int32)  # inf: all tokens
    min_p = tl.load(min_p_ptr + row).to(tl.float32)
    return scale, top_k, tl.load(top_p_ptr + row), min_p, temperature <= 0


@triton.jit
def largest_of_row(maxima_ptr, row, num_parts, PARTS: tl.constexpr):
    """The maxima of a row's parts, [PARTS], and the largest; NaN counts as inf."""
    parts = tl.arange(0, PARTS)
    at = maxima_ptr + row * num_parts + parts
    maxima = tl.load(at, mask=parts < num_parts, other=float("-inf"))
    return maxima, tl.max(maxima, axis=0)


@triton.jit
def load_scores(scores_row, ids, vocab_size):
    """Some logits of a row in float32; -inf after the vocabulary's end."""
    return tl.load(scores_row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def weights_of(x, highest, scale, min_p):
    """log2 of the probabilities relative to the likeliest one, and these; 0 where min-p cuts."""
    height = (x - highest) * scale
    weight = tl.where(height == 0.0, 1.0, tl.exp2(height))  # exp2 of 0 may be a bit below 1
    return height, tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def units_of(x, highest, scale, min_p):
    """The same weights as whole numbers of units."""
    _, weight = weights_of(x, highest, scale, min_p)
    return (weight * UNIT + 0.5).to(tl.int64)


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
