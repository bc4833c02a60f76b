"""kv_events_config: an engine tells which blocks it has, for routers that send prompts to where
their beginnings are.

The pool tells of what lesson 13's cache learns and forgets, host memory of what its order of
eviction is told, the folder of its files. Keys are those of tokens alone, so a router knows them
for prompts of the base model without pictures; an adapter's blocks are told, too, and match none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lessons.l13_prefix_caching.naive import HashBlocks
from reference.features.block_events import Batch, EventLog

if TYPE_CHECKING:
    from reference.engine.engine import Engine
    from reference.engine.engine_args import EngineArgs


def told_cache(args: EngineArgs) -> ToldBlocks:
    """A prefix cache that tells what it has."""
    return ToldBlocks(EventLog(args.block_size, args.kv_events_config.buffer_steps))


class ToldBlocks(HashBlocks):
    """HashBlocks that tells a log."""

    def __init__(self, log: EventLog):
        super().__init__(log.block_size)
        self.log = log
        self.told: set[int] = set()

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        known = super().insert(tokens, blocks)
        new = []
        for block in reversed(known):
            if block in self.told:
                break  # and so are all before it
            new.append(block)
        for block in reversed(new):
            self.told.add(block)
            self.log.stored("pool", self.hash_of[block])
        return known

    def forget(self, block: int) -> None:
        if block in self.told:
            self.told.discard(block)
            self.log.removed("pool", self.hash_of[block])
        super().forget(block)


def log_of(engine: Engine) -> EventLog | None:
    """Where an engine's events are; None: it tells nothing."""
    return getattr(getattr(engine.scheduler.blocks, "cache", None), "log", None)


def events_since(engine: Engine, epoch: str, seq: int) -> list[Batch]:
    """What a router does not know yet. In the engine's thread, and fast."""
    return log_of(engine).since(epoch, seq)
