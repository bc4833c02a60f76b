"""Blocks that leave while their prompt still runs: lesson 13's prefix cache with a connector to
other engines.

    blocks = TransferBlockManager(num_blocks, block_size, HashBlocks(block_size), connector)
    scheduler = ChunkedScheduler(blocks, host=TransferHost(blocks, departure_of=...))

At a producer each chunk of a prompt that departs is sent when it has run, and so is the beginning
that the prefix cache knew, because the consumer may not know it. At a consumer nothing is new: its
blocks come from the connector, as in blocks.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from lessons.l13_prefix_caching.naive import FIRST
from lessons.l14_continuous_batching.sequence import Sequence
from lessons.l26_kv_transfer.blocks import Elsewhere, TieredBlockManager
from lessons.l26_kv_transfer.connector import Job
from lessons.l26_kv_transfer.tiers import Key
from reference.features.kv_transfer.connector import Sending
from reference.features.kv_transfer.wire import Address


@dataclass(eq=False)
class Departure:
    """A request whose prompt is computed here and decoded elsewhere. to: the consumer. parts: in
    so many a block travels.
    """

    to: Address
    parts: int = 1
    sendings: list[Sending] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether it is known of all its blocks what became of them."""
        return all(sending.here.done() for sending in self.sendings)

    def abandon(self) -> None:
        """No request waits for what is still on its way."""
        for sending in self.sendings:
            sending.is_wanted = False

    @property
    def arrived(self) -> list[int]:
        """The blocks of this pool that the consumer has, too, as far as that is known now."""
        found: dict[Key, int] = {}
        parts: dict[Key, set[int]] = {}
        for sending in self.sendings:
            if sending.here.done():
                here = sending.here.result()
                pairs = zip(sending.keys, sending.blocks)
                found |= {key: block for key, block in pairs if key in here}
                for key in here:
                    parts.setdefault(key, set()).add(sending.part)
        return [block for key, block in found.items() if len(parts[key]) == self.parts]


class TransferBlockManager(TieredBlockManager):
    """A TieredBlockManager that saves nothing and sends what departs. departures: by sequence.
    left: keys that left already while the last step ran, by sequence.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.departures: dict[int, Departure] = {}
        self.left: dict[int, set[Key]] = {}

    def start_save(self, sequence: int, keys: list[Key], blocks: list[int]) -> Job | None:
        departure, left = self.departures.get(sequence), self.left.pop(sequence, ())
        new = [pair for pair in zip(keys, blocks) if pair[0] not in left]
        if departure is None or not new:
            return None
        job, sendings = self.connector.start_send(departure.to, *zip(*new))
        departure.sendings += sendings
        return job

    def reuse(self, sequence: int, tokens: list[int]) -> int:
        known = super().reuse(sequence, tokens)
        if known and sequence in self.departures:
            self.save(sequence, tokens[:known])
        return known

    def leave(self, sequence: int) -> None:
        super().leave(sequence)
        self.departures.pop(sequence, None)
        self.left.pop(sequence, None)


class TransferHost(Elsewhere):
    """The scheduler's `host`. departure_of: of a sequence whose blocks are sent; None: they
    stay. The rest as in Elsewhere.
    """

    def __init__(
        self,
        blocks: TransferBlockManager,
        salt_of: Callable[[Sequence], Key] = lambda _: FIRST,
        departure_of: Callable[[Sequence], Departure | None] = lambda _: None,
    ):
        super().__init__(blocks, salt_of)
        self.departure_of = departure_of

    def fetch(self, sequence: Sequence) -> None:
        departure = self.departure_of(sequence)
        if departure is not None:
            self.blocks.departures[sequence.row] = departure
        super().fetch(sequence)
