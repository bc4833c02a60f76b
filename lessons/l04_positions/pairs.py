"""What the kernels share: the pairs of coordinates that turn together, loaded, turned and stored in
either layout.

Source of the layouts: naive.rotate_half and naive.rotate_interleaved, which do the same.
"""

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def load_cos_sin(cos_sin_ptr, position, num_positions, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin of one position, [1, PAIRS] each. Beyond the table NaN: a wrong position shows,
    and reads no other memory.
    """
    pair = tl.arange(0, PAIRS)[None, :]
    known = (pair < HEAD_DIM // 2) & (position >= 0) & (position < num_positions)
    row = cos_sin_ptr + position * HEAD_DIM
    return (
        tl.load(row + pair, mask=known, other=float("nan")),
        tl.load(row + HEAD_DIM // 2 + pair, mask=known, other=float("nan")),
    )


@triton.jit
def load_pairs(
    x_ptr,
    stride_head,
    num_heads,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The coordinates that turn together, of BLOCK heads of one token: two of [BLOCK, PAIRS]."""
    head = tl.arange(0, BLOCK)[:, None]
    rows = x_ptr + head * stride_head
    if LAYOUT == "interleaved":  # neighbours: one wide load, taken apart in registers
        column = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(rows + column, mask=(head < num_heads) & (column < HEAD_DIM), other=0.0)
        first, second = tl.split(tl.reshape(x, (BLOCK, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        held = (head < num_heads) & (pair < HEAD_DIM // 2)
        first = tl.load(rows + pair, mask=held, other=0.0)
        second = tl.load(rows + HEAD_DIM // 2 + pair, mask=held, other=0.0)
    return first, second


@triton.jit
def turn_into(
    out_ptr,
    stride_head,
    num_heads,
    first,
    second,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Turn what `load_pairs` gave and store it where `out_ptr` says. Returns the turned pairs in
    float32, [BLOCK, PAIRS] each.
    """
    first, second = first.to(tl.float32), second.to(tl.float32)
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    head = tl.arange(0, BLOCK)[:, None]
    rows = out_ptr + head * stride_head
    dtype = out_ptr.dtype.element_ty
    if LAYOUT == "interleaved":
        column = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(
            rows + column,
            tl.interleave(turned_first.to(dtype), turned_second.to(dtype)),
            mask=(head < num_heads) & (column < HEAD_DIM),
        )
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        held = (head < num_heads) & (pair < HEAD_DIM // 2)
        tl.store(rows + pair, turned_first.to(dtype), mask=held)
        tl.store(rows + HEAD_DIM // 2 + pair, turned_second.to(dtype), mask=held)
    return turned_first, turned_second
