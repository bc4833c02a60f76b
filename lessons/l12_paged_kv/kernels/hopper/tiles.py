"""Tiles of latents in shared memory: which keys a program has, who brings them, and what the two
warpgroups tell each other.
"""

from lessons.l09_flash_attention.hopper.rings import fill, tile_of
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
    )

    if not hasattr(gl, "barrier"):
        gl.barrier = gl.thread_barrier  # its name in Triton 3.6
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language


@gluon.jit
def keys_of_program(
    items_ptr, context_lens_ptr, split_size, num_heads, LISTED: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(sequence, begin, end, place, step) of a program, as lesson 12's equal_split and listed_split
    give them: its keys, and that head h's partial result is at place + h · step.
    """
    step = gl.num_programs(1)
    if LISTED:
        item = items_ptr + gl.program_id(1) * 4
        sequence = gl.load(item).to(gl.int64)
        begin, end = gl.load(item + 1), gl.load(item + 2)
        place = gl.load(item + 3).to(gl.int64)
    else:
        split, sequence = gl.program_id(1), gl.program_id(2).to(gl.int64)
        length = gl.load(context_lens_ptr + sequence).to(gl.int32)
        tiles = (length + BLOCK_N - 1) // BLOCK_N
        share = (tiles + step - 1) // step * BLOCK_N
        size = gl.where(split_size * step >= length, split_size, share)
        begin = split * size
        end = gl.minimum(begin + size, length)
        place = sequence * num_heads * step + split
    return sequence, begin, end, place, step


@gluon.jit
def num_tiles_of(begin, end, BLOCK_N: gl.constexpr):
    """Tiles of a program, an even number: the last one may hold no key of its own."""
    return (gl.maximum(end - begin, 0) + 2 * BLOCK_N - 1) // (2 * BLOCK_N) * 2


@gluon.jit
def allocate_pages(desc, STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """A ring as rings.py has it, of tiles that are filled by pieces of pages. The last reader frees
    a tile: the warpgroup that multiplies by it as V, because that needs weights, which are there
    only when K has been read.
    """
    COLUMNS: gl.constexpr = desc.block_type.shape[1]
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, BLOCK_N, COLUMNS], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    return tiles, ready, free


@gluon.jit
def allocate_flags():
    """An mbarrier for each warpgroup, at which it arrives when it has left something."""
    flags = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for side in gl.static_range(2):
        mbarrier.init(flags.index(side), count=1)
    return flags


@gluon.jit
def allocate_numbers(BLOCK_H: gl.constexpr):
    """Room for a number a row of each warpgroup, and its flags."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], layout), allocate_flags()


@gluon.jit
def fill_pages(ring, i, desc, rows, column):
    """The producer asks for tile i, piece after piece of its pages, once its buffer is free. rows:
    where in the pool each piece begins.
    """
    tiles, ready, free = ring
    STAGES: gl.constexpr = tiles.shape[0]
    PIECE: gl.constexpr = desc.block_type.shape[0]
    PIECES: gl.constexpr = tiles.shape[1] // PIECE
    stage, phase = i % STAGES, (i // STAGES) & 1
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), PIECES * desc.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        part = tiles.index(stage).slice(piece * PIECE, PIECE)
        tma.async_copy_global_to_shared(desc, [rows[piece], column], ready.index(stage), part)


@gluon.jit
def rows_of(
    table_ptr,
    num_rows,
    start,
    end,
    BLOCK_N: gl.constexpr,
    PIECE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Where in the pool the pieces of a tile begin, whose first key is `start`. A piece without a
    key begins after the pool's last row, for which the copy engine gives zeros.
    """
    rows = ()
    for piece in gl.static_range(BLOCK_N // PIECE):
        key = start + piece * PIECE
        page = gl.load(table_ptr + key // PAGE_SIZE, mask=key < end, other=0)
        row = gl.where(key < end, page * PAGE_SIZE + key % PAGE_SIZE, num_rows)
        rows = rows + (row,)  # noqa: RUF005, because Gluon knows no *rows
    return rows


@gluon.jit
def load_latents(descs, rings, pages, keys, query, PAGE_SIZE: gl.constexpr):
    """The queries once, then tiles of latents as buffers become free. query: the first row."""
    q_desc, q_pe_desc, kv_desc, pe_desc = descs
    q, q_pe, left, right, pe = rings
    table_ptr, num_rows = pages
    begin, end = keys
    HALF: gl.constexpr = q_desc.block_type.shape[1]
    PIECE: gl.constexpr = kv_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = left[0].shape[1]
    num_tiles = num_tiles_of(begin, end, BLOCK_N)
    if num_tiles > 0:
        fill(q, 0, q_desc, query, 0)
        fill(q, 1, q_desc, query, HALF)
        fill(q_pe, 0, q_pe_desc, query, 2 * HALF)
    rows = rows_of(table_ptr, num_rows, begin, end, BLOCK_N, PIECE, PAGE_SIZE)
    for i in range(num_tiles):
        # a tile ahead, because the table's answer comes after all that was asked for before it
        start = begin + (i + 1) * BLOCK_N
        next_rows = rows_of(table_ptr, num_rows, start, end, BLOCK_N, PIECE, PAGE_SIZE)
        fill_pages(left, i, kv_desc, rows, 0)
        fill_pages(right, i, kv_desc, rows, HALF)
        fill_pages(pe, i, pe_desc, rows, 2 * HALF)
        rows = next_rows


@gluon.jit
def tell(numbers, side, x):
    """Leave a number a row for the other warpgroup. numbers: (where, an mbarrier each)."""
    numbers[0].index(side).store(x)
    mbarrier.arrive(numbers[1].index(side), count=1)


@gluon.jit
def hear(numbers, side, phase, ROW: gl.constexpr):
    """What warpgroup `side` has left."""
    mbarrier.wait(numbers[1].index(side), phase)
    return numbers[0].index(side).load(ROW)


@gluon.jit
def leave_weights(pe, flags, side, i, weights):
    """The weights of tile i for the other warpgroup, where its rotary keys were."""
    tile_of(pe, i).store(weights)
    fence_async_shared()
    mbarrier.arrive(flags.index(side), count=1)


@gluon.jit
def values_of(ring, i, start, end):
    """Tile i of V, this warpgroup's columns. The rows from the sequence's end to the page's become
    0, because 0 · NaN is NaN. Eight rows of 64 columns, 1 KiB, lie together.
    """
    tile = tile_of(ring, i)
    BLOCK_N: gl.constexpr = tile.shape[0]
    GROUPS: gl.constexpr = BLOCK_N // 8
    PARTS: gl.constexpr = tile.shape[1] // 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    if (start < end) & (start + BLOCK_N > end):
        groups = tile._reinterpret(tile.dtype, [PARTS * GROUPS, 8, 64], tile.layout)
        for group in range((end - start) // 8, GROUPS):
            row = start + group * 8 + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            is_key = gl.expand_dims(row < end, 1) & gl.full([8, 64], True, gl.int1, LAYOUT)
            for part in gl.static_range(PARTS):
                rows = groups.index(part * GROUPS + group)
                rows.store(gl.where(is_key, rows.load(LAYOUT), 0.0))
        fence_async_shared()
        gl.barrier()
    return tile


@gluon.jit
def column(x, OUT: gl.constexpr):
    """A number a row, [BLOCK_H], as a column for a tile in layout OUT."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, OUT)), 1)
