"""What `make profile LESSON=00` runs: the same sums and copies with and without gaps."""

import torch

from lessons.l00_gpu_and_triton import optimized as kernels

COUNT, STRIDE, SIZE = 8192, 8, 64
X = torch.arange(COUNT * STRIDE, dtype=torch.float32)
A, B = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)


def optimized():
    """Every number once, neighbours together."""
    return kernels.scale(X, 2.0)


def gaps():
    """Every eighth number."""
    return kernels.every_nth(X, STRIDE, COUNT)


def rows():
    return kernels.row_max(X.view(-1, 1024))


def columns():
    return kernels.column_sums(X.view(-1, 1024))


def tiles():
    return kernels.tile_product(A, B)
