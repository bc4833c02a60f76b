"""One kernel for every format: x · Wᵀ, where W is unpacked in registers on its way to the tensor
cores.

`quantized_matmul_kernel` is lesson 7's tiled product with a hook, UNPACK, that says how codes
become numbers (unpack.py). The matrix leaves memory as codes and is never written back as numbers.

Three decisions:

- **What is added up in which type.** The tensor cores multiply numbers of x's type and add in
  float32. Codes of whole numbers minus their zero point are exact in 16 bits, so a product adds no
  error. A group's scale is applied to the float32 sum of that group: once for each output, not for
  each weight, and never rounded to 16 bits. Groups shorter than a step (fewer than 64 weights of 4
  bits) cannot wait that long. There the scale is rounded to x's type and multiplies the weights.
- **In which order.** A sum may be taken in any order as long as both factors agree. Each 32-bit
  word gives its even and its odd bytes separately, so x is split the same way: `tl.split` of
  neighbours.
- **Split-K.** At batch 1 a 4096 × 4096 matrix has 32 tiles of outputs and an H200 132 processors.
  So the row of W is cut into splits. Each writes its own float32 partial, and
  `add_partials_kernel` adds them in the order of their numbers. There are no atomic additions, so
  the same input gives the same bits.

Sources: Frantar et al. 2024, MARLIN (W4A16 near the memory's rate); Triton's tutorial 03.
"""

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def scale_of(stored):
    """A stored scale as float32. uint8 is MXFP4's E8M0: e means 2^(e − 127), and 255 means NaN.
    int8 are the bits of NVFP4's E4M3, which an A100 cannot convert.
    """
    if stored.dtype == tl.uint8:
        exponent = stored.to(tl.uint32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^−127 is subnormal
        return (
            tl.where(exponent == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)
        )
    elif stored.dtype == tl.int8:
        bits = stored.to(tl.uint8, bitcast=True).to(tl.uint16)
        half = (bits & 0x80) << 8 | (bits & 0x7F) << 7  # as float16, which is 2^8 too small
        half = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half).to(tl.uint16)  # NaN
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return stored.to(tl.float32)


