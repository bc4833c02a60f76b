"""A prefix cache by hashes: a block is known by its own tokens and the hash of all before it.

Source: vLLM's design document "Automatic Prefix Caching".
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import takewhile

from lessons.l13_prefix_caching.cache import PrefixCache

FIRST = b""  # in place of a hash before the first block


class HashBlocks(PrefixCache):
    """{hash of a prefix of whole blocks: the block that ends it}."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def match(self, tokens: Sequence[int]) -> list[int]:
        # - 1, because the last token has to be computed: its logits were not stored
        whole_blocks = (len(tokens) - 1) // self.block_size
        blocks = []
        for key in self.hashes(tokens, whole_blocks):
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        whole_blocks = len(tokens) // self.block_size
        # A sequence that grows comes again with the same beginning, whose names are known already.
        known = list(takewhile(self.__contains__, blocks[:whole_blocks]))
        start = len(known)
        before = FIRST
        if known:
            before = self.hash_of[known[-1]]
        keys = self.hashes(tokens, whole_blocks, start, before)
        for key, block in zip(keys, blocks[start:]):
            if key not in self.block_of:
                self.block_of[key] = block
                self.hash_of[block] = key
            known.append(self.block_of[key])
        return known

    def forget(self, block: int) -> None:
        if block in self:
            key = self.hash_of.pop(block)
            del self.block_of[key]

    def __contains__(self, block: int) -> bool:
        return block in self.hash_of

    def hashes(
        self, tokens: Sequence[int], count: int, start: int = 0, before: bytes = FIRST
    ) -> Iterator[bytes]:
        """One for each of the blocks from `start` to `count`, of all tokens up to the block's end.
        before: the hash of the block in front of `start`.

        Chained: each is made from the hash before it, so n blocks cost n, and not n². SHA-256,
        because two prompts with the same hash would read each other's K and V.
        """
        key = before
        for index in range(start, count):
            first = index * self.block_size
            own = array("q", tokens[first : first + self.block_size])
            key = hashlib.sha256(key + own.tobytes()).digest()
            yield key
