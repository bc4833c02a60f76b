"""Pages of a pool, packed side by side: one small copy for each page, layer and tensor.

    packed = gather(pool, [7, 3])       # all that blocks 7 and 3 hold, a row each
    scatter(pool, [0, 5], packed)       # the same in blocks 0 and 5, of this pool or a like one

A page is what a block holds in one layer of one tensor. K and V of 16 tokens are far apart in a
pool: 32 layers times K and V are 64 pages. A link wants few large copies, so they are packed first.
optimized.py does the same in one launch for each tensor.

`block_bytes`, `pages_of` and the checks serve all versions.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.toolbox.model.arguments import is_whole, refuse

# that bytes may be moved as, by their size
WORDS = {
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


def gather(pool: KVPool, blocks: Sequence[int]) -> Tensor:
    """Copies of these blocks, a row each: [len(blocks), block_bytes] uint8, on the pool's device.

    A row holds the tensors of `pool.tensors` one after the other, and in each its layers. A block
    may be asked for twice. Raises ValueError for blocks that the pool does not have.
    """
    check_blocks(pool, blocks)
    packed = new_rows(pool, len(blocks))
    for row, block in zip(packed, blocks):
        for place, page in places_and_pages(pool, row, block):
            place.copy_(page)
    return packed


@torch.inference_mode()
def scatter(pool: KVPool, blocks: Sequence[int], packed: Tensor) -> None:
    """Write packed: [len(blocks), block_bytes] uint8 into these blocks; what `gather` returned.

    Raises ValueError for blocks that the pool does not have, for one that is named twice, and for
    rows of another size, dtype or device.
    """
    check_blocks(pool, blocks)
    check_packed(pool, blocks, packed)
    for row, block in zip(packed, blocks):
        for place, page in places_and_pages(pool, row, block):
            page.copy_(place)


def places_and_pages(pool: KVPool, row: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each page of a block: its place in a packed row, and itself. row: [block_bytes] uint8; both
    [bytes of a page] uint8, views.
    """
    for places, pages in zip(split_row(pool, row), pages_of(pool)):
        yield from zip(
            places.flatten(0, 1),
            pages[:, :, block].flatten(0, 1),
        )


# ---------------------------------------------------------------- where a block is


def pages_of(pool: KVPool) -> list[Tensor]:
    """The tensors of a pool as bytes: [layers, parts, num_blocks, bytes of a page] each, views.

    A layer has one part where a token's heads are side by side in memory. Lesson 19's scales have
    the slots of a head side by side, so there each head is a part.
    """
    return [
        pages_of_tensor(pool, slots)
        for slots in pool.tensors
        if slots.numel()  # the V of latents has no width
    ]


def pages_of_tensor(pool: KVPool, slots: Tensor) -> Tensor:
    """slots: [layers, slots + 1, Hkv, ...] -> [layers, parts, num_blocks, bytes of a page]."""
    blocks = pool.blocks(slots)  # [layers, num_blocks, block_size, Hkv, ...]
    is_by_heads = slots.stride(2) > slots.stride(1)
    if is_by_heads:
        blocks = blocks.permute(0, 3, 1, 2, 4)
    else:
        blocks = blocks.unsqueeze(1)
    pages = blocks.view(*blocks.shape[:3], -1)
    return pages.view(torch.uint8)


def block_bytes(pool: KVPool) -> int:
    """Bytes that a block holds in all layers and tensors."""
    return sum(pages[:, :, 0].numel() for pages in pages_of(pool))


def split_row(pool: KVPool, packed: Tensor) -> Iterator[Tensor]:
    """What belongs to each tensor: [..., block_bytes] -> [..., layers, parts, bytes of a page]."""
    at = 0
    for pages in pages_of(pool):
        layers, parts, _, page_bytes = pages.shape
        size = layers * parts * page_bytes
        part = packed.narrow(-1, at, size)
        yield part.unflatten(-1, (layers, parts, page_bytes))
        at += size


# ---------------------------------------------------------------- what is accepted


def new_rows(pool: KVPool, count: int) -> Tensor:
    """Room for `count` blocks: [count, block_bytes] uint8."""
    return torch.empty(
        count,
        block_bytes(pool),
        dtype=torch.uint8,
        device=pool.k_slots.device,
    )


def check_blocks(pool: KVPool, blocks: Sequence[int]) -> None:
    """Raise ValueError that names the first number that is none of the pool's blocks."""
    if not isinstance(blocks, (list, tuple, range)):
        refuse("blocks", blocks, "a list of block numbers")
    last = pool.num_blocks - 1
    for block in blocks:
        if not is_whole(block, 0, last):
            refuse("blocks", block, f"0 to {last}")


def check_packed(pool: KVPool, blocks: Sequence[int], packed: Tensor) -> None:
    """Raise ValueError unless packed: [len(blocks), block_bytes] can be written into these
    blocks.
    """
    if len(set(blocks)) < len(blocks):
        twice = min(block for block in blocks if list(blocks).count(block) > 1)
        accepted = "each block once, because two rows cannot share it"
        refuse("blocks", f"{twice} twice", accepted)
    if not isinstance(packed, Tensor):
        kind = type(packed).__name__
        refuse("packed", kind, "a tensor of bytes, as gather returns it")
    rows = [len(blocks), block_bytes(pool)]
    accepted = f"{rows}, torch.uint8, on {pool.k_slots.device}"
    got = f"{list(packed.shape)}, {packed.dtype}, on {packed.device}"
    if got != accepted:
        raise ValueError(f"packed: got {got}; accepted: {accepted}")
    if not packed.is_contiguous():
        raise ValueError(f"packed: got strides {packed.stride()}; accepted: a contiguous tensor")
