"""Random histories of an engine whose blocks travel to host memory and to files, and back: with a
host that holds few blocks, copies that are late, stores that fail and files that are torn, no
request ever gets a wrong token, and no block is lost.
"""

import random
import time
from collections import Counter

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l15_chunked_prefill.lab.histories import ChunkedRules
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l26_kv_transfer.blocks import Elsewhere, TieredBlockManager
from lessons.l26_kv_transfer.connector import TierConnector
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import FolderTier, HostTier, UsedAgainLast
from reference.engine.engine import Engine
from reference.engine.request import by_priority
from tests.engine_histories import LONGEST, Asked, History, House, VirtualRunner


class Unreliable:
    """A tier that is slow, forgets and raises, in shares drawn for each history."""

    def __init__(self, tier, draw: random.Random):
        self.tier, self.draw = tier, draw
        self.slow, self.lost, self.fails = (draw.choice([0, 0, 0.2]) for _ in range(3))

    def has(self, key) -> bool:
        return self.tier.has(key)

    def put(self, key, block) -> None:
        self.trouble()
        if self.draw.random() >= self.lost:
            self.tier.put(key, block)

    def flush(self, until) -> None:
        self.tier.flush(until)

    def get(self, key):
        self.trouble()
        return None if self.draw.random() < self.lost else self.tier.get(key)

    def trouble(self) -> None:
        if self.draw.random() < self.slow:
            time.sleep(self.draw.choice([0.0, 0.0005, 0.002]))
        if self.draw.random() < self.fails:
            raise OSError("no space left on device")


class TravelRules(ChunkedRules):
    """Lesson 15's rules; blocks that are copied have an owner more, and while they come in, who
    waits for them does not run.
    """

    def check(self, step) -> None:
        blocks = self.scheduler.blocks
        held = Counter(
            block for job, (known, _) in blocks.copying.items() for block in known + job.blocks
        )
        for block, owners in held.items():
            blocks.pool.owners[block] -= owners
        spare = [block for block in held if not blocks.pool.owners[block]]
        blocks.pool.free.update(dict.fromkeys(spare))
        try:
            if step.chunks or not blocks.copying:
                super().check(step)
        finally:
            for block in spare:
                del blocks.pool.free[block]
            for block, owners in held.items():
                blocks.pool.owners[block] += owners

    def check_preempted(self) -> None:
        """Who is sent away may come back when copies have ended; it is not counted here."""


def new_engine(house: House, faults, draw: random.Random, folder) -> Engine:
    blocks = TieredBlockManager(
        house.num_blocks, house.block_size, HashBlocks(house.block_size), None
    )
    runner = VirtualRunner(blocks, None, faults)
    runner.virtual.memory.num_blocks = house.num_blocks
    pages = Pages([runner.virtual.memory])
    size = pages.block_bytes
    files = None if folder is None else FolderTier(str(folder), size, draw.choice([500, 5000]) * 50)
    order = draw.choice([None, UsedAgainLast()])
    tier = HostTier(draw.choice([0, 1, 4, 50]), size, files, order)
    patience = draw.choice([10.0, 10.0, 0.001])
    blocks.connector = TierConnector(pages, Unreliable(tier, draw), patience)
    scheduler = ChunkedScheduler(
        blocks,
        max_num_seqs=house.max_num_seqs,
        max_num_batched_tokens=house.max_num_batched_tokens,
        order=by_priority,
        host=Elsewhere(blocks),
    )
    runner.rules = TravelRules(scheduler)
    return Engine(runner, scheduler, None, LONGEST)


class Travels(History):
    def check_end(self) -> None:
        super().check_end()
        blocks = self.engine.scheduler.blocks
        assert not (blocks.salts or blocks.saved or blocks.loads), "a sequence was not forgotten"


def random_request(draw: random.Random) -> Asked:
    return Asked(
        arrives=draw.randint(0, 12),
        prompt_len=draw.choice([draw.randint(1, 16), draw.randint(1, 42)]),
        limit=draw.randint(1, 14),
        answers=draw.choice([1, 1, 1, 2, 3]),
        priority=draw.choice([0, 0, 1, 2]),
        begins_as_others=draw.random() < 0.7,
        aborts=draw.choice([None, None, draw.randint(0, 30)]),
    )


@pytest.mark.parametrize("where", ["host", "host and files"])
def test_random_histories(request, seed, tmp_path, where):
    draw, seen = random.Random(seed), Counter()
    for nth in range(1500 if request.config.getoption("--all") else 60):
        pool = draw.choice([(45, 1), (16, 3), (24, 3), (4, 16), (6, 16), (40, 16)])
        step = draw.choice([(1, 1), (3, 3), (4, 7), (4, 16), (8, 33), (8, 64)])
        house = House(*pool, *step, cache=HashBlocks)
        requests = [random_request(draw) for _ in range(draw.randint(2, 10))]
        faults = {draw.randint(0, 40): draw.choice(["before", "after", "logits"])}
        folder = None if where == "host" else tmp_path / str(nth)
        engine = new_engine(house, draw.choice([{}, {}, faults]), draw, folder)
        history = Travels(house, requests, faults, engine=engine)
        history.run()
        connector = engine.scheduler.blocks.connector
        seen += Counter(
            loaded=connector.loaded_blocks,
            saved=connector.saved_blocks,
            given_up=connector.given_up,
            faults=sum(connector.faults.values()),
            **history.seen,
        )
        connector.close()
    assert all(seen[what] for what in ("loaded", "saved", "given_up", "faults", "preempted")), seen
