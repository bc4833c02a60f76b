"""The packing of pages in PyTorch, one indexing a tensor: for machines where kernels would be
interpreted.
"""

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l26_kv_transfer.naive import (
    WORDS,
    block_bytes,
    check_blocks,
    check_packed,
    new_rows,
    pages_of,
    split_row,
)

__all__ = ["block_bytes", "gather", "movers", "scatter"]


def movers(device: torch.device) -> ModuleType:
    """The module whose block_bytes, gather and scatter are right for pools on this device. Triton
    is imported for a GPU only.
    """
    if device.type != "cuda":
        from lessons.l26_kv_transfer import stand_ins

        return stand_ins
    from lessons.l26_kv_transfer import optimized

    return optimized


def gather(pool: KVPool, blocks: Sequence[int]) -> Tensor:
    """As naive.py's `gather`: [len(blocks), block_bytes] uint8. Raises ValueError."""
    check_blocks(pool, blocks)
    packed = new_rows(pool, len(blocks))
    chosen = torch.tensor(list(blocks), dtype=torch.int64, device=packed.device)
    for pages, place in zip(pages_of(pool), split_row(pool, packed)):
        pages, place = in_words(pages, place)
        place.copy_(pages.index_select(2, chosen).permute(2, 0, 1, 3))
    return packed


@torch.inference_mode()
def scatter(pool: KVPool, blocks: Sequence[int], packed: Tensor) -> None:
    """As naive.py's `scatter`. packed: [len(blocks), block_bytes] uint8. Raises ValueError."""
    check_blocks(pool, blocks)
    check_packed(pool, blocks, packed)
    chosen = torch.tensor(list(blocks), dtype=torch.int64, device=packed.device)
    for pages, place in zip(pages_of(pool), split_row(pool, packed)):
        pages, place = in_words(pages, place)
        pages.index_copy_(2, chosen, place.permute(1, 2, 0, 3))


def in_words(*tensors: Tensor) -> list[Tensor]:
    """Tensors of bytes as the widest words that all of them allow: PyTorch moves an element at a
    time, so a word of 8 bytes takes an eighth of the time of its bytes.
    """
    unit = max(WORDS)
    for x in tensors:
        unit = math.gcd(unit, x.shape[-1], *x.stride()[:-1], x.storage_offset(), x.data_ptr())
    return [x.view(WORDS[unit]) for x in tensors]
