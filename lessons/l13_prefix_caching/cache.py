"""What a prefix cache promises, and the block manager that asks it.

A block whose sequence has ended is free, and still holds K and V of its tokens. A prefix cache
remembers which free (or shared) block holds which tokens behind which prefix, until somebody takes
the block. So nothing is kept back: the cache is made of the memory that nobody needs now.

Two laws make this simple. A sequence owns its blocks from the first on, so whoever owns a block owns
all blocks before it. And it returns the last block first. So a block is always taken before the
blocks that stand in front of it: the free list is the order of eviction, least recently used first,
and leaves before their parents.
"""

from collections.abc import Sequence
from typing import Protocol

from lessons.l12_paged_kv.blocks import BlockManager, BlockPool


class PrefixCache(Protocol):
    """Remembers whole blocks by all tokens up to their end. Makes no block its own."""

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix that leaves at least one token to compute."""

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Remember that blocks[i] holds the i-th whole block of tokens. Returns the blocks that are
        remembered for them: another one where somebody was first.
        """

    def forget(self, block: int) -> None:
        """The block is given to somebody else; it may never have been remembered."""


class CachingBlockManager(BlockManager):
    """A BlockManager whose new sequences begin with the blocks that a cache knows."""

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache):
        super().__init__(num_blocks, block_size)
        self.cache = cache
        self.pool = BlockPool(num_blocks, cache.forget)

    def reuse(self, sequence: int, tokens: Sequence[int]) -> int:
        """Let a new sequence begin with the blocks of a known prefix. Returns how many of its tokens
        need not be computed: less than all, because the last one's logits are wanted.
        """
        blocks = self.cache.match(tokens)
        self.pool.share(blocks)
        self.tables[sequence] = blocks
        return len(blocks) * self.block_size

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tell the cache which tokens the sequence's blocks hold now, all computed.

        Where it knows another block with the same tokens, the sequence takes that one and returns
        its own. So two requests that computed one prompt side by side keep it once, and the first
        law holds.
        """
        table = self.tables[sequence]
        known = self.cache.insert(tokens, table)
        for index, (mine, other) in enumerate(zip(table, known)):
            if mine != other:
                self.pool.share([other])
                self.pool.release([mine])
                table[index] = other
