"""Random histories of a block manager beside a memory of plain lists: what tests and exercises hold
against it.

Every sequence knows its own tokens. A block is a list. Whatever happens, reading a sequence through
its table must give its tokens, and the counts must add up.
"""

import random
from collections import Counter
from collections.abc import Callable

from lessons.l12_paged_kv.blocks import BlockManager, OutOfBlocks

OPERATIONS = ("grow", "grow", "step", "step", "step", "fork", "fork", "free", "free")


class History:
    """A manager, the memory that it manages, and what each sequence should find there.

    draw(low, high) -> a number between both, included: where randomness comes from.
    """

    def __init__(self, manager: BlockManager, draw: Callable[[int, int], int]):
        self.manager = manager
        self.draw = draw
        self.memory = [[None] * manager.block_size for _ in range(manager.num_blocks)]
        self.tokens: dict[int, list[int]] = {}
        self.names = 0
        self.refused = 0

    def run(self, operations: int) -> None:
        """So many random operations, a look at everything after each, and an empty pool at last."""
        for _ in range(operations):
            self.operate(OPERATIONS[self.draw(0, len(OPERATIONS) - 1)])
            self.check()
        for sequence in list(self.tokens):
            self.free(sequence)
        assert self.manager.num_free == self.manager.num_blocks, (
            f"{self.manager.num_blocks - self.manager.num_free} blocks are lost: no sequence owns "
            "them, and they are not free"
        )

    def operate(self, name: str) -> None:
        """One operation on a random sequence; on a new one if there is none."""
        if name == "grow" or not self.tokens:
            count = self.draw(1, 2 * self.manager.block_size + 1)
            self.names += 1
            self.write(self.names, count)
        elif name == "step":
            self.write(self.some(), self.draw(1, 3))
        elif name == "fork":
            parent = self.some()
            self.names += 1
            self.manager.fork(parent, self.names)
            self.tokens[self.names] = list(self.tokens[parent])
        else:
            self.free(self.some())

    def some(self) -> int:
        """One of the sequences that there are."""
        return sorted(self.tokens)[self.draw(0, len(self.tokens) - 1)]

    def write(self, sequence: int, count: int) -> None:
        """Let a sequence hold `count` tokens more, which no other sequence has."""
        manager, old = self.manager, self.tokens.get(sequence, [])
        held = len(old)
        wanted = manager.needs(sequence, held, held + count) <= manager.num_free
        try:
            copies = manager.grow(sequence, held, held + count)
        except OutOfBlocks:
            assert not wanted, "grow found no blocks where `needs` says that there are enough"
            self.refused += 1
            return
        assert wanted, "grow took blocks where `needs` says that there are not enough"
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        new = [1000 * sequence + held + i for i in range(count)]
        table, size = manager.tables[sequence], manager.block_size
        for position, token in enumerate(new, start=held):
            self.memory[table[position // size]][position % size] = token
        self.tokens[sequence] = old + new

    def free(self, sequence: int) -> None:
        """End a sequence."""
        self.manager.free(sequence)
        del self.tokens[sequence]

    def check(self) -> None:
        """Each sequence reads its own tokens; a block has as many owners as tables that name it."""
        manager, size = self.manager, self.manager.block_size
        for sequence, tokens in self.tokens.items():
            table = manager.tables[sequence]
            assert len(table) == -(-len(tokens) // size), (
                f"sequence {sequence} holds {len(tokens)} tokens in {len(table)} blocks of {size}"
            )
            found = [self.memory[block][i] for block in table for i in range(size)]
            assert found[: len(tokens)] == tokens, (
                f"sequence {sequence} reads {found[: len(tokens)]}, it wrote {tokens}"
            )
        named = Counter(block for table in manager.tables.values() for block in table)
        owners = {b: count for b, count in enumerate(manager.pool.owners) if count}
        assert owners == dict(named), f"owners {owners}, but the tables name {dict(named)}"
        free = set(range(manager.num_blocks)) - set(named)
        assert set(manager.pool.free) == free and manager.num_free == len(free), (
            f"free are {sorted(manager.pool.free)}, but unowned are {sorted(free)}"
        )


def random_history(manager: BlockManager, seed: int, operations: int = 60) -> History:
    """A history that is drawn from a seed."""
    history = History(manager, random.Random(seed).randint)
    history.run(operations)
    return history
