"""What memory has to give when the tiles of a grouped product run in one order or another: an L2
that forgets what was used longest ago, counted and not timed.

The programs of an SM run together with those of all other SMs, a wave, and go down the long
dimension at the same pace. So a wave asks memory for each of its row tiles and each of its blocks
of weights once, unless L2 still has it.
"""

from collections import OrderedDict
from collections.abc import Iterator

from torch import Tensor

from lessons.l23_experts.align import NOT_USED, align
from lessons.l23_experts.more.wide import PARTS, TILES
from lessons.toolbox.measure.hardware import CHIPS

BYTES = 2  # of a number
WAVE = CHIPS["h200"].sm_count  # one program fits on an SM


def rows_first(num_tiles: int, num_blocks: int) -> Iterator[tuple[int, int]]:
    """All tiles of rows take turns at a block of columns: the order of kernels.py's grid."""
    for block in range(num_blocks):
        for tile in range(num_tiles):
            yield tile, block


def in_groups(num_tiles: int, num_blocks: int, group: int) -> Iterator[tuple[int, int]]:
    """`group` tiles of rows take turns at a block: more/wide.py's order."""
    for first in range(0, num_tiles, group):
        for block in range(num_blocks):
            for tile in range(first, min(first + group, num_tiles)):
                yield tile, block


def moved_bytes(order, experts: list[int], size: int, tile_rows: int, tile_columns: int) -> int:
    """Bytes from memory for programs in this order. experts: of each tile of rows; size: numbers of
    a row.

    L2 holds strips (a tile's rows or a block of an expert's weights, all columns) and forgets the
    one that was used longest ago.
    """
    capacity, held, moved = CHIPS["h200"].l2_bytes, OrderedDict(), 0
    work = [(tile, block) for tile, block in order if experts[tile] != NOT_USED]
    for start in range(0, len(work), WAVE):
        wave = work[start : start + WAVE]
        strips = {("rows", tile): tile_rows for tile, _ in wave}
        strips |= {("weights", experts[tile], block): tile_columns for tile, block in wave}
        for strip, rows in strips.items():
            moved += 0 if strip in held else rows * size * BYTES
            held[strip] = rows * size * BYTES
            held.move_to_end(strip)
        while sum(held.values()) > capacity:
            held.popitem(last=False)
    return moved


def memory_bytes(chosen: Tensor, num_experts: int, size: int, inner: int) -> dict:
    """GB of the second product, whose rows are the longest: in both orders, and each number
    once.
    """
    tile_rows, columns = PARTS * TILES.part, TILES.block_n
    tiles = align(chosen, num_experts, tile_rows).experts.tolist()
    blocks = -(-size // columns)
    once = (num_experts * size + chosen.numel()) * inner * BYTES
    moved = {
        "rows_first": moved_bytes(rows_first(len(tiles), blocks), tiles, inner, tile_rows, columns),
        "in_groups": moved_bytes(
            in_groups(len(tiles), blocks, TILES.group), tiles, inner, tile_rows, columns
        ),
    }
    return {"once_gb": once / 1e9, **{name: each / 1e9 for name, each in moved.items()}}
