"""What the kernel of this lesson leaves open: how codes become numbers.

Each hook is a small Triton function that is handed to `quantized_matmul_kernel` as its UNPACK, as
lesson 12 hands LOAD to its kernels. The compiler puts its lines into the kernel.

    UNPACK(word, PLACE, dtype, table_ptr) -> [N, 2 · W] of type dtype

word: [N, W] uint32, four bytes of codes each. PLACE: a constant. The hook takes the two codes that
begin at bit PLACE and at bit PLACE + 16 of each word. So PLACE 0 gives the codes of bytes 0 and 2,
in order, and PLACE 8 those of bytes 1 and 3; with 4 bits a code, 4 and 12 give the high halves.

Why words, and why not bytes: an H200 that reads 4-bit weights at full speed has time for about 3.4
instructions a weight. Registers are 32 bits wide, so a mask or a shift of a word serves two codes
at once, and the result is already the pair of 16-bit numbers that a tensor core wants. The loop
compiled for sm_90 has 3.2 instructions a weight of 4 bits, all included (3.9 with zero points, and
5.1 for 8 bits, which have time for 6.9). Unpacked byte by byte it had 5.6, and half of them moved
bytes from place to place: no tuning of tiles would have reached more than 60 % of the memory's
rate. By the same count zero points cost a little of that rate, MXFP4 more (4.6), and NF4 more than
half of it (8.3): it looks each number up, and its step is half as long, because 64 weights share a
scale.

No hook converts an integer. A code is put into the bits of a float whose exponent is known:

    0x6400 | q  =  1024 + q    as float16, because its 10 bits of mantissa count in steps of 1 there
    0x4300 | q  =  128 + q     as bfloat16, 7 bits of mantissa

and a subtraction removes 1024 or 128. Both are exact.

Source: Kim et al. 2022, Who Says Elephants Can't Run, section 3.3 (FasterTransformer's converters).
"""

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def two_halves(word, HALF: tl.constexpr):
    """The lower and the upper 16 bits of each word, side by side, as floats. word: [N, W] uint32 ->
    [N, 2 · W] of type HALF. It moves nothing: a register holds the pair before and after.
    """
    low = word.to(tl.uint16).to(HALF, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(HALF, bitcast=True)
    return tl.reshape(tl.join(low, high), (word.shape[0], 2 * word.shape[1]))


@triton.jit
def int4(word, PLACE: tl.constexpr, dtype: tl.constexpr, table_ptr):
    """Whole numbers of 4 bits: q − 8."""
    code = (word >> PLACE) & 0x000F000F
    if dtype == tl.bfloat16:
        number = two_halves(code | 0x43004300, tl.bfloat16) - 136.0
    else:
        number = two_halves(code | 0x64006400, tl.float16) - 1032.0
    return number.to(dtype)


@triton.jit
def int8(word, PLACE: tl.constexpr, dtype: tl.constexpr, table_ptr):
    """Whole numbers of 8 bits: q − 128.

    bfloat16 has room for 7 bits of q. The eighth decides what is subtracted: 128 + (q mod 128)
    minus 256 if q is below 128, minus 128 if not.
    """
    code = (word >> PLACE) & 0x00FF00FF
    if dtype == tl.bfloat16:
        low_bits = two_halves(code & 0x007F007F | 0x43004300, tl.bfloat16)
        number = low_bits - two_halves((code & 0x00800080) ^ 0x43804380, tl.bfloat16)
    else:
        number = two_halves(code | 0x64006400, tl.float16) - 1152.0
    return number.to(dtype)


@triton.jit
def minifloat(
    word, PLACE: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr, EXPONENT_BITS: tl.constexpr
):
    """Floats of BITS bits, of which 1 is the sign: their bits, moved to where a wider float has
    them.

    The wider float's exponent counts from another bias, so the result is too small by a power of
    two, and a product mends that. It is exact for the smallest (subnormal) codes too. Codes that
    stand for NaN or infinity are read as numbers, except those of E5M2 with a float16 x, which has
    the same exponent: a quantizer that saturates never writes them.
    """
    HALF: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    WIDE: tl.constexpr = 8 if dtype == tl.bfloat16 else 5  # bits of HALF's exponent
    KEPT: tl.constexpr = (0xFFFF0000 >> BITS) & 0xFFFF  # the upper BITS of 16
    MOVED: tl.constexpr = WIDE - EXPONENT_BITS
    FACTOR: tl.constexpr = 2.0 ** (2 ** (WIDE - 1) - 2 ** (EXPONENT_BITS - 1))
    top = (word << (16 - BITS - PLACE)) & (KEPT * 0x00010001)
    magnitude = (top >> MOVED) & ((0x7FFF >> MOVED) * 0x00010001)
    return (two_halves(magnitude | (top & 0x80008000), HALF) * FACTOR).to(dtype)


@triton.jit
def e4m3(word, PLACE: tl.constexpr, dtype: tl.constexpr, table_ptr):
    """FP8 with 4 bits of exponent (torch.float8_e4m3fn). Bit operations, so an A100 reads it too,
    although it cannot calculate with it.
    """
    return minifloat(word, PLACE, dtype, 8, 4)


@triton.jit
def e5m2(word, PLACE: tl.constexpr, dtype: tl.constexpr, table_ptr):
    """FP8 with 5 bits of exponent (torch.float8_e5m2): the upper byte of a float16."""
    return minifloat(word, PLACE, dtype, 8, 5)


@triton.jit
def e2m1(word, PLACE: tl.constexpr, dtype: tl.constexpr, table_ptr):
    """The 4-bit float of MXFP4 and NVFP4."""
    return minifloat(word, PLACE, dtype, 4, 2)


@triton.jit
def nf4(word, PLACE: tl.constexpr, dtype: tl.constexpr, table_ptr):
    """NF4: the code is an index into 16 quantiles of a normal distribution, so nothing can be
    calculated. table_ptr: NF4_VALUES, [16] of type dtype; they stay in the L1 cache.
    """
    code = (word >> PLACE) & 0x000F000F
    low, high = tl.load(table_ptr + (code & 15)), tl.load(table_ptr + (code >> 16))
    return tl.reshape(tl.join(low, high), (word.shape[0], 2 * word.shape[1]))
