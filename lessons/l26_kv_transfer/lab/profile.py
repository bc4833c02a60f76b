"""What `make profile LESSON=26` runs: eight blocks of a small pool, gathered and scattered."""

import torch

from lessons.l26_kv_transfer import naive as small_copies
from lessons.l26_kv_transfer import optimized as kernels
from lessons.l26_kv_transfer.lab.testing import pool_from

LAYERS, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 4, 32, 16, 8, 128
GENERATOR = torch.Generator().manual_seed(26)
SHAPE = LAYERS, NUM_BLOCKS * BLOCK_SIZE + 1, KV_HEADS, HEAD_DIM
POOL = pool_from(
    NUM_BLOCKS, *(torch.randn(SHAPE, generator=GENERATOR).bfloat16() for _ in range(2))
)
BLOCKS = torch.randperm(NUM_BLOCKS, generator=GENERATOR)[:8].tolist()


def optimized():
    """Two launches each way: K and V."""
    packed = kernels.gather(POOL, BLOCKS)
    kernels.scatter(POOL, BLOCKS, packed)


def naive():
    """A copy for each page, layer and tensor, each way."""
    packed = small_copies.gather(POOL, BLOCKS)
    small_copies.scatter(POOL, BLOCKS, packed)
