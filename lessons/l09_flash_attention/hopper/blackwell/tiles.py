"""Tiles in tensor memory, a few columns at a time, and 2^x on two units of a Blackwell GPU.

Tensor memory has 128 lanes of 512 columns, 32 bits each. A tile of sums takes a lane a row. In the
layout PART a thread has one row of COLUMNS columns, so the maximum and the sum of a row are of one
thread, and need no shuffle.
"""

from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, mbarrier
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """COUNT mbarriers, each for one arrival a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def part_of(tile, j, COLUMNS: gl.constexpr):
    """COLUMNS columns of a tile in tensor memory, the j-th of them."""
    return tile.slice(j * COLUMNS, COLUMNS)


@gluon.jit
def weights_of(scores, j, COLUMNS: gl.constexpr):
    """COLUMNS weights a row, the j-th of them, where the scores were. A weight has 16 bits, so two
    of them share a column.
    """
    ROWS: gl.constexpr = scores.shape[0]
    layout: gl.constexpr = TensorMemoryLayout([ROWS, COLUMNS], col_stride=1)
    columns = scores.slice(j * COLUMNS // 2, COLUMNS // 2)
    return columns._reinterpret(gl.bfloat16, [ROWS, COLUMNS], layout)


@gluon.jit
def rescale(tile, alpha, COLUMNS: gl.constexpr, PART: gl.constexpr):
    """Multiply each row of a tile. alpha: [ROWS]."""
    for j in gl.static_range(tile.shape[1] // COLUMNS):
        part = part_of(tile, j, COLUMNS)
        part.store(part.load(PART) * gl.expand_dims(alpha, 1))


@gluon.jit
def exp2_by_polynomial(x):
    """2^x to within 3e-6 of its value, for -126 <= x <= 127. Below that, something between 0 and
    2^-126; 0 from -127 down. x: float32.

    x = n + f with an integer n and |f| <= 1/2. A polynomial gives 2^f, and to multiply that by 2^n
    is to add n to its exponent.
    """
    x = gl.maximum(x, -127.0)
    # 1.5 · 2^23: float32 has no digit after the point there, so the addition rounds x to n
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    p = 0.009582853168910178 * f + 0.0559064250364588
    p = p * f + 0.24024098611259473
    p = p * f + 0.6931241933678401
    p = p * f + 1.0
    # the lowest bits of `shifted` are n, and an exponent begins at bit 23
    exponent = shifted.to(gl.int32, bitcast=True) << 23
    return (p.to(gl.int32, bitcast=True) + exponent).to(gl.float32, bitcast=True)


@gluon.jit
def exp2(x, BY_POLYNOMIAL: gl.constexpr):
    """2^x, by the polynomial or by the special function unit."""
    if BY_POLYNOMIAL:
        p = exp2_by_polynomial(x)
    else:
        p = gl.exp2(x)
    return p
