"""All experts of a layer in three launches, however many there are and whichever tokens chose them.

    h = silu(x · gateᵀ) · (x · upᵀ)   gate_up_kernel   one program: a tile of an expert's rows and
                                                       of I
    y = h · downᵀ                     down_kernel      the same, a tile of hidden_size
    out = Σ weight · y                sum_kernel       one program: a token, over its k experts

Four decisions:

- **Which expert a program multiplies by is data.** It reads its tile's expert and its rows' numbers
  from an Alignment. The grid is that of the most tiles, so it never depends on the router. A
  program whose tile is not used ends at once.
- **Two products, not one.** Each output of `down` needs all I values of h. A program that computed
  both would have to hold a whole row of h, 14336 values in Mixtral, or compute h again for each
  tile of outputs. So h goes through memory once. It is small: for a few tokens nearly all bytes are
  weights.
- **silu and the product with `up` are the first product's epilogue** (lesson 7, epilogue.py). A
  tile of x is loaded once for both weights, and gate and up never leave the registers.
- **No atomic additions.** k programs have a share in each token. Each writes a row of its own, and
  `sum_kernel` adds the rows in the order of their places. So the same input gives the same bits.

vLLM multiplies by the router's weights in the epilogue of `down`. Here the sum does it: the weights
then stay with their token when its rows travel to other ranks (ranks/experts.py), and are used in
float32.

Sources: vLLM's fused_moe kernel; Gale et al. 2022, MegaBlocks (section 5).
"""

from lessons.l07_kernel_fusion.epilogue import load_tile
from lessons.toolbox.kernels.triton_ import tl, triton


# Not specialised, because a new number of tokens shall not compile a variant while requests wait.
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def align_kernel(
    chosen_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_experts,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """As align.align, in one launch. One program: the tiles of one expert.

    Where its tiles begin depends on the counts of all experts before it. So each program counts all
    pairs: that is quicker than a second launch. chosen: [num_pairs] int64. BLOCK_E: a power of two
    above num_experts, so that its last bin takes the pairs that are no expert's.
    """
    own = tl.program_id(0)
    bin = tl.arange(0, BLOCK_E)
    p = tl.arange(0, BLOCK_P)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        expert = tl.load(chosen_ptr + start + p, mask=start + p < num_pairs, other=-1)
        is_expert = (expert >= 0) & (expert < num_experts)
        counts += tl.histogram(tl.where(is_expert, expert, BLOCK_E - 1).to(tl.int32), BLOCK_E)
    tiles = tl.where(bin < num_experts, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first_tile = tl.sum(tl.where(bin < own, tiles, 0))
    own_tiles = tl.sum(tl.where(bin == own, tiles, 0))
    used_tiles = tl.sum(tiles)

    seen = 0  # own pairs so far
    own_pairs = pairs_ptr + first_tile * BLOCK_M
    for start in range(0, num_pairs, BLOCK_P):
        expert = tl.load(chosen_ptr + start + p, mask=start + p < num_pairs, other=-1)
        is_own = (expert == own).to(tl.int32)
        place = seen + tl.cumsum(is_own, 0) - 1
        tl.store(own_pairs + place, start + p, mask=is_own != 0)
        seen += tl.sum(is_own)
    for start in range(seen, own_tiles * BLOCK_M, BLOCK_P):
        is_none = start + p < own_tiles * BLOCK_M
        tl.store(own_pairs + start + p, tl.zeros_like(p) + num_pairs, mask=is_none)
    for start in range(0, own_tiles, BLOCK_P):
        is_tile = start + p < own_tiles
        tl.store(experts_ptr + first_tile + start + p, tl.zeros_like(p) + own, mask=is_tile)
    # Tiles that are not used are marked by all programs in turn; their pairs are never read.
    for start in range(used_tiles + own * BLOCK_P, num_tiles, num_experts * BLOCK_P):
        tl.store(experts_ptr + start + p, tl.zeros_like(p) - 1, mask=start + p < num_tiles)


@triton.jit
def rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M: tl.constexpr):
    """The expert of this program's tile, below 0 if it is not used, and for each row its pair, and
    whether there is one: [BLOCK_M, 1]. int64, because expert · stride may pass 2^31.
    """
    tile = tl.program_id(0)
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    pair = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None])
    return expert, pair.to(tl.int64), pair < num_pairs


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    h_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    inner,
    size,
    stride_x,
    stride_expert,
    stride_row,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of h[pair] = silu(x[pair // k] · gateᵀ) · (x[pair // k] · upᵀ).

    x: [T, size]; weight: [E, 2 · inner, size], gate's rows and then up's; h: [num_pairs, inner].
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    x_row = x_ptr + pair // TOP_K * stride_x
    k = tl.arange(0, BLOCK_K)[None, :]
    first = tl.program_id(1) * BLOCK_N
    gate_ptr = weight_ptr + expert * stride_expert
    up_ptr = gate_ptr + tl.cast(inner, tl.int64) * stride_row
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # "ieee", because Triton's default rounds float32 to tf32; 16-bit inputs are not changed by it
    for start in range(0, size, BLOCK_K):
        x = tl.load(x_row + start + k, mask=is_row & (start + k < size), other=0.0)
        w = load_tile(gate_ptr, first, inner, stride_row, start, size, BLOCK_N, BLOCK_K)
        gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
        w = load_tile(up_ptr, first, inner, stride_row, start, size, BLOCK_N, BLOCK_K)
        up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
    h = gate * tl.sigmoid(gate) * up
    n = first + tl.arange(0, BLOCK_N)[None, :]
    h_row = h_ptr + pair * inner
    tl.store(h_row + n, h.to(h_ptr.dtype.element_ty), mask=is_row & (n < inner))


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    h_ptr,
    weight_ptr,
    y_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    size,
    inner,
    stride_expert,
    stride_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of y[pair] = h[pair] · downᵀ.

    h: [num_pairs, inner]; weight: [E, size, inner]; y: [num_pairs, size].
    """
    expert, pair, is_row = rows_of_tile(pairs_ptr, experts_ptr, num_pairs, BLOCK_M)
    if expert < 0:
        return
    h_row = h_ptr + pair * inner
    k = tl.arange(0, BLOCK_K)[None, :]
    first = tl.program_id(1) * BLOCK_N
    down_ptr = weight_ptr + expert * stride_expert
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inner, BLOCK_K):
        h = tl.load(h_row + start + k, mask=is_row & (start + k < inner), other=0.0)
        w = load_tile(down_ptr, first, size, stride_row, start, inner, BLOCK_N, BLOCK_K)
        acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
    n = first + tl.arange(0, BLOCK_N)[None, :]
    y_row = y_ptr + pair * size
    tl.store(y_row + n, acc.to(y_ptr.dtype.element_ty), mask=is_row & (n < size))


@triton.jit
def sum_kernel(
    y_ptr,
    weights_ptr,
    chosen_ptr,
    out_ptr,
    num_experts,
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of out[token] = Σ weights[token, place] · y[token · k + place].

    Pairs whose expert is none of 0 … num_experts - 1 are left out, and their rows of y are not
    read, because they were not written. y: [T · k, size]; weights: [T, k] float32; chosen: [T, k]
    int64; out: [T, size].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(chosen_ptr + pair)
        is_own = (expert >= 0) & (expert < num_experts)
        y = tl.load(y_ptr + pair * size + column, mask=is_column & is_own, other=0.0)
        acc += y.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * size + column, acc.to(out_ptr.dtype.element_ty), mask=is_column)
