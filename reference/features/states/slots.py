"""Who owns which slot of the states. Nothing here touches a tensor, but for `copy`, which is given.

A sequence's table names its blocks, as in lesson 12, and its slot. A fork shares both. Who writes
first into what is shared gets a copy: of the last block, and of the slot, because a state is
written by every token.
"""

from collections.abc import Callable, Iterable

from lessons.l12_paged_kv.blocks import BlockManager, BlockPool, Copy, OutOfBlocks


class SlotTable(list):
    """The blocks of a sequence, and the slot of its state; None: it has none yet. spare: a second
    slot, of a state that may have to come back.
    """

    def __init__(self, blocks: Iterable[int] = (), slot: int | None = None):
        super().__init__(blocks)
        self.slot, self.spare = slot, None

    @property
    def slots(self) -> list[int]:
        """All that it owns."""
        return [slot for slot in (self.slot, self.spare) if slot is not None]


class SlotBlocks(BlockManager):
    """A BlockManager whose sequences have a slot each. copy(source, target): copies a state at
    once, before the step that `grow` is called for runs. more: arguments of the next manager.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        copy: Callable[[int, int], None],
        **more,
    ):
        super().__init__(num_blocks, block_size, **more)
        self.slots = BlockPool(num_slots)
        self.copy = copy
        self.tables: dict[int, SlotTable] = {}

    def needs(self, sequence: int, held: int, tokens: int) -> int:
        """As in lesson 12; more blocks than there are, where a slot is missing."""
        needed = super().needs(sequence, held, tokens)
        if self.lacks_slot(sequence, held, tokens) and not self.slots.num_free:
            return max(needed, self.num_free + 1)
        return needed

    def lacks_slot(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether a sequence has no slot, or would write into one that has other owners."""
        table = self.tables.get(sequence)
        if table is None or table.slot is None:
            return True
        return tokens > held and self.slots.owners[table.slot] > 1

    def grow(self, sequence: int, held: int, tokens: int) -> list[Copy]:
        """As in lesson 12, and a slot that the sequence owns alone."""
        lacks, table = self.lacks_slot(sequence, held, tokens), self.tables.get(sequence)
        if lacks and not self.slots.num_free:
            raise OutOfBlocks(f"a slot wanted, 0 of {self.slots.num_blocks} free")
        table = SlotTable() if table is None else table
        copies = super().grow(sequence, held, tokens)
        # the same object again, because it knows more than its blocks
        table[:] = self.tables[sequence]
        self.tables[sequence] = table
        if lacks:
            (own,) = self.slots.take(1)
            if table.slot is not None:
                self.copy(table.slot, own)
                self.slots.release([table.slot])
            table.slot = own
        return copies

    def fork(self, parent: int, child: int) -> None:
        """`child` begins as a copy of `parent` that shares its blocks and its slot."""
        super().fork(parent, child)
        slot = self.tables[parent].slot
        self.slots.share([slot])
        self.tables[child] = SlotTable(self.tables[child], slot)

    def free(self, sequence: int) -> None:
        """`sequence` gives back its blocks and its slots."""
        self.slots.release(self.tables[sequence].slots)
        super().free(sequence)

    def set_aside(self, sequence: int) -> None:
        """Copy a sequence's state before tokens run that may not stay. Raises OutOfBlocks."""
        table = self.tables[sequence]
        (table.spare,) = self.slots.take(1)
        self.copy(table.slot, table.spare)

    def settle(self, sequence: int, goes_back: bool) -> None:
        """They have run. goes_back: the state is the one that was set aside again."""
        table = self.tables[sequence]
        if goes_back:
            table.slot, table.spare = table.spare, table.slot
        self.slots.release([table.spare])
        table.spare = None
