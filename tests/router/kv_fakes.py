"""Replicas that tell of their blocks: what a script holds, and what the router makes of it."""

import asyncio
import json
from contextlib import asynccontextmanager

from lessons.l13_prefix_caching.naive import HashBlocks
from reference.features.block_events import EventLog, to_json
from tests.router.fakes import (
    HEAD_OF_EVENTS,
    SOON_S,
    Fake,
    answers,
    chunk,
    cluster_of,
    until,
    whole,
)

BLOCK = 4


def ids_of(text: str) -> list[int]:
    """A tokenizer: a token for each character."""
    return list(text.encode())


class Telling(Fake):
    """A Fake with an EventLog. wrong: what it does to a batch before it sends it, or None to skip
    it; says_events: whether it has any; asked: how often its tokenizer was.
    """

    def __init__(self):
        super().__init__()
        self.log = EventLog(BLOCK)
        self.wrong = lambda batch: batch
        self.says_events = True
        self.connected = self.asked = 0
        self.is_silent = False
        self.work, self.script = answers, route
        self.reads = asyncio.Event()
        self.reads.set()

    def holds(self, text: str, medium: str = "pool", blocks: int = 10**6) -> None:
        """Its tier has the beginning of a text."""
        ids = ids_of(text)
        for key in HashBlocks(BLOCK).hashes(ids, min(blocks, len(ids) // BLOCK)):
            self.log.stored(medium, key)

    async def restart(self) -> None:
        """Die, and come back with nothing at the same address."""
        await self.die()
        self.log = EventLog(BLOCK)
        await self.start()


async def route(fake: Telling, request, reader, writer) -> None:
    """What a server of ours does at each path."""
    if request.target == "/kv_events":
        await tell(fake, writer)
    elif request.target == "/tokenize":
        fake.seen.remove(request)
        fake.asked += 1
        await fake.reads.wait()
        body = json.loads(request.body)
        text = body.get("prompt") or "".join(one["content"] for one in body["messages"])
        writer.write(whole({"tokens": ids_of(text)}))
    else:
        await fake.work(fake, request, reader, writer)


async def tell(fake: Telling, writer) -> None:
    fake.seen = [one for one in fake.seen if one.target != "/kv_events"]
    if not fake.says_events:
        writer.write(whole({"error": {"message": "no events"}}, "404 No"))
        return
    fake.connected += 1
    writer.write(HEAD_OF_EVENTS)
    epoch, seq, log = "", 0, fake.log
    while log is fake.log and not fake.go_on.is_set():
        for batch in [] if fake.is_silent else log.since(epoch, seq):
            epoch, seq = batch.epoch, batch.seq
            sent = fake.wrong(batch)
            if sent is not None:
                found = to_json(sent) | {"block_size": BLOCK, "models": ["base"]}
                writer.write(chunk(f"id: {seq}\ndata: {json.dumps(found)}\n\n"))
        await writer.drain()
        await asyncio.sleep(0.005)


@asynccontextmanager
async def telling(count: int = 3, **own):
    """A router with the policy kv before so many replicas, which it follows."""
    from reference.router.args import RouterArgs

    fakes = [Telling() for _ in range(count)]
    for fake in fakes:
        await fake.start()
    own = dict(host_credit=0.5, folder_credit=0.25, health_interval=0.05) | own
    own = dict(policy="kv", events_timeout=SOON_S, tokenize_timeout=SOON_S) | own  # if it is slow
    async with cluster_of(RouterArgs([fake.url for fake in fakes], **own), fakes) as found:
        yield found
        for fake in fakes:
            fake.go_on.set()
    for fake in fakes:
        await fake.die()
    await until(lambda: not any(fake.writers for fake in fakes))


async def heard(router) -> None:
    """Return when the router knows all that the replicas have."""

    def is_all() -> bool:
        blocks = router.routing.replicas.blocks
        return all(
            fake.url in blocks.streams
            and blocks.streams[fake.url].is_fresh
            and len(blocks.index.keys.get(fake.url, ()))
            == len({key for keys in fake.log.held.values() for key in keys})
            for fake in router.fakes
        )

    await until(is_all)
