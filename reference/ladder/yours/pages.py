"""Exercise 26.2, the kernel that packs pages, where lesson 26 reads blocks of a pool."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l26_kv_transfer.naive import check_blocks, new_rows, pages_of, split_row

MOST = 4096  # values of a piece: few programs, because a machine without a GPU interprets them


def gather(yours: Callable, original: Callable) -> Callable:
    """pack_pages in place of lesson 26's gather on a CPU, for pools in float32."""

    def read(pool: KVPool, blocks: Sequence[int]) -> Tensor:
        if not blocks or any(slots.dtype != torch.float32 for slots in pool.tensors):
            return original(pool, blocks)
        check_blocks(pool, blocks)
        packed, chosen = new_rows(pool, len(blocks)), torch.tensor(list(blocks))
        for pages, place in zip(pages_of(pool), split_row(pool, packed)):
            values = pages.view(torch.float32)  # [layers, parts, num_blocks, PAGE]
            piece = min(MOST, 1 << (values.shape[-1] - 1).bit_length())
            for part in range(values.shape[1]):
                rows = yours(values[:, part], chosen, piece)  # [rows, layers, PAGE]
                place[:, :, part] = rows.contiguous().view(torch.uint8)
        return packed

    return read
