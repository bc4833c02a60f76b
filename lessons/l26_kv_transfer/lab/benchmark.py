"""Blocks of a pool gathered into rows, and scattered again, over the number of blocks.

    python -m lessons.toolbox.measure.bench 26

On a CPU the indexing of stand_ins.py stands for the kernel, which is interpreted and not timed.
"""

import torch

from lessons.l03_kv_cache.lab.workload import DTYPE, ON_GPU, THREADS, read_floor_s
from lessons.l26_kv_transfer import naive
from lessons.l26_kv_transfer.lab.testing import pool_from
from lessons.l26_kv_transfer.naive import block_bytes
from lessons.l26_kv_transfer.stand_ins import movers
from lessons.toolbox.measure.bench import Benchmark

# Llama-3-8B on a GPU, models/tiny on a CPU
LAYERS, KV_HEADS, HEAD_DIM = (32, 8, 128) if ON_GPU else (6, 2, 64)
BLOCK_SIZE = 16  # tokens
BLOCKS = [1, 4, 16, 64, 256]
BLOCK_BYTES = 2 * LAYERS * BLOCK_SIZE * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def inputs_of(count: int, device: torch.device) -> tuple:
    """A pool of twice as many blocks, and `count` of them, of which no two are neighbours."""
    num_blocks = 2 * count
    shape = LAYERS, num_blocks * BLOCK_SIZE + 1, KV_HEADS, HEAD_DIM
    pool = pool_from(
        num_blocks, *(torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    )
    assert block_bytes(pool) == BLOCK_BYTES
    return pool, list(range(0, num_blocks, 2))


def gathered(way):
    """A provider: the rows of the blocks, by naive.py or by what is right for the device."""

    def make(pool, blocks):
        module = way or movers(pool.k_slots.device)
        return lambda: module.gather(pool, blocks)

    return make


def there_and_back(way):
    """A provider: gather, then scatter what was gathered into the same blocks."""

    def make(pool, blocks):
        module = way or movers(pool.k_slots.device)

        def run():
            packed = module.gather(pool, blocks)
            module.scatter(pool, blocks, packed)
            return packed

        return run

    return make


OPTIMIZED = "one launch a tensor" if ON_GPU else "one indexing a tensor"
COMMON = dict(
    x_name="blocks",
    x_values=BLOCKS,
    quick_x_values=BLOCKS[:3],
    inputs=inputs_of,
    dtype=str(DTYPE).removeprefix("torch."),
    shape=f"{LAYERS} layers, {KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}{THREADS}",
    tolerance=0.0,
)
BENCHMARKS = [
    Benchmark(
        name="l26_gather",
        title="{x} blocks are packed {speedup:.1f}x as fast as by small copies",
        providers={
            "small copies": ("naive", gathered(naive)),
            OPTIMIZED: ("optimized", gathered(None)),
        },
        floor_s=lambda count: read_floor_s(count * BLOCK_BYTES),
        floor_label="reading the pages once",
        **COMMON,
    ),
    Benchmark(
        name="l26_there_and_back",
        title="{x} blocks are packed and unpacked {speedup:.1f}x as fast as by small copies",
        providers={
            "small copies": ("naive", there_and_back(naive)),
            OPTIMIZED: ("optimized", there_and_back(None)),
        },
        floor_s=lambda count: 2 * read_floor_s(count * BLOCK_BYTES),
        floor_label="reading the pages twice",
        **COMMON,
    ),
]
