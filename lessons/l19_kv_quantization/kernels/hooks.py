"""Hooks for lesson 12's kernels: how a tile of K or V is loaded when the cache holds codes.

Each takes the place of `plain_load`. It loads codes, which are half or a quarter of the bytes, and
turns them into numbers in registers, so nothing but codes and scales ever leaves memory. The result
has the dtype in which the scales are stored, the model's.

    LOAD(ptr, offset, column, mask, scale_ptr, slot) -> [N, D]

scale_ptr points to the scales of the KV head: one for each slot, or a pair (scale, low).
"""

from lessons.toolbox.kernels.triton_ import tl, triton

GROUP_TOKENS = tl.constexpr(32)  # tokens of a KIVI group, and channels of one


@triton.jit
def scaled_load(ptr, offset, column, mask, scale_ptr, slot):
    """Codes of 8 bits, E4M3 or int8, times the scale of their slot."""
    codes = tl.load(ptr + offset + column, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + slot)[:, None].to(tl.float32)
    # Not 0 · scale, because the scale of an unused slot may be NaN.
    return tl.where(mask, codes.to(tl.float32) * scale, 0.0).to(scale_ptr.dtype.element_ty)


@triton.jit
def e4m3_bits_load(ptr, offset, column, mask, scale_ptr, slot):
    """`scaled_load` of E4M3 codes for chips before sm_89, which have no instruction for them.

    E4M3 and float16 have their sign, exponent and mantissa in the same order. So the seven lower
    bits of a code, moved 7 places up, are the float16 number that is 2^(15 − 7) times too small,
    because the two formats count exponents from 15 and from 7. This holds for subnormal numbers,
    too.
    """
    codes = tl.load(ptr + offset + column, mask=mask, other=0).to(tl.uint16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    scale = tl.load(scale_ptr + slot)[:, None].to(tl.float32)
    numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * (scale * 256.0)
    return tl.where(mask, numbers, 0.0).to(scale_ptr.dtype.element_ty)


@triton.jit
def split_bytes(bytes_of_row):
    """The two codes of each byte, the low half first: [N, D / 2] uint8 -> [N, D] int32."""
    ROWS: tl.constexpr = bytes_of_row.shape[0]
    HALF: tl.constexpr = bytes_of_row.shape[1]
    both = tl.join(bytes_of_row & 15, bytes_of_row >> 4)  # [N, D / 2, 2]
    return tl.reshape(both, (ROWS, 2 * HALF)).to(tl.int32)


@triton.jit
def whole_rows(ptr, offset, mask):
    """The codes of 4 bits of a tile whose rows are full, D = BLOCK_D: [N, D] int32.

    Loaded without a mask. A mask made for D columns tells the compiler nothing about D / 2 bytes,
    and it would load byte by byte. After a sequence's end the table lookup gives block 0, so these
    loads hit memory that is there, and what they bring is masked when it has become numbers.
    """
    HALF: tl.constexpr = mask.shape[1] // 2
    return split_bytes(tl.load(ptr + offset + tl.arange(0, HALF)[None, :]))


@triton.jit
def as_numbers(codes, mask, scale_ptr, slot):
    """code · scale + low of each slot. codes: [N, D] int32 -> [N, D] in the dtype of the scales."""
    scale = tl.load(scale_ptr + 2 * slot)[:, None].to(tl.float32)
    low = tl.load(scale_ptr + 2 * slot + 1)[:, None].to(tl.float32)
    return tl.where(mask, codes * scale + low, 0.0).to(scale_ptr.dtype.element_ty)


@triton.jit
def int4_load(ptr, offset, column, mask, scale_ptr, slot):
    """Codes of 4 bits, two in a byte, in heads whose size is a power of two."""
    return as_numbers(whole_rows(ptr, offset, mask), mask, scale_ptr, slot)


@triton.jit
def int4_any_load(ptr, offset, column, mask, scale_ptr, slot):
    """`int4_load` for heads of any even size, byte by byte."""
    ROWS: tl.constexpr = mask.shape[0]
    HALF: tl.constexpr = mask.shape[1] // 2
    # Both columns of a byte exist or none, so the mask of the first is that of the byte.
    is_byte, _ = tl.split(tl.reshape(mask.to(tl.int8), (ROWS, HALF, 2)))
    byte = tl.arange(0, HALF)[None, :]
    codes = tl.load(ptr + offset + byte, mask=is_byte != 0, other=0)
    return as_numbers(split_bytes(codes), mask, scale_ptr, slot)


@triton.jit
def kivi_key_load(ptr, offset, column, mask, scale_ptr, slot):
    """KIVI's K, 4 bits: each channel of a group of 32 tokens has a scale and a low of its own.

    Scales: [groups, 2, D]; D is a power of two. A page is a whole number of groups.
    """
    WIDTH: tl.constexpr = mask.shape[1]
    codes = whole_rows(ptr, offset, mask)
    place = scale_ptr + (slot // GROUP_TOKENS)[:, None] * (2 * WIDTH) + column
    numbers = codes * tl.load(place).to(tl.float32) + tl.load(place + WIDTH).to(tl.float32)
    return tl.where(mask, numbers, 0.0).to(scale_ptr.dtype.element_ty)


@triton.jit
def kivi_value_load(ptr, offset, column, mask, scale_ptr, slot):
    """KIVI's V, 4 bits: each 32 channels of a token have a scale and a low of their own.

    Scales: [slots, 2, D / 32], as many as K has.
    """
    PARTS: tl.constexpr = mask.shape[1] // GROUP_TOKENS
    codes = whole_rows(ptr, offset, mask)
    place = scale_ptr + slot[:, None] * (2 * PARTS) + column // GROUP_TOKENS
    numbers = codes * tl.load(place).to(tl.float32) + tl.load(place + PARTS).to(tl.float32)
    return tl.where(mask, numbers, 0.0).to(scale_ptr.dtype.element_ty)
