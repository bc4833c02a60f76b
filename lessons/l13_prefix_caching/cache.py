"""What a prefix cache promises, and the block manager that asks it.

A block whose sequence has ended is free, and still holds K and V of its tokens. A prefix cache
remembers which free (or shared) block holds which tokens after which prefix, until a sequence
takes the block. So nothing is kept back: the cache is made of the memory that no sequence needs
now.

Two laws make this simple. A sequence owns its blocks from the first on, so the owner of a block
owns all blocks before it. And it returns the last block first. So a block is always taken before
the blocks before it in its prompt: the free list is the order of eviction, least recently used
first, and leaves before their parents.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lessons.l12_paged_kv.blocks import BlockManager, BlockPool


class PrefixCache(Protocol):
    """Remembers whole blocks by all tokens up to their end. Makes no block its own."""

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known prefix that leaves at least one token to compute."""

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Remember that blocks[i] holds the i-th whole block of tokens. Returns the blocks that are
        remembered for them: another block where one came first.
        """

    def forget(self, block: int) -> None:
        """The block is given to another sequence; it may never have been remembered."""

    def __contains__(self, block: int) -> bool:
        """Whether it remembers what the block holds."""


class NoCache(PrefixCache):
    """Remembers nothing: every prompt is computed in full. The others are compared with it."""

    def __init__(self, block_size: int):
        self.block_size = block_size

    def match(self, tokens: Sequence[int]) -> list[int]:
        return []

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        return list(blocks[: len(tokens) // self.block_size])

    def forget(self, block: int) -> None:
        pass

    def __contains__(self, block: int) -> bool:
        return False


class CachingPool(BlockPool):
    """A pool whose free blocks are the cache. Those that it does not remember are taken first."""

    def __init__(self, num_blocks: int, cache: PrefixCache):
        super().__init__(num_blocks, cache.forget)
        self.cache = cache
        self.free = OrderedDict(self.free)

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            super().release([block])
            # A block that was never full is of no use. At the end of the list it would
            # outlive older blocks that a prompt may ask for.
            if block in self.free and block not in self.cache:
                self.free.move_to_end(block, last=False)


class CachingBlockManager(BlockManager):
    """A BlockManager whose new sequences begin with the blocks that a cache knows."""

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache):
        super().__init__(num_blocks, block_size)
        self.cache = cache
        self.pool = CachingPool(num_blocks, cache)

    def reuse(self, sequence: int, tokens: Sequence[int]) -> int:
        """Let a new sequence begin with the blocks of a known prefix. Returns how many of its
        tokens need not be computed: fewer than all, because the last one's logits are wanted.
        """
        blocks = self.cache.match(tokens)
        # Before anything is taken, because taking a free block makes the cache forget it.
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


@dataclass
class Hits:
    """How much of the prompts was known. The two rates answer different questions: how often did
    anything help, and how much work was saved?
    """

    requests: int = 0
    hit_requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def count(self, tokens: int, known: int) -> None:
        """A prompt of so many tokens came, and so many of them were known."""
        self.requests += 1
        self.hit_requests += known > 0
        self.tokens += tokens
        self.hit_tokens += known

    @property
    def rate_per_request(self) -> float:
        """The share of requests of which anything was known."""
        return self.hit_requests / self.requests if self.requests else 0.0

    @property
    def rate_per_token(self) -> float:
        """The share of prompt tokens that was not computed."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0
