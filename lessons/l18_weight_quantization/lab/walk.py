"""What two splits of quantized_matmul_kernel touch, recorded from its compiled code: a film strip.

film_of_splits()
"""

import torch

from lessons.l18_weight_quantization.lab.testing import DEVICE, matrix
from lessons.l18_weight_quantization.optimized import Tiles, matmul
from lessons.toolbox.draw.figure import ClassFigure
from lessons.toolbox.draw.film import film
from lessons.toolbox.proof.numerics import draw

OUTPUTS, COLUMNS = 8, 128  # two groups of 64 columns, 32 bytes each


def film_of_splits() -> ClassFigure | None:
    """One row of x times 8 outputs in two splits, a group of 64 columns each: a step loads 32 bytes
    of every row of codes and the 64 numbers of x that they belong to, the first half of the group
    for the low halves of the bytes and the second for the high ones. None on a GPU.
    """
    weight = matrix("int4, zeros", OUTPUTS, COLUMNS)
    x = draw("normal", (1, COLUMNS), device=DEVICE)
    words = weight.codes.view(torch.int32)  # as the kernel reads them: four bytes, eight codes
    tensors = {"x": x, "words of codes": words, "scales": weight.scales}
    tiles = Tiles(16, 16, 32, 4, 2)
    return film(
        lambda: matmul(x, weight, tiles=tiles, num_splits=2),
        tensors,
        programs=[(0, 0, 0), (0, 0, 1)],
        kernel="quantized_matmul_kernel",
        title=(
            "Each split reads one group of every row: its codes once, and the x that belongs to it"
        ),
    )
