"""Where a cache's memory goes: how much holds tokens, and why the rest does not.

    used        slots that hold a token now
    reserved    slots that are empty now, and will hold a token of their owner's later
    internal    slots that a sequence owns and never fills
    external    free slots that no sequence can have, because each hole is too small
    free        slots that the next request can have

`Arena` hands out contiguous pieces, as the caches of lessons 3 to 11 do. Read `waste_of_arena` and
`waste_of_blocks` side by side.

Source: Kwon et al. 2023, PagedAttention, section 3.1 and figure 2.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Waste(NamedTuple):
    """Slots of a cache by what they are good for. All in tokens; together they are the cache."""

    used: int
    reserved: int
    internal: int
    external: int
    free: int

    @property
    def owned(self) -> int:
        """Slots that belong to a sequence."""
        return self.used + self.reserved + self.internal

    @property
    def empty_share(self) -> float:
        """The share of what sequences own that holds no token: what the papers call waste."""
        return 1 - self.used / self.owned if self.owned else 0.0


class Lengths(NamedTuple):
    """A sequence: tokens that it holds now, and tokens that it holds when it ends."""

    now: int
    at_end: int


class Arena:
    """A row of slots that is cut into contiguous pieces. First fit: the first hole that is large
    enough.
    """

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"num_slots: got {num_slots}; accepted: 1 or more")
        self.num_slots = num_slots
        self.pieces: dict[int, int] = {}  # where a piece begins: how long it is

    def holes(self) -> list[tuple[int, int]]:
        """(begin, length) of each row of free slots, in order."""
        ends = [0] + [start + length for start, length in sorted(self.pieces.items())]
        starts = [*sorted(self.pieces), self.num_slots]
        gaps = [(end, start - end) for end, start in zip(ends, starts)]
        return [hole for hole in gaps if hole[1]]

    def allocate(self, length: int) -> int | None:
        """Where the new piece begins; None if no hole is long enough."""
        for start, room in self.holes():
            if room >= length:
                self.pieces[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Give a piece back. Raises KeyError if none begins there."""
        del self.pieces[start]


def waste_of_arena(arena: Arena, sequences: dict[int, Lengths], next_length: int) -> Waste:
    """sequences: {where its piece begins: its lengths}. next_length: what the next request asks
    for, which decides whether a hole is of use.
    """
    used = sum(lengths.now for lengths in sequences.values())
    reserved = sum(lengths.at_end - lengths.now for lengths in sequences.values())
    owned = sum(arena.pieces.values())
    holes = [length for _, length in arena.holes()]
    external = sum(length for length in holes if length < next_length)
    return Waste(used, reserved, owned - used - reserved, external, sum(holes) - external)


def waste_of_blocks(
    sequences: Sequence[Lengths], num_blocks: int, block_size: int, shared_blocks: int = 0
) -> Waste:
    """Blocks given as sequences grow: what is empty is in each sequence's last block, and every
    free block fits every sequence. shared_blocks: full ones that are counted for several sequences.
    """
    used = sum(lengths.now for lengths in sequences) - shared_blocks * block_size
    blocks = sum(-(-lengths.now // block_size) for lengths in sequences) - shared_blocks
    # A last block is filled up to its end, or up to the sequence's.
    reserved = sum(
        min(lengths.at_end, -(-lengths.now // block_size) * block_size) - lengths.now
        for lengths in sequences
    )
    owned = blocks * block_size
    return Waste(used, reserved, owned - used - reserved, 0, num_blocks * block_size - owned)


def expected_empty_share(mean_tokens: float, block_size: int) -> float:
    """The empty share of blocks for sequences whose lengths end anywhere in a block alike.

    A last block then holds 1 to block_size tokens, (block_size + 1) / 2 in the mean, so
    (block_size - 1) / 2 of its slots are empty.
    """
    empty = (block_size - 1) / 2
    return empty / (mean_tokens + empty)


def more_requests(lengths: Sequence[int], reserved_tokens: int, block_size: int) -> float:
    """How many times as many of these requests fit into blocks as into pieces of reserved_tokens.

    lengths: tokens of each request when it is longest.
    """
    paged = sum(-(-length // block_size) * block_size for length in lengths) / len(lengths)
    return reserved_tokens / paged
