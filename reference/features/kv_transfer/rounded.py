"""Blocks that travel in 8 bits: K and V as E4M3, with a scale for each block, layer and KV head.

    pages = RoundedPages([pool, *drafts])
    packed = pages.read([3, 7], pages.now())    # half the bytes of a cache of 16 bits, and scales
    pages.write([0, 5], packed, pages.now())    # numbers in the pool's dtype again

The format is lesson 19's, with a longer row: all numbers of a head in a block share a scale, where
lesson 19 has one for each token. E4M3 has an exponent, so a scale only has to bring the numbers
into its range. For 16 tokens and heads of 128 numbers the scales are 0.2 % of the bytes then, where
those of lesson 19 are 1.5 %.

The error: a number x comes as y with |x - y| <= max(|x| / 17, amax / 458,752), and is then rounded
to the pool's dtype. amax is the largest magnitude of its head in the block. 1/17: of two codes side
by side, 16 and 18 say, the middle is 17. 458,752 = 448 * 1024: the largest code is 448, and the
smallest ones are 1/512 apart. A head with a NaN or an infinity comes as NaN in all of its block, so
the fault stays visible.

A draft's K and V travel as they are, because they change no token.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l19_kv_quantization.formats import Float8, wide
from lessons.l26_kv_transfer.naive import new_rows, split_row
from lessons.l26_kv_transfer.pages import Pages

FP8 = Float8()


class RoundedPages(Pages):
    """Pages whose rows hold the first pool's K and V in 8 bits. It holds plain numbers."""

    def row_bytes(self, pool: KVPool) -> int:
        if pool is not self.pools[0]:
            return super().row_bytes(pool)
        return sum(sum(each) for each in code_and_scale_bytes(pool))

    def pack(self, pool: KVPool, blocks: Sequence[int]) -> Tensor:
        rows = super().pack(pool, blocks)
        if pool is not self.pools[0]:
            return rows
        parts = []
        for slots, part in zip(stored(pool), split_row(pool, rows)):
            numbers = as_numbers(pool, slots, part)  # [rows, layers, block_size, Hkv, D]
            by_head = numbers.transpose(2, 3).flatten(-2)  # [rows, layers, Hkv, block_size · D]
            codes, scales = FP8.quantize(wide(by_head))
            parts += [codes.flatten(1), scales.flatten(1).contiguous().view(torch.uint8)]
        return torch.cat(parts, dim=1)

    def unpack(self, pool: KVPool, blocks: Sequence[int], rows: Tensor) -> None:
        if pool is not self.pools[0]:
            super().unpack(pool, blocks, rows)
            return
        exact, at = new_rows(pool, len(blocks)), 0
        sizes = code_and_scale_bytes(pool)
        for slots, place, each in zip(stored(pool), split_row(pool, exact), sizes):
            heads, width = slots.shape[-2:]
            codes, scales = rows.narrow(1, at, sum(each)).split(each, dim=1)
            shape = len(slots), heads, pool.block_size * width
            # contiguous, because bytes are seen as wider numbers only where these may begin
            scales = scales.contiguous().view(scale_dtype(slots)).unflatten(1, (*shape[:2], 1))
            by_head = FP8.dequantize(codes.unflatten(1, shape), scales)
            numbers = by_head.unflatten(-1, (pool.block_size, width)).transpose(2, 3)
            as_numbers(pool, slots, place).copy_(numbers)
            at += sum(each)
        super().unpack(pool, blocks, exact)


def stored(pool: KVPool) -> Iterator[Tensor]:
    """The tensors of which a row holds something, in its order: [layers, slots + 1, Hkv, D] each.
    The V of latents has no width.
    """
    return (slots for slots in pool.tensors if slots.numel())


def code_and_scale_bytes(pool: KVPool) -> list[list[int]]:
    """[bytes of codes, bytes of scales] that a block has of each tensor."""
    found = []
    for slots in stored(pool):
        layers, _, heads, width = slots.shape
        codes = layers * heads * pool.block_size * width
        found.append([codes, layers * heads * scale_dtype(slots).itemsize])
    return found


def scale_dtype(slots: Tensor) -> torch.dtype:
    """Of scales for slots: [...]. float32, and float64 for a pool of it: 16 bits would round the
    scale of small numbers to 0.
    """
    return torch.float64 if slots.dtype == torch.float64 else torch.float32


def as_numbers(pool: KVPool, slots: Tensor, part: Tensor) -> Tensor:
    """The bytes of one tensor in some rows as its numbers, a view. part: [rows, layers, 1, bytes of
    a page] -> [rows, layers, block_size, Hkv, D].
    """
    return part[:, :, 0].view(slots.dtype).unflatten(-1, (pool.block_size, *slots.shape[-2:]))
