"""Pages of a pool, packed side by side: one launch for each tensor.

Read `gather_kernel` beside the loops of naive.py: the grid is what they loop over, and a page is
copied in pieces. Bytes are moved as words, of 16 bytes in one instruction where the addresses allow
it. stand_ins.py does the same in PyTorch, for machines where kernels would be interpreted.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_grid
from lessons.l03_kv_cache.cache import KVPool
from lessons.l26_kv_transfer.naive import (
    WORDS,
    block_bytes,
    check_blocks,
    check_packed,
    new_rows,
    pages_of,
)
from lessons.toolbox.kernels.triton_ import tl, triton

__all__ = ["block_bytes", "gather", "scatter"]

WIDEST = 16  # bytes that a thread loads by one instruction
PIECE_WORDS = 1024  # of a page, for one program: 8 KiB, four loads for each of its threads
MAX_WARPS = 4


@triton.jit
def piece_at(
    blocks_ptr,
    parts,
    stride_layer,
    stride_part,
    stride_row,
    PAGE: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """What this program copies: its words in the pool, the same words in the packed rows, and which
    of them exist.
    """
    row, run = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(blocks_ptr + row)
    in_pool = (run // parts) * stride_layer + (run % parts) * stride_part + block * PAGE
    in_row = row * stride_row + run * PAGE
    word = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    # Without this the compiler takes a page to begin at any word, and loads word by word.
    in_pool, in_row = tl.multiple_of(in_pool, [ALIGNED]), tl.multiple_of(in_row, [ALIGNED])
    return in_pool + word, in_row + word, word < PAGE


@triton.jit
def gather_kernel(
    pages_ptr,
    packed_ptr,
    blocks_ptr,
    parts,
    stride_layer,
    stride_part,
    stride_row,
    PAGE: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per block, part of a layer and piece of a page. PAGE, PIECE and strides are in
    words; ALIGNED: words of which every page begins at a multiple.
    """
    source, target, inside = piece_at(
        blocks_ptr, parts, stride_layer, stride_part, stride_row, PAGE, PIECE, ALIGNED
    )
    tl.store(packed_ptr + target, tl.load(pages_ptr + source, mask=inside, other=0), mask=inside)


@triton.jit
def scatter_kernel(
    pages_ptr,
    packed_ptr,
    blocks_ptr,
    parts,
    stride_layer,
    stride_part,
    stride_row,
    PAGE: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The way back. Arguments as in gather_kernel."""
    target, source, inside = piece_at(
        blocks_ptr, parts, stride_layer, stride_part, stride_row, PAGE, PIECE, ALIGNED
    )
    tl.store(pages_ptr + target, tl.load(packed_ptr + source, mask=inside, other=0), mask=inside)


def gather(pool: KVPool, blocks: Sequence[int]) -> Tensor:
    """As naive.py's `gather`: [len(blocks), block_bytes] uint8. Raises ValueError."""
    check_blocks(pool, blocks)
    packed = new_rows(pool, len(blocks))
    numbers = on_device(blocks, packed.device)
    for launch in launches(pool, packed):
        launch.run(gather_kernel, numbers)
    return packed


@torch.inference_mode()
def scatter(pool: KVPool, blocks: Sequence[int], packed: Tensor) -> None:
    """As naive.py's `scatter`. packed: [len(blocks), block_bytes] uint8. Raises ValueError."""
    check_blocks(pool, blocks)
    check_packed(pool, blocks, packed)
    numbers = on_device(blocks, packed.device)
    for launch in launches(pool, packed):
        launch.run(scatter_kernel, numbers)


# ---------------------------------------------------------------- the launches


class Launch(NamedTuple):
    """One tensor of a pool as words, and its place in the packed rows."""

    pages: Tensor  # [layers, parts, num_blocks, words of a page]
    packed: Tensor  # [rows, words of all its pages]
    aligned: int  # words of which every page begins at a multiple

    def run(self, kernel, blocks: Tensor) -> None:
        """Launch it for blocks: [rows] int64."""
        layers, parts, _, page = self.pages.shape
        check_grid("pool", layers * parts, "layers and heads")
        piece, num_warps = piece_for(page, self.aligned)
        kernel[len(blocks), layers * parts, triton.cdiv(page, piece)](
            self.pages,
            self.packed,
            blocks,
            parts,
            self.pages.stride(0),
            self.pages.stride(1),
            self.packed.stride(0),
            PAGE=page,
            PIECE=piece,
            ALIGNED=self.aligned,
            num_warps=num_warps,
        )


def launches(pool: KVPool, packed: Tensor) -> Iterator[Launch]:
    """A launch for each tensor of a pool. packed: [rows, block_bytes] uint8; none for no rows."""
    at = 0
    for pages in pages_of(pool) if len(packed) else ():
        layers, parts, _, page_bytes = pages.shape
        size = layers * parts * page_bytes
        places = packed[:, at : at + size]
        unit = math.gcd(WIDEST, page_bytes, *pages.stride()[:2], packed.stride(0))
        for x in (pages, places):
            # The offset, too, because a tensor seen as wider words must begin at one.
            unit = math.gcd(unit, x.data_ptr(), x.storage_offset())
        word = min(unit, max(WORDS))
        yield Launch(pages.view(WORDS[word]), places.view(WORDS[word]), unit // word)
        at += size


def piece_for(page: int, aligned: int) -> tuple[int, int]:
    """(words of a piece, warps of a program) for pages of so many words. More warps than a piece
    has loads for would copy nothing.
    """
    piece = min(PIECE_WORDS, triton.next_power_of_2(page))
    return piece, max(1, min(MAX_WARPS, piece // (32 * aligned)))


def on_device(blocks: Sequence[int], device: torch.device) -> Tensor:
    """The numbers where the kernels read them: [rows] int64. A GPU is sent them from pinned memory,
    so the CPU does not wait for it.
    """
    numbers = torch.tensor(list(blocks), dtype=torch.int64, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)
