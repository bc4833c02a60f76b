"""A prompt's blocks leave layer by layer, while later layers of the same step still run.

    runner.layers = LayerByLayer(blocks)      # a producer's; it is asked in front of each step

Which blocks a step fills is known before it runs, and so are their keys, because a key is a hash of
tokens. So after each layer that layer's part of these blocks is packed, in the order of the model's
own work: no later step can have written there yet. A thread sends it while the next layer runs.

A part is a block of a small pool, one layer of the real one. So each is packed as any block is, in
8 bits, too, and has a name and a SHA-256 of its own. A consumer has a block once it has all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend
from lessons.l03_kv_cache.cache import KVPool
from lessons.l14_continuous_batching.sequence import Step
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import HostTier, Key
from reference.features.kv_transfer.wire import part_of

if TYPE_CHECKING:
    from reference.features.kv_transfer.handover import Departure, TransferBlockManager


class OneLayer:
    """What packing asks of a pool, for one layer of it. index: of the layer in the pool."""

    def __init__(self, pool: KVPool, index: int):
        self.pool, self.index = pool, index
        self.num_blocks, self.block_size, self.blocks = (
            pool.num_blocks,
            pool.block_size,
            pool.blocks,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """[1, slots + 1, Hkv, …] each, views."""
        return tuple(slots[self.index : self.index + 1] for slots in self.pool.tensors)

    @property
    def k_slots(self) -> Tensor:
        return self.tensors[0]


class LayeredPages(Pages):
    """Pages whose rows hold layer after layer. kind: how a layer's part is packed, Pages or
    RoundedPages.
    """

    def __init__(self, pool: KVPool, kind: type[Pages] = Pages):
        self.each = [kind([OneLayer(pool, index)]) for index in range(len(pool.layers))]
        super().__init__([pool])
        self.parts = len(self.each)
        self.last_parts = (self.parts - 1,)  # because layers leave one after the other

    def row_bytes(self, pool: KVPool) -> int:
        return sum(one.block_bytes for one in self.each)

    def pack(self, pool: KVPool, blocks: Sequence[int]) -> Tensor:
        return torch.cat([self.packed(index, blocks) for index in range(self.parts)], dim=1)

    def unpack(self, pool: KVPool, blocks: Sequence[int], rows: Tensor) -> None:
        for one, part in zip(self.each, rows.split(self.part_bytes, dim=1)):
            one.unpack(one.pools[0], blocks, part)

    @torch.inference_mode()
    def packed(self, index: int, blocks: Sequence[int]) -> Tensor:
        """A layer's part of these blocks, on the pool's device, in the order of the work there:
        [len(blocks), part_bytes] uint8.
        """
        one = self.each[index]
        return one.pack(one.pools[0], blocks)


class Parts:
    """Whole blocks over a tier of parts, which come one by one. inner: keeps them by name. last:
    those parts of which one comes after all others.
    """

    def __init__(self, inner: HostTier, parts: int, last: Sequence[int]):
        self.inner, self.parts, self.last = inner, parts, last

    def has(self, key: Key) -> bool:
        """Whether all parts have come. One may be lost since; then `get` says so."""
        return all(self.inner.has(part_of(key, part)) for part in self.last)

    def get(self, key: Key) -> Tensor | None:
        """All parts of it, side by side: [bytes] uint8; None: one is not here any more."""
        found = [self.inner.get(part_of(key, part)) for part in range(self.parts)]
        return None if any(part is None for part in found) else torch.cat(found)

    def put(self, key: Key, block: Tensor) -> None:
        """Keep it, part by part. block: [bytes] uint8."""
        for part, data in enumerate(block.split(len(block) // self.parts)):
            self.inner.put(part_of(key, part), data)

    def flush(self, until: float) -> None:
        """As Tier's, until a time.time()."""
        self.inner.flush(until)


@dataclass
class Leaving:
    """Blocks that one step fills for a request that departs."""

    sequence: int
    departure: Departure
    keys: list[Key]
    blocks: list[int]


class LayerByLayer:
    """Of a runner: sends what its steps write for requests that depart, after each layer."""

    def __init__(self, blocks: TransferBlockManager):
        self.blocks = blocks
        self.parts = blocks.connector.parts
        self.leaving: list[Leaving] = []

    def begin(self, step: Step, tables: dict[int, list[int]]) -> None:
        """In front of a step. Of prompts alone, because a drafted token may yet be taken back."""
        self.leaving = []
        for sequence, count in step.chunks:
            departure = self.blocks.departures.get(sequence.row)
            if departure is None:
                continue
            end = min(sequence.computed + count, len(sequence.prompt))
            start, keys = self.blocks.untold(sequence.row, sequence.known_as[:end])
            if keys:
                filled = tables[sequence.row][start : start + len(keys)]
                self.leaving.append(Leaving(sequence.row, departure, keys, filled))

    def told(self, attend: Attend) -> Attend:
        """`attend`, which tells of each layer whose K and V are written."""
        if not self.leaving:
            return attend

        def attend_and_send(layer: int, *qkv: Tensor) -> Tensor:
            found = attend(layer, *qkv)
            self.send(layer)
            return found

        return attend_and_send

    def send(self, part: int) -> None:
        """Begin to send a layer's part. After the last one the blocks need not be sent again."""
        for one in self.leaving:
            to, connector = one.departure.to, self.blocks.connector
            one.departure.sendings.append(connector.send_part(to, one.keys, one.blocks, part))
            if part == self.parts - 1:
                self.blocks.left.setdefault(one.sequence, set()).update(one.keys)
        if part == self.parts - 1:
            self.leaving = []  # else a pass outside of a step would send them once more
