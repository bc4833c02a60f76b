"""Which replica gets a prompt: what each of them holds of it, weighed against what each has to do.

`scores` is the formula, exercise 26.5. BlockIndex is what a router knows of all replicas, from
their block events.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from reference.features.block_events import (
    MEDIUMS,
    AllBlocksCleared,
    BlockStored,
    Event,
    Key,
)

# What a block is worth that is in a tier: 1 - (time to bring it back) / (time to compute it again),
# for Llama-3-8B on an H100 by costs.py, PCIe 5.0 and for a folder NVMe before it. Dynamo's defaults
# are 1, 0.75 and 0.25, llm-d's 1 and 0.8 for host memory.
CREDITS = {"pool": 1.0, "host": 0.92, "folder": 0.58}


def scores(
    prompt_blocks: int,
    cached: Sequence[float],
    waiting: Sequence[float],
    active: Sequence[float],
    weight: float,
) -> tuple[list[float], int, list[float], int]:
    """Which worker gets a prompt of prompt_blocks blocks, 1 or more: by Dynamo's cost and by
    llm-d's score. Returns (costs, the worker of the lowest, scores, the worker of the highest);
    of equal ones the first.

    cached[w]: blocks of the prompt's beginning that worker w holds, each counted by its tier's
    credit. waiting[w]: blocks of other prompts that it has to compute first. active[w]: blocks of
    requests that it decodes.

        cost[w]  = weight * (waiting[w] + prompt_blocks - cached[w]) + active[w]
        score[w] = weight * cached[w] / prompt_blocks
                   + (max(waiting) - waiting[w]) / (max(waiting) - min(waiting))

    The first sees decodes and is in blocks. The second compares shares, from 0 to 1; where all
    queues are equal its second part is 1.

    Sources: Dynamo 1.5, lib/kv-router/src/scheduling/selector.rs, where cached is
    1.0 * device + 0.75 * host + 0.25 * disk blocks, and weight is called prefill_load_scale; llm-d,
    a weighted sum of pkg/kvcache's longest prefix (gpu 1.0, cpu 0.8) and of QueueScorer.
    """
    costs = [
        weight * (queue + prompt_blocks - have) + busy
        for have, queue, busy in zip(cached, waiting, active)
    ]
    least, most = min(waiting), max(waiting)
    found = []
    for have, queue in zip(cached, waiting):
        place = (most - queue) / (most - least) if most > least else 1.0
        found.append(weight * have / prompt_blocks + place)
    return costs, costs.index(min(costs)), found, found.index(max(found))


class BlockIndex:
    """{block: {replica: the tiers that have it}}. A key is the hash of a whole prefix, so a chain
    of lookups walks down the prompt, and no tree is needed.

    most: pairs of a block and a replica, at most. When there are more, the blocks that were told or
    asked for least recently are forgotten: a replica has them, and the router does not know.
    """

    def __init__(self, most: int, credits: Mapping[str, float] | None = None):
        self.most, self.credits = most, dict(credits or CREDITS)
        self.holders: OrderedDict[Key, dict[str, set[str]]] = OrderedDict()
        self.keys: dict[str, set[Key]] = {}
        self.count = self.forgotten = 0  # pairs

    def apply(self, replica: str, events: Iterable[Event]) -> None:
        """What a replica has told, in its order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.drop(replica)
                continue
            # The last block first, so that the first one of a prompt is forgotten last.
            for key in reversed(event.block_hashes):
                if isinstance(event, BlockStored):
                    self.add(replica, key, event.medium)
                else:
                    self.remove(replica, key, event.medium)
        while self.count > self.most:
            key, holders = self.holders.popitem(last=False)
            for holder in holders:
                self.keys[holder].discard(key)
            self.count -= len(holders)
            self.forgotten += len(holders)

    def add(self, replica: str, key: Key, medium: str) -> None:
        """A tier of a replica has a block."""
        holders = self.holders.setdefault(key, {})
        self.holders.move_to_end(key)
        if replica not in holders:
            holders[replica] = set()
            self.keys.setdefault(replica, set()).add(key)
            self.count += 1
        holders[replica].add(medium)

    def remove(self, replica: str, key: Key, medium: str) -> None:
        """A tier of a replica has it no more."""
        tiers = self.holders.get(key, {}).get(replica)
        if tiers is not None:
            tiers.discard(medium)
            if not tiers:
                self.keys[replica].discard(key)
                self._forget(replica, key)

    def drop(self, replica: str) -> None:
        """A replica has nothing: it died, or it has begun anew."""
        for key in self.keys.pop(replica, ()):
            self._forget(replica, key)

    def _forget(self, replica: str, key: Key) -> None:
        holders = self.holders[key]
        del holders[replica]
        self.count -= 1
        if not holders:
            del self.holders[key]

    def mediums(self, replica: str, keys: Sequence[Key]) -> list[str]:
        """The fastest tier of each block of a prompt, up to the first that the replica lacks."""
        found = []
        for key in keys:
            tiers = self.holders.get(key, {}).get(replica)
            if not tiers:
                break
            found.append(min(tiers, key=MEDIUMS.index))
        for key in reversed(keys[: len(found)]):
            self.holders.move_to_end(key)
        return found

    def cached(self, replica: str, keys: Sequence[Key]) -> float:
        """Blocks of a prompt's beginning that a replica has, by the credits of their tiers."""
        return sum(self.credits[medium] for medium in self.mediums(replica, keys))
