"""A ring of tiles in shared memory: one partition fills it by TMA, others read it.

Every buffer has two mbarriers. `ready` says that the bytes are there: the producer announces how
many, the TMA engine counts them. `free` says that all consumers are done: each arrives once. Both
sides count tiles, i = 0, 1, …; tile i lives in buffer i % STAGES and is the buffer's i //
STAGES-th, which gives the phase of the barriers. A ring is a tuple (tiles, ready, free).
"""

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
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language


@gluon.jit
def allocate_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of STAGES tiles of the descriptor `desc`, each read by CONSUMERS partitions."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    COLUMNS: gl.constexpr = desc.block_type.shape[1]
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, ROWS, COLUMNS], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return tiles, ready, free


@gluon.jit
def fill(ring, i, desc, row, column):
    """The producer asks for tile i, at (row, column) of the tensor, once its buffer is free."""
    tiles, ready, free = ring
    STAGES: gl.constexpr = tiles.shape[0]
    stage, phase = i % STAGES, (i // STAGES) & 1
    # ^ 1, because on a fresh barrier a wait for parity 1 passes: at first all buffers are free
    mbarrier.wait(free.index(stage), phase ^ 1)
    mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], ready.index(stage), tiles.index(stage))


@gluon.jit
def wait_for(ring, i):
    """A consumer waits for tile i. -> the tile"""
    tiles, ready, _free = ring
    STAGES: gl.constexpr = tiles.shape[0]
    mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
    return tiles.index(i % STAGES)


@gluon.jit
def tile_of(ring, i):
    """Tile i, which the consumer has waited for and not released."""
    return ring[0].index(i % ring[0].shape[0])


@gluon.jit
def release(ring, i):
    """A consumer is done with tile i: nothing of its own reads it any more."""
    tiles, _ready, free = ring
    mbarrier.arrive(free.index(i % tiles.shape[0]), count=1)


# ---------------------------------------------------------------- a ring that no copy engine fills


@gluon.jit
def allocate_written_ring(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """A ring of tiles that a partition writes from its registers: `ready` counts no bytes, but one
    arrival.
    """
    tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return tiles, ready, free


@gluon.jit
def claim(ring, i):
    """The producer waits until the buffer of tile i is free. -> the buffer"""
    tiles, _ready, free = ring
    STAGES: gl.constexpr = tiles.shape[0]
    mbarrier.wait(free.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
    return tiles.index(i % STAGES)


@gluon.jit
def hand_over(ring, i):
    """The producer has written tile i: consumers may multiply it."""
    tiles, ready, _free = ring
    fence_async_shared()  # products read shared memory by another way than stores write it
    mbarrier.arrive(ready.index(i % tiles.shape[0]), count=1)
