"""The products of mxfp4.py: codes of 4 bits leave memory as codes, and become numbers in registers.

- **A number is its bits.** The three bits below the sign, moved to where bfloat16 has the end of
  its exponent and the beginning of its mantissa, are the number times 2⁻¹²⁶. Two products by powers
  of two make it the weight. All of it is exact in bfloat16, whose exponent is as wide as E8M0, so x
  has to be bfloat16 as well.
- **Two codes at once.** A thread takes 32 bits, eight codes. One shift and one mask move two of
  them, 16 bits apart, into place. They are no neighbours, so x is reordered instead of the weights.
- **Weights on the left.** They come out of registers, and Hopper's matrix unit takes the left one of
  its two matrices from there. So a tile is computed as W · xᵀ.
"""

from torch import Tensor

from lessons.l23_experts.kernels import rows_of_tile
from lessons.toolbox.kernels.triton_ import tl, triton


def interleaved(x: Tensor) -> Tensor:
    """Of each eight columns of x: [T, K] 0, 4, 1, 5, 2, 6, 3, 7. The kernels take the codes of a
    32-bit word two by two, those of columns 0 and 4 first, because one shift moves both into place.
    A sum over columns may have any order, and x is easier to reorder than weights.
    """
    return x.reshape(len(x), x.shape[1] // 8, 2, 4).transpose(2, 3).reshape(x.shape)


@triton.jit
def power_of_two(exponent):
    """2^(exponent − 127) as bfloat16, NaN for 255. exponent: uint8."""
    bits = exponent.to(tl.uint16) << 7
    bits = tl.where(exponent == 0, 0x0040, bits)  # 2^−127 is subnormal
    bits = tl.where(exponent == 255, 0x7FC0, bits)  # NaN
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpacked(words):
    """Eight codes in each of `words`: [BLOCK_N, blocks, 4] int32 -> [BLOCK_N, blocks, 32] bfloat16,
    the numbers times 2^−126, those of a word in the order of `interleaved`.
    """
    words = words.to(tl.uint32, bitcast=True)
    # the sign and the three bits below it, of two codes at once: of columns 0 and 4, then 1 and 5 …
    a = (words << 12) & 0x80008000 | (words << 6) & 0x01C001C0
    b = (words << 8) & 0x80008000 | (words << 2) & 0x01C001C0
    c = (words << 4) & 0x80008000 | (words >> 2) & 0x01C001C0
    d = words & 0x80008000 | (words >> 6) & 0x01C001C0
    pairs = tl.join(tl.join(a, c), tl.join(b, d))  # the last two places of a: 0, 0; of b: 0, 1
    both = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return tl.reshape(both.to(tl.bfloat16, bitcast=True), (words.shape[0], words.shape[1], 32))


@triton.jit
def load_exponents(exponent_column, start, size, outputs, is_n, BLOCK_K: tl.constexpr):
    """Those of columns start …: [BLOCK_K / 32, BLOCK_N] uint8. exponent_column: where the first of
    each row of the matrix is, [1, BLOCK_N]; that of the next block is `outputs` further.
    """
    block = start // 32 + tl.arange(0, BLOCK_K // 32)[:, None]
    return tl.load(
        exponent_column + block * outputs, mask=is_n[None, :] & (block < size // 32), other=127
    )


@triton.jit
def load_weights(word_row, exponents, start, size, is_n, BLOCK_K: tl.constexpr):
    """Columns start … of rows of a matrix: [BLOCK_N, BLOCK_K] bfloat16, zeros where it ends.

    word_row: where the rows begin, [BLOCK_N, 1].
    """
    block = start // 32 + tl.arange(0, BLOCK_K // 32)[None, :, None]
    word = block * 4 + tl.arange(0, 4)[None, None, :]
    is_block = is_n[:, None, None] & (block < size // 32)
    tiny = unpacked(tl.load(word_row[:, :, None] + word, mask=is_block, other=0))
    power = tl.trans(power_of_two(exponents))[:, :, None]  # of each block
    # 2^126 first, because the other power may be so small that it would leave nothing of `tiny`
    w = tiny * tl.full((1, 1, 1), 2.0**126, tl.bfloat16) * power
    return tl.reshape(w, (tiny.shape[0], BLOCK_K))


@triton.jit
def sum_of(
    x_row,
    words_ptr,
    exponents_ptr,
    bias_ptr,
    expert,
    is_row,
    n,
    outputs,
    size,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of x · Wᵀ + bias: [BLOCK_M, BLOCK_N] float32. expert: int64; n: [BLOCK_N], rows of its
    matrix.
    """
    is_n = n < outputs
    row = expert * outputs + n
    word_row = words_ptr + row[:, None] * (size // 32 * 4)  # seen to be a multiple of 16 bytes
    exponent_column = exponents_ptr + expert * outputs * (size // 32) + n[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((n.shape[0], BLOCK_M), tl.float32)
    exponents = load_exponents(exponent_column, 0, size, outputs, is_n, BLOCK_K)
    for start in range(0, size, BLOCK_K):
        # a step ahead by hand: a thread's piece is too small for the copies that Triton starts ahead
        ahead = load_exponents(exponent_column, start + BLOCK_K, size, outputs, is_n, BLOCK_K)
        x = tl.load(x_row + start + k, mask=is_row & (start + k < size), other=0.0)
        w = load_weights(word_row, exponents, start, size, is_n, BLOCK_K)
        acc = tl.dot(w, tl.trans(x), acc)
        exponents = ahead
    return tl.trans(acc) + tl.load(bias_ptr + row, mask=is_n, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_pairs"])
def mxfp4_gate_up_kernel(
    x_ptr,
    words_ptr,
    exponents_ptr,
    bias_ptr,
    h_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    inner,
    size,
    stride_x,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of h[pair] = (up + 1) · gate · sigmoid(ALPHA · gate). Row 2j of an
    expert's matrix is gate's row j, row 2j + 1 is up's. x: [T, size] and h: [num_pairs, inner],
    their columns as `interleaved` orders them.
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    x_row = x_ptr + pair // TOP_K * stride_x
    acc = sum_of(
        x_row,
        words_ptr,
        exponents_ptr,
        bias_ptr,
        expert,
        is_row,
        n,
        2 * inner,
        size,
        BLOCK_M,
        BLOCK_K,
    )
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    # A NaN stays one: a plain minimum would turn it into a number, and the answer would look right.
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    h = (up + 1) * gate * tl.sigmoid(ALPHA * gate)
    j = first // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    h = tl.permute(tl.reshape(h, (BLOCK_M, BLOCK_N // 16, 2, 4)), (0, 1, 3, 2))  # as `interleaved`
    h = tl.reshape(h, (BLOCK_M, BLOCK_N // 2)).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair * inner + j, h, mask=is_row & (j < inner))


@triton.jit(do_not_specialize=["num_pairs"])
def mxfp4_down_kernel(
    h_ptr,
    words_ptr,
    exponents_ptr,
    bias_ptr,
    y_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    size,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of y[pair] = h[pair] · downᵀ + bias. y: [num_pairs, size]."""
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h_row = h_ptr + pair * inner
    acc = sum_of(
        h_row,
        words_ptr,
        exponents_ptr,
        bias_ptr,
        expert,
        is_row,
        n,
        size,
        inner,
        BLOCK_M,
        BLOCK_K,
    )
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pair * size + n[None, :], y, mask=is_row & (n[None, :] < size))