@triton.jit
def whole_number(code, dtype: tl.constexpr):
    """0 … 255 as dtype, exactly and without a conversion of integers. code: [...] uint8."""
    # The sum over one element hides from the compiler that a byte was loaded. Triton up to 3.7 lays
    # out an operand of a product by the narrowest number that it comes from, and counts a step
    # twice whose columns are fewer than that layout's (mended by triton-lang/triton pull request
    # 11691).
    code = tl.sum(code.to(tl.uint16)[:, :, None], axis=2)
    return ((code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(dtype)


@triton.jit
def of_groups(ptr, row, group, stride_row, stride_group, is_used):
    """What is stored for groups: [BLOCK_N, 1] or [BLOCK_N, GROUPS]. row: [BLOCK_N, 1], group: a
    number or [1, GROUPS].
    """
    return tl.load(ptr + row * stride_row + group * stride_group, mask=is_used, other=0)


@triton.jit
def spread(values, WIDTH: tl.constexpr):
    """[BLOCK_N, GROUPS] -> [BLOCK_N, WIDTH]: each value WIDTH / GROUPS times in a row."""
    GROUPS: tl.constexpr = values.shape[1]
    shape: tl.constexpr = (values.shape[0], GROUPS, WIDTH // GROUPS)
    return tl.reshape(tl.broadcast_to(values[:, :, None], shape), (values.shape[0], WIDTH))


@triton.jit
def quantized_matmul_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    tensor_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    row_bytes,
    steps_a_split,
    stride_x,
    stride_words,
    stride_scales_n,
    stride_scales_g,
    stride_zeros_n,
    stride_zeros_g,
    GROUP_BYTES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    CODES: tl.constexpr,
    MIDDLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    UNPACK: tl.constexpr,
):
    """One program: a tile of out = x · Wᵀ, over one split of the row. x: [M, K] -> out: [splits, M,
    N].

    words: [N, row_bytes / 4] uint32, CODES codes a byte, neighbours GROUP_BYTES apart (GroupedInt).
    scales, zeros: [N / SCALE_ROWS, groups]; zeros may be None, and so may tensor_scale, one number
    for the whole matrix. MIDDLE: the zero point that UNPACK
    has subtracted. ONE_GROUP: a step of BLOCK_BYTES lies in one group. WHOLE_STEPS: row_bytes is a
    multiple of BLOCK_BYTES.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    split = tl.program_id(2)
    is_m, is_n = m < num_rows, n < num_outputs
    x_row = x_ptr + m.to(tl.int64) * stride_x  # int64, because row · stride may pass 2^31
    word_row = words_ptr + n.to(tl.int64) * stride_words
    scale_row = n // SCALE_ROWS
    word = tl.arange(0, BLOCK_BYTES // 4)[None, :]
    byte = tl.arange(0, BLOCK_BYTES)[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    begin = split * steps_a_split
    end = tl.minimum(begin + steps_a_split, tl.cdiv(row_bytes, BLOCK_BYTES))
    for step in tl.range(begin, end, num_stages=NUM_STAGES):
        start = step * BLOCK_BYTES
        is_word, is_x = is_n, is_m
        if not WHOLE_STEPS:
            is_word, is_x = is_n & (start + 4 * word < row_bytes), is_m & (start + byte < row_bytes)
        words = tl.load(word_row + start // 4 + word, mask=is_word, other=0)

        # Which group, of the step or of each byte; and what is stored for it.
        if ONE_GROUP:
            group = start // GROUP_BYTES
            group_of_byte = group
            is_group = is_n
        else:
            GROUPS: tl.constexpr = BLOCK_BYTES // GROUP_BYTES
            group = start // GROUP_BYTES + tl.arange(0, GROUPS)[None, :]
            group_of_byte = (start + byte) // GROUP_BYTES
            is_group = is_n & (group * GROUP_BYTES < row_bytes)
        scale = of_groups(scales_ptr, scale_row, group, stride_scales_n, stride_scales_g, is_group)
        if zeros_ptr is not None:
            zero = of_groups(zeros_ptr, n, group, stride_zeros_n, stride_zeros_g, is_group)
            zero = spread(whole_number(zero, dtype) - MIDDLE, BLOCK_BYTES // 2)
        if not ONE_GROUP:
            weight_scale = spread(scale_of(scale).to(dtype), BLOCK_BYTES // 2)

        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for half in tl.static_range(CODES):  # the low halves of the bytes, then the high ones
            column = start + byte + (group_of_byte * (CODES - 1) + half) * GROUP_BYTES
            x = tl.load(x_row + column, mask=is_x, other=0.0)
            x_of = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_BYTES // 2, 2)))
            for odd in tl.static_range(2):  # bytes 0 and 2 of each word, then 1 and 3
                number = UNPACK(words, 8 * odd + 4 * half, dtype, table_ptr)
                if zeros_ptr is not None:
                    number -= zero
                if not ONE_GROUP:
                    number *= weight_scale
                # "ieee", because Triton's default rounds float32 to tf32
                part = tl.dot(x_of[odd], tl.trans(number), part, input_precision="ieee")
        if ONE_GROUP:
            acc += part * tl.trans(scale_of(scale))
        else:
            acc += part

    n, is_n = tl.trans(n), tl.trans(is_n)
    if tensor_scale_ptr is not None:
        acc *= tl.load(tensor_scale_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    offset = (split.to(tl.int64) * num_rows + m) * num_outputs + n
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=is_m & is_n)


@triton.jit
def add_partials_kernel(
    partials_ptr, bias_ptr, out_ptr, num_values, num_outputs, num_splits, BLOCK: tl.constexpr
):
    """out = the sum of partials: [splits, num_values] float32, added in their order, and the bias:
    [num_outputs].
    """
    value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_value = value < num_values
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(num_splits):
        acc += tl.load(partials_ptr + value, mask=is_value, other=0.0)
        partials_ptr += num_values
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + value % num_outputs, mask=is_value, other=0.0).to(tl.float32)
    tl.store(out_ptr + value, acc.to(out_ptr.dtype.element_ty), mask=is_value)
