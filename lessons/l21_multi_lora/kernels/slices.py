"""The adapters of q, k and v in two launches: layers that multiply the same x are slices of one
grid.

`kernels/segments.py` makes two launches for each layer. A decode step has little work for each, so
its time is mostly that of starting it. q, k and v read the same rows, so their shrinks differ in A
alone and can be one launch with three times the programs. So can their expands. A program finds its
slice from its number. What it computes, and in which order, is that of segments.py.

Source: vLLM, lora_shrink_op.py and lora_expand_op.py (`slice_id`).
"""

from lessons.l21_multi_lora.kernels.segments import rows_of_tile
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit(do_not_specialize=["num_rows"])
def shrink_slices_kernel(
    x_ptr,
    a_ptr,
    order_ptr,
    tiles_ptr,
    ranks_ptr,
    partials_ptr,
    num_rows,
    size,
    max_rank,
    num_slots,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """As segments.shrink_kernel, for several slices. One program: a tile, a split, a slice's block
    of ranks.

    a: [slices, S, max_rank, size]; ranks: [slices, S]; partials: [slices, splits, num_rows,
    max_rank] float32.
    """
    slot, place, row, is_row, count = rows_of_tile(order_ptr, tiles_ptr, tl.program_id(0), BLOCK_M)
    split, layer = tl.program_id(1), tl.program_id(2) // RANK_BLOCKS
    adapter = layer * num_slots + slot  # int64, as slot is
    rank = tl.load(ranks_ptr + adapter)
    first_rank = tl.program_id(2) % RANK_BLOCKS * BLOCK_R
    if (count == 0) | (first_rank >= rank):
        return
    r = first_rank + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
    is_r = r < rank
    k = split * SPLIT_K + tl.arange(0, BLOCK_K)[None, :]
    x_row = x_ptr + row * stride_x
    a_row = a_ptr + (adapter * max_rank + r) * size
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in tl.range(0, SPLIT_K, BLOCK_K, num_stages=NUM_STAGES):
        is_k = start + k < size
        x = tl.load(x_row + start + k, mask=is_row & is_k, other=0.0)
        a = tl.load(a_row + start + k, mask=is_r & is_k, other=0.0)
        # "ieee", because Triton's default rounds float32 to tf32
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    r = tl.trans(r)  # [1, BLOCK_R]
    part = (layer * tl.num_programs(1) + split).to(tl.int64)
    tl.store(partials_ptr + (part * num_rows + place) * max_rank + r, acc, mask=is_row & (r < rank))


@triton.jit(do_not_specialize=["num_rows"])
def expand_slices_kernel(
    partials_ptr,
    b_ptr,
    order_ptr,
    tiles_ptr,
    ranks_ptr,
    scaling_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_rows,
    q_outputs,
    k_outputs,
    v_outputs,
    max_rank,
    num_slots,
    num_splits,
    stride_q, stride_k, stride_v,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """As segments.expand_kernel; a program has a tile of one slice's outputs. b: a slice's [S,
    max_rank, outputs], then the next one's; q, k, v: [num_rows, outputs], the base products.
    """
    slot, place, row, is_row, count = rows_of_tile(order_ptr, tiles_ptr, tl.program_id(0), BLOCK_M)
    layer, n_tile = 0, tl.program_id(1)
    out_ptr, num_outputs, stride_out = q_ptr, q_outputs, stride_q
    before = tl.cast(0, tl.int64)  # outputs of the slices before: q's tiles come first, then k's
    q_tiles, k_tiles = tl.cdiv(q_outputs, BLOCK_N), tl.cdiv(k_outputs, BLOCK_N)
    if n_tile >= q_tiles + k_tiles:
        layer, n_tile = 2, n_tile - q_tiles - k_tiles
        out_ptr, num_outputs, stride_out = v_ptr, v_outputs, stride_v
        before += q_outputs + k_outputs
    elif n_tile >= q_tiles:
        layer, n_tile = 1, n_tile - q_tiles
        out_ptr, num_outputs, stride_out = k_ptr, k_outputs, stride_k
        before += q_outputs
    adapter = layer * num_slots + slot  # int64, as slot is
    rank = tl.load(ranks_ptr + adapter)
    if (count == 0) | (rank == 0):
        return
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_n = n < num_outputs
    b_ptr += before * num_slots * max_rank
    partials_ptr += tl.cast(layer * num_splits, tl.int64) * num_rows * max_rank
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
    acc = base + acc * tl.load(scaling_ptr + adapter)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row & is_n)
