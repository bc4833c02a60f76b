"""Hooks for decode.py: the codes in a tile of words, as numbers of float16.

    UNPACK(words, PARTS) -> PARTS tiles of [N, W]        words: [N, W] uint16 or uint8

Part j has code j of every word: the channels j, j + PARTS, j + 2 · PARTS … of a row. All codes of
8 and 4 bits are exact in float16. Some hooks give them times a power of two, which costs nothing,
because the kernel multiplies each score and each result once: by UNITS.

The hooks with PTX do the same for two words at a time, with the fewest instructions. Triton itself
takes every 16-bit word apart, and puts the parts together again in pairs.
"""

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def e4m3_codes(words, PARTS: tl.constexpr):
    """Numbers of 8 bits, as a chip converts them from sm_89 on."""
    parts = ()
    for j in tl.static_range(PARTS):
        bits = (words >> (8 * j)).to(tl.uint8)
        parts += (bits.to(tl.float8e4nv, bitcast=True).to(tl.float16),)
    return parts


@triton.jit
def e4m3_bits(words, PARTS: tl.constexpr):
    """`e4m3_codes` / 256 for older chips: `e4m3_bits_load` says why bits move seven places."""
    parts = ()
    for j in tl.static_range(PARTS):
        code = (words >> (8 * j)).to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        parts += (bits.to(tl.float16, bitcast=True),)
    return parts


@triton.jit
def int8_codes(words, PARTS: tl.constexpr):
    """Whole numbers from −128 to 127."""
    parts = ()
    for j in tl.static_range(PARTS):
        bits = (words >> (8 * j)).to(tl.uint8)
        parts += (bits.to(tl.int8, bitcast=True).to(tl.float16),)
    return parts


@triton.jit
def int4_codes(words, PARTS: tl.constexpr):
    """Whole numbers from 0 to 15, times 2^-24: the bits of a small integer are those of a subnormal
    number of float16, so nothing is converted.
    """
    parts = ()
    for j in tl.static_range(PARTS):
        bits = ((words >> (4 * j)) & 15).to(tl.uint16)
        parts += (bits.to(tl.float16, bitcast=True),)
    return parts


# ---------------------------------------------------------------- two words at a time


@triton.jit
def e4m3_ptx(words, PARTS: tl.constexpr):
    """`e4m3_codes` of 16-bit words: sort the bytes of two words, then convert them in pairs."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int8_ptx(words, PARTS: tl.constexpr):
    """`int8_codes` of 16-bit words: the byte code + 128 after 0x64 is the float16 number
    1024 + 128 + code, from which 1152 (0x6480) is subtracted.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 above, low, high, middle;
        xor.b32 above, $2, 0x80808080;
        mov.b32 middle, 0x64646464;
        prmt.b32 low, above, middle, 0x4240;
        prmt.b32 high, above, middle, 0x4341;
        mov.b32 middle, 0x64806480;
        sub.f16x2 $0, low, middle;
        sub.f16x2 $1, high, middle;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int4_ptx(words, PARTS: tl.constexpr):
    """`int4_codes` of 16-bit words."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 right;
        and.b32 $0, $4, 0x000f000f;
        shr.u32 right, $4, 4;
        and.b32 $1, right, 0x000f000f;
        shr.u32 right, $4, 8;
        and.b32 $2, right, 0x000f000f;
        shr.u32 right, $4, 12;
        and.b32 $3, right, 0x000f000f;
        }""",
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


# What a hook's numbers have to be multiplied by.
UNITS = {e4m3_bits: 256.0, int4_codes: 2.0**24, int4_ptx: 2.0**24}
