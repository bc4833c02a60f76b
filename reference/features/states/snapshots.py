"""Prefix caching of states: copies at the ends of blocks, and which of them are worth their bytes.

K and V can be cut anywhere. A state is the state after some number of tokens and of no other, so a
prefix helps only up to a point at which the state was copied: a snapshot. It is known by the hash
of the block that ends there (lesson 13), and is of use as long as the K and V before it are.

A snapshot is in a slot that no sequence owns, as lesson 13's cache is in blocks that none owns: the
free list is the order of eviction. So snapshots keep nothing back from a sequence. Those that are
proven, by rule 1 or by a sequence that began from them, leave after the others, or those of rule 3,
one for each request that decodes, would drive them out. At most a quarter of the slots is proven at
a time (segmented LRU), so that old favourites leave, too.

Which are taken. One is as large as K and V of thousands of tokens, so not one at each block's end:

1. A prompt stops where the blocks that another one has computed end, if no snapshot is there. Two
   prompts have begun alike then, and a third one may. That costs one step more, once.
2. A prompt that a step's budget cuts is cut at a block's end.
3. Wherever a step ends at a block's end the state is copied, at no step more. It takes the place of
   the sequence's last snapshot, unless that is where prompts part or has served another, if it is
   so near that K and V between the two have fewer bytes than it (`worth_tokens`). So a conversation
   keeps its newest state, and the snapshots of a long prompt take no more memory than its K and V.

Sources: SGLang's MambaRadixCache (snapshots where prompts part, an order of eviction of their own);
vLLM, mamba_cache_mode="align" (the state at the last block's end of each step).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lessons.l12_paged_kv.blocks import Copy
from lessons.l13_prefix_caching.cache import CachingBlockManager, CachingPool
from lessons.l13_prefix_caching.naive import HashBlocks
from reference.features.states.slots import SlotBlocks, SlotTable

SHORTEST = 64  # tokens that a snapshot is to spare, not tuned: below, the step more hardly pays


@dataclass
class SnapshotCounts:
    """Since the engine began. taken: copied; replaced: of these, over an older one of the same
    sequence; hits: sequences that began from one; evicted: whose slot or block another sequence
    took; missed_tokens: of prompts, whose K and V were known and whose state was not.
    """

    taken: int = 0
    replaced: int = 0
    hits: int = 0
    evicted: int = 0
    missed_tokens: int = 0


class Snapshots:
    """{hash of a prefix: the slot with the state after it}. Makes no slot its own. most_proven: how
    many are proven at a time.
    """

    def __init__(self, most_proven: int):
        self.slot_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.proven: dict[int, None] = {}  # slots, the newest last
        self.most_proven = most_proven
        self.counts = SnapshotCounts()

    def prove(self, slot: int) -> None:
        """A prefix that this slot's state belongs to has come again."""
        self.proven.pop(slot, None)
        self.proven[slot] = None
        if len(self.proven) > self.most_proven:
            del self.proven[next(iter(self.proven))]

    def add(self, key: bytes, slot: int) -> None:
        """The slot holds the state after this prefix now."""
        self.slot_of[key], self.key_of[slot] = slot, key

    def forget(self, slot: int) -> None:
        """The slot is given to a sequence; it may hold no snapshot."""
        if slot in self:
            self.counts.evicted += 1
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """What the slot holds is known no more."""
        del self.slot_of[self.key_of.pop(slot)]
        self.proven.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self.key_of


class SlotPool(CachingPool):
    """A pool of slots, taken one by one: first those that are no snapshot, then snapshots that are
    not proven, the least recently used of each.
    """

    def take(self, count: int) -> list[int]:
        """One slot, count = 1. Raises OutOfBlocks."""
        found = next((slot for slot in self.free if slot not in self.cache.proven), None)
        if found is not None:
            self.free.move_to_end(found, last=False)
        return super().take(count)


class SnapshotTable(SlotTable):
    """stop: tokens after which its prompt is to stop, None: anywhere. last: its last snapshot, if
    the next one may take its place: (hash, tokens).
    """

    stop: int | None = None
    last: tuple[bytes, int] | None = None


