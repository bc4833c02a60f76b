"""What the benchmark runs. On a GPU Llama-3-8B's heads; on a CPU six that share one KV head, so
that a sequence is one task.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.toolbox.measure.device import core_count, default_device, default_dtype
from lessons.toolbox.measure.hardware import default_working_set_bytes, read_bandwidth

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
HEADS, KV_HEADS, HEAD_DIM = (32, 8, 128) if ON_GPU else (6, 1, 64)
CONTEXTS = [2**n for n in (range(10, 18) if ON_GPU else range(12, 19))]  # tokens
# tokens: where the number of splits varies
LONG = 65536 if ON_GPU else 131072
# tokens: where the batch varies
BATCH_CONTEXT = 8192 if ON_GPU else 16384
BATCHES = [1, 2, 4, 8, 16, 32, 64][: None if ON_GPU else 6]  # sequences
SPLIT_SIZE = 512 if ON_GPU else 8192  # keys, whatever the batch
# relative; 16 bits on a GPU, 32 on a CPU
TOLERANCE = 3e-2 if ON_GPU else 1e-4
MACHINE = "" if ON_GPU else f" · {core_count()} cores"
SHAPE = f"heads {HEADS}/{KV_HEADS}, head_dim {HEAD_DIM}{MACHINE}"


def inputs_of(
    batch: int, context: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q: [B, Hq, D]; k, v: [B, context, Hkv, D]; context_lens: [B]."""
    q, k, v = (
        torch.randn(batch, *shape, HEAD_DIM, dtype=DTYPE, device=device)
        for shape in ((HEADS,), (context, KV_HEADS), (context, KV_HEADS))
    )
    return q, k, v, torch.full((batch,), context, dtype=torch.int32, device=device)


def kv_bytes(batch: int, context: int) -> int:
    """K and V of one layer, in bytes."""
    return 2 * batch * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize


@lru_cache
def bandwidth(working_set_bytes: int) -> float:
    """Bytes/s at which this machine reads a working set again and again; of a CPU, every core its
    share, as fast as one alone.
    """
    cores = 1 if ON_GPU else core_count()
    return cores * read_bandwidth(default_device(), working_set_bytes // cores)


def floor_s(batch: int, context: int) -> float:
    """Seconds to read K and V once: from memory on a GPU; from the caches where they fit on a CPU,
    whose caches stay warm.
    """
    read = kv_bytes(batch, context)
    return read / bandwidth(default_working_set_bytes(default_device()) if ON_GPU else read)
