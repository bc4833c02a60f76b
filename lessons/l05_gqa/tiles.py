"""How large the tiles of gqa_decode_kernel are, and how many warps share them. Lesson 10 launches
its splits with the same.
"""

from functools import cache

import torch
from torch import Tensor

from lessons.toolbox.kernels.triton_ import triton

# rows, columns and inner length that a tensor core's product needs at least
SMALLEST_TILE = 16


@cache  # of few models, and asked for several times a launch
def tiles_for(group: int, head_dim: int, matrix_units: bool) -> dict[str, int]:
    """The constexprs that size a program's tiles: rows of q, columns, keys, and how many tiles are
    under way at once.

    16 KiB of K and as much of V in 16 bits, so that with the next pair under way 64 KiB are used of
    the 99 that every chip from sm_80 on has. Without matrix units products are unrolled into single
    multiplications, so a quarter of that.
    """
    block_d = max(SMALLEST_TILE, triton.next_power_of_2(head_dim))
    block_m, block_n = (
        triton.next_power_of_2(group),
        min(128, (8192 if matrix_units else 2048) // block_d),
    )
    sizes = {"BLOCK_M": block_m, "BLOCK_D": block_d, "BLOCK_N": block_n}
    return {name: max(SMALLEST_TILE, size) for name, size in sizes.items()} | {"NUM_STAGES": 3}


def warps_for(group: int, head_dim: int) -> int:
    """4 warps, 8 where the sums of a program, [BLOCK_M, BLOCK_D] in float32, would take half of
    their registers.
    """
    size = tiles_for(group, head_dim, True)
    return 4 if size["BLOCK_M"] * size["BLOCK_D"] <= 4096 else 8


def has_matrix_units(q: Tensor) -> bool:
    """Whether Triton multiplies tiles of q's kind on tensor cores: 16 bits, and sm_80 or later. q:
    any shape.
    """
    return q.element_size() == 2 and (
        q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) >= (8, 0)
    )