class CachingSlotBlocks(SlotBlocks, CachingBlockManager):
    """A CachingBlockManager whose new sequences begin with the blocks and the state of a known
    prefix.

    cache: which blocks are known. every: snapshots are after multiples of so many tokens, which is
    a multiple of block_size. worth_tokens: of K and V, as large as a snapshot. Other arguments:
    SlotBlocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        copy: Callable[[int, int], None],
        cache: HashBlocks,
        every: int,
        worth_tokens: float,
    ):
        super().__init__(num_blocks, block_size, num_slots, copy, cache=cache)
        self.every, self.worth_tokens = every, worth_tokens
        self.snapshots = Snapshots(most_proven=num_slots // 4)
        self.slots = SlotPool(num_slots, self.snapshots)
        self.pool.forget = self.forget_block

    def forget_block(self, block: int) -> None:
        """A block is given to a sequence. A state after it is of no use without its K and V."""
        slot = self.snapshots.slot_of.get(self.cache.hash_of.get(block))
        self.cache.forget(block)
        if slot is not None:
            self.snapshots.forget(slot)
            if slot in self.slots.free:
                self.slots.free.move_to_end(slot, last=False)

    # ------------------------------------------------------------ a sequence begins

    def reuse(self, sequence: int, tokens: Sequence[int]) -> int:
        """Let a new sequence begin with the longest prefix of which the blocks and the state are
        known. Returns how many of its tokens need not be computed.
        """
        blocks = self.cache.match(tokens)
        known = self.with_snapshot(blocks)
        table = self.tables[sequence] = SnapshotTable(blocks[:known])
        self.pool.share(table)
        if known:
            table.slot = self.snapshots.slot_of[self.cache.hash_of[blocks[known - 1]]]
            self.slots.share([table.slot])
            self.snapshots.prove(table.slot)
            self.snapshots.counts.hits += 1
        held = known * self.block_size
        parts_at = len(blocks) * self.block_size // self.every * self.every
        if parts_at > held:
            table.stop = parts_at
            self.snapshots.counts.missed_tokens += parts_at - held
        return held

    def with_snapshot(self, blocks: list[int]) -> int:
        """How many of these blocks, of one prefix, end at the last snapshot in it."""
        for count in range(len(blocks), 0, -1):
            if self.cache.hash_of[blocks[count - 1]] in self.snapshots.slot_of:
                return count
        return 0

    def lacks_slot(self, sequence: int, held: int, tokens: int) -> bool:
        """Also where it would write into a snapshot, unless there is no other slot."""
        if super().lacks_slot(sequence, held, tokens):
            return True
        slot = self.tables[sequence].slot
        return tokens > held and slot in self.snapshots and self.slots.num_free > 0

    def grow(self, sequence: int, held: int, tokens: int) -> list[Copy]:
        """As SlotBlocks'. The slot that is written is no snapshot any more."""
        copies = super().grow(sequence, held, tokens)
        if tokens > held:
            self.snapshots.forget(self.tables[sequence].slot)
        return copies

    def chunk_of(self, sequence: int, held: int, count: int, total: int) -> int:
        """How many of the next `count` tokens run in this step, so that it ends where a snapshot
        is wanted. total: tokens of the sequence.
        """
        stop = getattr(self.tables.get(sequence), "stop", None)
        if stop is not None and held < stop < held + count:
            return stop - held
        if held + count < total:
            return max(0, (held + count) // self.every * self.every - held) or count
        return count

    # ------------------------------------------------------------ a step has run

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """As in lesson 13, and the state where these tokens end."""
        super().remember(sequence, tokens)
        if len(tokens) % self.every == 0:
            self.take_snapshot(sequence, len(tokens))

    def take_snapshot(self, sequence: int, tokens: int) -> None:
        """Copy the sequence's state, which is that after so many tokens. If there is no free slot,
        it is not copied.
        """
        table = self.tables[sequence]
        key = self.cache.hash_of[table[tokens // self.block_size - 1]]
        slot, free = self.snapshots.slot_of.get(key), self.slots.free
        if slot is None:
            if (slot := self.slot_to_replace(table, tokens)) is not None:
                self.snapshots.drop(slot)
                self.snapshots.counts.replaced += 1
            elif free:
                (slot,) = self.slots.take(1)
            else:
                return
            self.copy(table.slot, slot)
            self.snapshots.add(key, slot)
            self.snapshots.counts.taken += 1
            if slot not in free:
                self.slots.release([slot])
        if slot in free:
            free.move_to_end(slot)  # the last to be evicted
        table.last = key, tokens
        if tokens == getattr(table, "stop", None):
            self.snapshots.prove(slot)
            table.last = None  # it stays, because a third prompt may come

    def slot_to_replace(self, table: SlotTable, tokens: int) -> int | None:
        """The slot of the sequence's last snapshot, if the new one may take its place."""
        if (last := getattr(table, "last", None)) is None:
            return None
        slot = self.snapshots.slot_of.get(last[0])
        is_kept = slot is None or slot in self.snapshots.proven or slot not in self.slots.free
        return None if is_kept or tokens - last[1] >= self.worth_tokens else slot
