"""What the tests of packed pages share: pools of every kind that the engine has, filled with bytes
of every value, and a pool that is made of given tensors.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.lab.testing import new_model
from lessons.l12_paged_kv.lab.testing import new_deepseek
from lessons.l12_paged_kv.runner import new_pool
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.runner import AUTO, quantized_rung_of
from lessons.l26_kv_transfer.naive import pages_of
from lessons.toolbox.measure.device import default_device

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
KINDS = ("float32", "bfloat16", "latents", "fp8", "int4", "latents int8")


def pool_of(kind: str, num_blocks: int, block_size: int, seed: int = 0) -> KVPool:
    """A small pool of one of KINDS whose every byte is random, so many of its numbers are NaN."""
    pool = empty_pool(kind, num_blocks, block_size)
    drawn = torch.Generator().manual_seed(seed)
    for slots in pool.tensors:
        values = torch.randint(0, 256, (slots.numel() * slots.itemsize,), generator=drawn)
        slots.copy_(values.to(torch.uint8).view(slots.dtype).view(slots.shape))
    return pool


def empty_pool(kind: str, num_blocks: int, block_size: int) -> KVPool:
    """One of KINDS, on the device where the kernels run."""
    words = kind.split()
    dtype = torch.bfloat16 if "bfloat16" in words else torch.float32
    model = (new_deepseek() if "latents" in words else new_model()).to(dtype).to(DEVICE)
    format = words[-1] if words[-1] in FORMATS else AUTO
    rung = quantized_rung_of(model, format)
    sizes = num_blocks, block_size, num_blocks * block_size
    return new_pool(rung.prepare(model), *sizes, rung)


def pool_from(num_blocks: int, *tensors: Tensor) -> SimpleNamespace:
    """What packing asks of a pool, over tensors: [layers, slots + 1, Hkv, width] each."""
    block_size = (tensors[0].shape[1] - 1) // num_blocks

    def blocks(slots: Tensor) -> Tensor:
        used = slots.narrow(-3, 0, num_blocks * block_size)
        return used.unflatten(-3, (num_blocks, block_size))

    return SimpleNamespace(
        tensors=tensors,
        k_slots=tensors[0],
        num_blocks=num_blocks,
        block_size=block_size,
        blocks=blocks,
    )


def by_tensors(function, num_blocks: int, blocks: Sequence[int]):
    """`gather` or `scatter` as `prove` calls it: with the two tensors of a pool, and the rows."""

    def called(k_slots: Tensor, v_slots: Tensor, *packed: Tensor):
        return function(pool_from(num_blocks, k_slots, v_slots), blocks, *packed)

    return called


def bytes_in(pool: KVPool) -> list[Tensor]:
    """Copies of all pages of a pool: [layers, parts, num_blocks, bytes of a page] each."""
    return [pages.clone() for pages in pages_of(pool)]
