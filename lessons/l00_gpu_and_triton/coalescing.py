"""How many bytes memory really moves when the lanes of a warp read with gaps between them.

Memory is read in sectors of 32 bytes. A warp's load fetches every sector that one of its 32 lanes
needs, whole. So what counts is not how many bytes a kernel asks for, but how many sectors they lie
in (CUDA C++ best practices guide, "Coalesced access to global memory").
"""

import numpy as np

from lessons.toolbox.measure.hardware import Chip

LANES, SECTOR_BYTES = 32, 32


def sectors(addresses: np.ndarray) -> int:
    """Sectors that one load of a warp fetches. addresses: [lanes], in bytes."""
    return len(np.unique(np.asarray(addresses) // SECTOR_BYTES))


def sectors_of_stride(stride: int, itemsize: int = 4) -> int:
    """Sectors of a warp that reads elements 0, stride, 2 · stride, …: 4 for neighbours in float32,
    32 where each lane has a sector of its own.
    """
    return sectors(np.arange(LANES) * stride * itemsize)


def moved_bytes(stride: int, count: int, itemsize: int = 4) -> float:
    """Bytes of `count` elements read with a stride, and written side by side."""
    read = count / LANES * sectors_of_stride(stride, itemsize) * SECTOR_BYTES
    return read + count * itemsize


def predicted_s(stride: int, count: int, chip: Chip, itemsize: int = 4) -> float:
    """Seconds for these bytes at the chip's bandwidth: a lower bound, nothing measured."""
    return moved_bytes(stride, count, itemsize) / chip.memory_bytes_per_s
