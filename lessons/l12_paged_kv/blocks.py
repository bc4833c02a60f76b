"""Who owns which block: a free list, a count of owners for each block, a table for each sequence.

Nothing here touches a tensor. A block is a number; where its K and V are is the pool's business,
and all layers use the same number. Read `BlockPool`, then `BlockManager.grow`.

    manager = BlockManager(num_blocks=8, block_size=4)
    manager.grow(0, 0, 6)    # sequence 0 holds nothing and gets room for 6 tokens: two blocks
    manager.fork(0, 1)       # sequence 1 shares them
    manager.grow(1, 6, 7)    # it holds 6, and gets a copy of the second before it writes there

Source: Kwon et al. 2023, Efficient Memory Management for Large Language Model Serving with
PagedAttention, sections 4.2 to 4.4.
"""

from collections.abc import Callable, Iterable
from itertools import islice

Copy = tuple[int, int]  # (from block, to block)


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than were asked for. `can_grow` tells beforehand."""


class BlockPool:
    """The blocks 0 … num_blocks - 1, and how many owners each of them has.

    forget(block): told of each block that is taken, because what it held is lost then.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None] = lambda block: None):
        if num_blocks < 1:
            raise ValueError(f"num_blocks: got {num_blocks}; accepted: 1 or more")
        self.num_blocks = num_blocks
        self.forget = forget
        self.free = dict.fromkeys(range(num_blocks))  # in the order of their return
        self.owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, which now have one owner: those that have been free for longest.

        Raises OutOfBlocks, and then takes none.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        taken = list(islice(self.free, count))
        for block in taken:
            del self.free[block]
            self.owners[block] = 1
            self.forget(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Each block gets one owner more. A free block comes back with what it holds."""
        for block in blocks:
            self.free.pop(block, None)
            self.owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Each block loses an owner; without one it is free. Raises ValueError for a free block."""
        for block in blocks:
            if not self.owners[block]:
                raise ValueError(f"block {block} is free already; accepted: one that has an owner")
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free[block] = None


class BlockManager:
    """The block table of each sequence. Sequences are known by a number, their id."""

    def __init__(self, num_blocks: int, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}; accepted: 1 or more tokens")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be had now."""
        return self.pool.num_free

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def blocks_held(self, tokens: int) -> int:
        """How many blocks a sequence has that holds so many tokens and runs none."""
        return self.blocks_for(tokens)

    def pages(self, sequence: int) -> list[int]:
        """All blocks that hold anything of `sequence`."""
        return self.tables[sequence]

    def needs(self, sequence: int, held: int, tokens: int) -> int:
        """How many free blocks it takes until `sequence`, which holds `held` tokens, can hold
        `tokens`: new ones, and one for the copy of a shared block that it would write into.
        """
        table = self.tables.get(sequence, ())
        return self.blocks_for(tokens) - len(table) + self._is_written_shared(table, held, tokens)

    def can_grow(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether `grow` with the same arguments would succeed."""
        return self.needs(sequence, held, tokens) <= self.num_free

    def grow(self, sequence: int, held: int, tokens: int) -> list[Copy]:
        """Give `sequence`, which holds `held` tokens, room for `tokens` in all.

        Returns the copies that have to be made in the pool's memory before anything is written.
        Raises OutOfBlocks, and then changes nothing.
        """
        table = self.tables.get(sequence, [])
        is_copied = self._is_written_shared(table, held, tokens)
        fresh = self.take(self.blocks_for(tokens) - len(table) + is_copied)
        copies = []
        if is_copied:
            # Copy on write: the other owners go on reading the block as it is.
            last = held // self.block_size
            copies = [(table[last], fresh[0])]
            self.pool.release([table[last]])
            table[last] = fresh.pop(0)
        self.tables[sequence] = table + fresh
        return copies

    def take(self, count: int) -> list[int]:
        """Free blocks with one owner. Raises OutOfBlocks."""
        return self.pool.take(max(0, count))

    def receive(self, sequence: int, tokens: int) -> None:
        """Give a new sequence blocks for tokens that have run: their K and V come from elsewhere.
        Raises OutOfBlocks.
        """
        self.grow(sequence, 0, tokens)

    def cut(self, sequence: int, tokens: int) -> None:
        """`sequence` gives back the blocks after its first `tokens` tokens."""
        table = self.tables[sequence]
        kept = self.blocks_for(tokens)
        # A block with other owners stays theirs.
        self.pool.release(reversed(table[kept:]))
        del table[kept:]

    def _is_written_shared(self, table: list[int], held: int, tokens: int) -> bool:
        """Whether the block that the next token goes into has other owners."""
        at = held // self.block_size
        return tokens > held and at < len(table) and self.pool.owners[table[at]] > 1

    def fork(self, parent: int, child: int) -> None:
        """`child` begins as a copy of `parent` that shares all of its blocks."""
        if child in self.tables:
            raise ValueError(f"child: sequence {child} has blocks; accepted: a new one")
        self.pool.share(self.tables[parent])
        self.tables[child] = list(self.tables[parent])

    def free(self, sequence: int) -> None:
        """`sequence` gives back its blocks. Free blocks are reused in the order of their return."""
        # The last block first, because it is the least likely to be of use to another sequence.
        self.pool.release(reversed(self.tables.pop(sequence)))
