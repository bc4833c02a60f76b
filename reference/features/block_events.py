"""What an engine tells of its blocks, so that a router knows who has which: stored, removed, all
cleared, in which tier, with numbers that show what was lost on the way.

    log = EventLog(block_size=16)              # at the engine
    log.stored("pool", key)
    for batch in log.since(epoch, seq): ...    # "", 0: the whole state

    follower = Follower()                      # at the router, one for each replica
    if (events := follower.take(batch)) is not None: ...
    if follower.is_behind: ...                 # a number was missing: ask for the whole state

Events and their names are vLLM's (vllm/distributed/kv_events.py), without tokens and parents: our
key is lesson 13's hash of all tokens so far, the same in every process, so a router that has a
prompt's tokens has its keys. Its mediums are "GPU" and "CPU", ours are those of lesson 26.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lessons.toolbox.model.arguments import refuse

Key = bytes
MEDIUMS = ("pool", "host", "folder")  # the fastest first
KEY_BYTES = 16  # of a hash that are told: if two were equal, a prompt would go to the wrong replica
MOST_EVENTS = 1024  # of a batch that no router has asked for yet


@dataclass(frozen=True)
class BlockStored:
    """These blocks are in a tier now."""

    block_hashes: tuple[Key, ...]
    medium: str


@dataclass(frozen=True)
class BlockRemoved:
    """These are not there any more; another tier may have them."""

    block_hashes: tuple[Key, ...]
    medium: str


@dataclass(frozen=True)
class AllBlocksCleared:
    """No tier has any block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
KINDS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


class Batch(NamedTuple):
    """Events in their order. epoch: of the engine's life, because numbers begin anew with it. seq:
    one more than that of the batch before. is_whole: it says everything, up to and with seq.
    """

    epoch: str
    seq: int
    events: list[Event]
    is_whole: bool = False


class EventLog:
    """What happened to the blocks of one engine, and what it has now. Any thread may tell it.

    buffer_steps: batches that are kept for those who have not asked yet.
    """

    def __init__(self, block_size: int, buffer_steps: int = 10_000):
        self.block_size = block_size
        self.epoch = os.urandom(8).hex()
        self.seq = 0
        self.held: dict[str, dict[Key, None]] = {medium: {} for medium in MEDIUMS}
        self.open: list[tuple[type, str, Key]] = []  # events that no batch has yet
        self.batches: deque[Batch] = deque(maxlen=buffer_steps)
        self.lock = threading.Lock()

    def stored(self, medium: str, key: Key) -> None:
        """A tier has a block now."""
        key = key[:KEY_BYTES]
        with self.lock:
            if key not in self.held[medium]:
                self.held[medium][key] = None
                self._note(BlockStored, medium, key)

    def removed(self, medium: str, key: Key) -> None:
        """A tier has it no more."""
        key = key[:KEY_BYTES]
        with self.lock:
            if key in self.held[medium]:
                del self.held[medium][key]
                self._note(BlockRemoved, medium, key)

    def _note(self, kind: type, medium: str, key: Key) -> None:
        self.open.append((kind, medium, key))
        if len(self.open) >= MOST_EVENTS:
            self._close()

    def _close(self) -> None:
        """Number what is open. Neighbours of one kind are one event."""
        events: list[tuple[type, str, list[Key]]] = []
        for kind, medium, key in self.open:
            if not events or events[-1][:2] != (kind, medium):
                events.append((kind, medium, []))
            events[-1][2].append(key)
        self.open.clear()
        self.seq += 1
        found = [kind(tuple(keys), medium) for kind, medium, keys in events]
        self.batches.append(Batch(self.epoch, self.seq, found))

    def since(self, epoch: str, seq: int) -> list[Batch]:
        """The batches after this one, or the whole state in one if they are not known any more."""
        with self.lock:
            if self.open:
                self._close()
            first = self.seq - len(self.batches) + 1
            if epoch == self.epoch and first - 1 <= seq <= self.seq:
                return [self.batches[at] for at in range(seq + 1 - first, len(self.batches))]
            events: list[Event] = [AllBlocksCleared()]
            for medium, keys in self.held.items():
                events += [BlockStored(tuple(keys), medium)] if keys else []
            return [Batch(self.epoch, self.seq, events, is_whole=True)]


class Follower:
    """How far one has read the log of a replica. It takes batches in any order, some twice and some
    never. is_behind: what it was told is not all; only the whole state ends that.
    """

    def __init__(self):
        self.epoch, self.seq, self.is_behind = "", 0, True

    def take(self, batch: Batch) -> list[Event] | None:
        """The events that hold now, in order; None: none of this batch."""
        is_ours = batch.epoch == self.epoch
        if batch.is_whole:
            if is_ours and batch.seq < self.seq:
                return None  # we know more
            self.epoch, self.seq, self.is_behind = batch.epoch, batch.seq, False
            return batch.events
        if is_ours and batch.seq <= self.seq:
            return None
        if self.is_behind or not is_ours or batch.seq > self.seq + 1:
            self.is_behind = True
            return None
        self.seq = batch.seq
        return batch.events


# ---------------------------------------------------------------- as JSON


def to_json(batch: Batch) -> dict[str, Any]:
    """A batch as it is sent: as vLLM's maps, the kind of an event in "type", hashes in hex."""
    events = []
    for event in batch.events:
        found: dict[str, Any] = {"type": type(event).__name__}
        if not isinstance(event, AllBlocksCleared):
            found |= {"block_hashes": [key.hex() for key in event.block_hashes]}
            found |= {"medium": event.medium}
        events.append(found)
    return {"epoch": batch.epoch, "seq": batch.seq, "whole": batch.is_whole, "events": events}


def from_json(found: dict[str, Any]) -> Batch:
    """The batch again. Raises ValueError for what is none."""
    try:
        events = [event_of(each) for each in found["events"]]
        batch = Batch(str(found["epoch"]), int(found["seq"]), events, bool(found["whole"]))
    except (KeyError, TypeError, AttributeError) as error:
        refuse("batch", f"{type(error).__name__} {error}", "a batch of block events")
    return batch


def event_of(found: dict[str, Any]) -> Event:
    """An event of a batch. Raises KeyError, TypeError and ValueError for what is none."""
    kind = KINDS[found["type"]]
    if kind is AllBlocksCleared:
        return AllBlocksCleared()
    if found["medium"] not in MEDIUMS:
        refuse("medium", found["medium"], ", ".join(MEDIUMS))
    return kind(keys_of(found["block_hashes"]), found["medium"])


def keys_of(hashes: Iterable[str]) -> tuple[Key, ...]:
    """Keys from hex."""
    return tuple(map(bytes.fromhex, hashes))
