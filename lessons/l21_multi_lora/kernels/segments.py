"""All adapters of a step in two launches: rows of one adapter form a segment, and a program owns a
tile of one segment.

    h = x Aᵀ              shrink: K numbers of a row become r; a program has a tile and a part of K
    y += scaling · h B    expand: r numbers become N; a program has a tile and some of the outputs

Three decisions:

- **Which adapter a row has is data.** `order` lists the rows by adapter, and `tiles` says which
  slot a program multiplies by. A row is loaded through its number in `order`, so no row is
  moved, and a row without an adapter is in no tile. Padding tiles have no rows, so the grid of a
  CUDA graph stays the same while the adapters of a batch change.
- **Ranks may differ.** A program reads the rank of its slot and masks or leaves out what is beyond
  it. So an adapter of rank 8 beside one of rank 64 reads rank 8's bytes. A rank of 0 ends the
  program.
- **The same bits in every batch.** A shrink has few outputs and a long sum, so K is split between
  programs. Each split writes its own float32 partial, and expand adds them in the order of their
  numbers. The length of a split is fixed, not the number of splits, and a row's sums read only that
  row and its adapter. So a row's result does not depend on the other rows and adapters.

Sources: Chen et al. 2023, Punica (SGMV); Sheng et al. 2023, S-LoRA (rows of different ranks,
section 5).
"""

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def rows_of_tile(order_ptr, tiles_ptr, tile, BLOCK_M: tl.constexpr):
    """The slot of a tile, and for each of its rows: its place in `order`, its number in x, and
    whether there is one. Three of [BLOCK_M, 1].
    """
    slot = tl.load(tiles_ptr + 3 * tile).to(tl.int64)  # int64, because slot · stride may pass 2^31
    first = tl.load(tiles_ptr + 3 * tile + 1)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    m = tl.arange(0, BLOCK_M)[:, None]
    is_row = m < count
    place = (first + m).to(tl.int64)
    row = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)
    return slot, place, row, is_row, count


# Not specialised, because a new number of tokens shall not compile a variant while requests wait.
@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    order_ptr,
    tiles_ptr,
    ranks_ptr,
    partials_ptr,
    num_rows,
    size,
    max_rank,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """partials[split, place] = x[row, the split's columns] · A[slot]ᵀ. One program: a tile, a
    split, a block of ranks.

    x: [num_rows, size]; a: [S, max_rank, size]; partials: [splits, num_rows, max_rank] float32, by
    places in `order`. Beyond a slot's rank nothing is written.
    """
    slot, place, row, is_row, count = rows_of_tile(order_ptr, tiles_ptr, tl.program_id(0), BLOCK_M)
    split = tl.program_id(1)
    rank = tl.load(ranks_ptr + slot)
    first_rank = tl.program_id(2) * BLOCK_R
    if (count == 0) | (first_rank >= rank):
        return
    r = first_rank + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
    is_r = r < rank
    k = split * SPLIT_K + tl.arange(0, BLOCK_K)[None, :]
    x_row = x_ptr + row * stride_x
    a_row = a_ptr + (slot * max_rank + r) * size
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in tl.range(0, SPLIT_K, BLOCK_K, num_stages=NUM_STAGES):
        is_k = start + k < size
        x = tl.load(x_row + start + k, mask=is_row & is_k, other=0.0)
        a = tl.load(a_row + start + k, mask=is_r & is_k, other=0.0)
        # "ieee", because Triton's default rounds float32 to tf32
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    r = tl.trans(r)  # [1, BLOCK_R]
    out = partials_ptr + (split.to(tl.int64) * num_rows + place) * max_rank + r
    tl.store(out, acc, mask=is_row & (r < rank))


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    partials_ptr,
    b_ptr,
    order_ptr,
    tiles_ptr,
    ranks_ptr,
    scaling_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    max_rank,
    num_splits,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[row] += scaling[slot] · h[place] · B[slot], h the sum of the partials. One program: a
    tile of rows and of outputs, so each number of out has one writer.

    b: [S, max_rank, num_outputs]; out: [num_rows, num_outputs], the base product.
    """
    slot, place, row, is_row, count = rows_of_tile(order_ptr, tiles_ptr, tl.program_id(0), BLOCK_M)
    rank = tl.load(ranks_ptr + slot)
    if (count == 0) | (rank == 0):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_n = n < num_outputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)[None, :]  # [1, BLOCK_R]
        partial = partials_ptr + place * max_rank + r
        h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for _ in range(num_splits):
            h += tl.load(partial, mask=is_row & (r < rank), other=0.0)
            partial += tl.cast(num_rows, tl.int64) * max_rank
        r = tl.trans(r)  # [BLOCK_R, 1]
        b_row = b_ptr + (slot * max_rank + r) * num_outputs
        b = tl.load(b_row + n, mask=(r < rank) & is_n, other=0.0)
        acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
    out = out_ptr + row * stride_out + n
    base = tl.load(out, mask=is_row & is_n, other=0.0).to(tl.float32)
    acc = base + acc * tl.load(scaling_ptr + slot)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_n)
