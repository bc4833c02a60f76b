"""Which keys a tile of queries has to visit, which of those tiles need no mask, and how large tiles
are on which chip.

Plain arithmetic: naive.py walks by it, optimized.py repeats `key_range` in Triton, the figures draw
it.

Source: Dao 2023, FlashAttention-2, section 3.1 (blocks above the diagonal are skipped, blocks below
need no mask).
"""

from dataclasses import dataclass

import torch

from lessons.toolbox.measure.device import compiled_chip

VISITED, UNMASKED, SKIPPED = "visited, with a mask", "visited, no mask needed", "skipped"


@dataclass(frozen=True)
class Tiles:
    """The size of a program's tiles and how it is launched: BLOCK_M queries and BLOCK_N keys at a
    time.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


def key_range(
    start_m: int,
    num_queries: int,
    num_keys: int,
    tiles: Tiles,
    causal: bool = True,
    window: int | None = None,
) -> tuple[int, int, int]:
    """(begin, full_end, end): queries start_m … start_m + block_m - 1 visit the keys begin … end -
    1, tile by tile.

    Tiles before full_end are below the diagonal and hold no key beyond the last: they need no mask,
    except that of a window. begin and full_end are multiples of block_n.
    """
    block_m, block_n = tiles.block_m, tiles.block_n
    # the key of the tile's first query: bottom-right aligned
    first = start_m + num_keys - num_queries
    # rounded down: the last tile may be a partial one
    begin, full_end, end = 0, num_keys // block_n * block_n, num_keys
    if causal:
        # the last query sees its own key, first + block_m - 1
        end = min(end, max(0, first + block_m))
        # the first query sees the whole tile
        full_end = min(full_end, max(0, first + 1) // block_n * block_n)
    if window is not None:
        # the first query's window reaches furthest back
        begin = min(max(0, first - window + 1) // block_n * block_n, full_end)
    return begin, full_end, end


def tile_map(
    num_queries: int, num_keys: int, tiles: Tiles, causal: bool = True, window: int | None = None
) -> list[list[str]]:
    """What happens to each tile of keys, for each tile of queries: rows of VISITED, UNMASKED or
    SKIPPED.
    """
    rows = []
    for start_m in range(0, num_queries, tiles.block_m):
        begin, full_end, end = key_range(start_m, num_queries, num_keys, tiles, causal, window)
        rows.append(
            [
                SKIPPED
                if not begin <= start_n < end
                else VISITED
                if start_n >= full_end or window is not None
                else UNMASKED
                for start_n in range(0, num_keys, tiles.block_n)
            ]
        )
    return rows


# ---------------------------------------------------------------- how large

# float32, and T4: no tensor cores
FFMA = {64: Tiles(32, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(32, 16, 8, 1)}
# because from sm_90 on the compiler spills registers with the others
FFMA_90 = FFMA | {256: Tiles(16, 16, 4, 1)}
# Compute capability -> {largest head size: tiles} for 16-bit inputs. Chosen by the compiler: no
# spills (float32: 128 bytes at most), shared memory within the chip's limit
# (test_every_configuration_compiles). Those of sm_90 were timed on an H200, the others on no chip;
# none was tuned: autotune before you ship.
CONFIGS: dict[int, dict[int, Tiles]] = {
    75: FFMA,
    80: {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 3), 256: Tiles(64, 32, 8, 2)},
    # and 8.9: 99 KiB of shared memory
    86: {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(64, 32, 8, 1)},
    90: {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)},
    100: {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 128, 8, 2), 256: Tiles(64, 64, 8, 2)},
    # 99 KiB again
    120: {64: Tiles(128, 64, 8, 2), 128: Tiles(128, 32, 8, 2), 256: Tiles(64, 32, 8, 1)},
}


def tiles_for(capability: int | None, head_dim: int, itemsize: int) -> Tiles:
    """For a chip (compute capability, 90 for 9.0; None where kernels are interpreted), the larger
    of a head's sizes, and the bytes of an element.

    A chip that is not listed takes the entry of the nearest older one. Raises ValueError for a head
    size above 256.
    """
    if head_dim > 256:
        raise ValueError(f"head_dim: got {head_dim}; accepted: up to 256")
    if capability is None:
        return Tiles(32, 32)
    ffma = FFMA if capability < 90 else FFMA_90
    table = (
        ffma
        if itemsize == 4
        else CONFIGS[max((chip for chip in CONFIGS if chip <= capability), default=75)]
    )
    return table[min(size for size in table if size >= head_dim)]


def capability(device: torch.device) -> int | None:
    """The compute capability of a device's chip, 90 for 9.0; None for a CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def chip_of(device: torch.device) -> int | None:
    """As `capability`; on a CPU the chip whose compiled code it runs, None if it interprets."""
    return capability(device) or compiled_chip()


def has_e4m3(device: torch.device) -> bool:
    """Whether Triton converts E4M3 there: from sm_89 on, and in the interpreter."""
    chip = chip_of(device)
    return chip is None or chip >= 89
