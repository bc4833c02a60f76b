"""What each replica holds, as it tells at /kv_events, for the policy kv.

A stream for each replica: first its whole state, then what changes. Its entries are in the index
only while the stream is whole and alive. It may end (the replica died, or shuts down), skip a
number, or say nothing for --events-timeout seconds: then the entries are dropped at once, the
replica is asked for its whole state, and prompts meanwhile go by their prefix.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing

import httpx

from reference.features.block_events import Follower, from_json
from reference.router.args import RouterArgs
from reference.router.block_index import BlockIndex
from reference.router.policies import Prompt

PATH = "/kv_events"
RARELY = 10  # times the interval, for a replica that has no events: one of another program


class Behind(Exception):
    """A number was missing."""


class Stream:
    """One replica's events. block_size, models: what its keys are made for; fresh: its entries are
    its state, as far as it has told.
    """

    def __init__(self):
        self.follower = Follower()
        self.block_size = 0
        self.models: Sequence[str] = ()
        self.task: asyncio.Task | None = None

    @property
    def is_fresh(self) -> bool:
        return not self.follower.is_behind


class Blocks:
    """The index and the streams that fill it. transport: to the replicas."""

    def __init__(self, args: RouterArgs, transport: httpx.AsyncBaseTransport):
        self.args, self.transport = args, transport
        credits = {"pool": 1.0, "host": args.host_credit, "folder": args.folder_credit}
        self.index = BlockIndex(args.index_blocks, credits)
        self.streams: dict[str, Stream] = {}
        self.resyncs: dict[str, int] = {}  # whole states that a gap made necessary

    # ------------------------------------------------------------ asked by the policy

    def is_fresh(self, url: str) -> bool:
        """Whether what is known of a replica is all that it has told."""
        return url in self.streams and self.streams[url].is_fresh

    def mediums(self, url: str, prompt: Prompt) -> list[str]:
        """The tier of each block of the prompt's beginning that a replica is known to hold."""
        if not self.is_fresh(url) or not self.is_for(self.streams[url], prompt):
            return []
        stream = self.streams[url]
        return self.index.mediums(url, prompt.keys(stream.block_size))

    def cached(self, url: str, prompt: Prompt) -> float:
        """The same, as blocks, each by the credit of its tier."""
        return sum(self.index.credits[medium] for medium in self.mediums(url, prompt))

    def is_for(self, stream: Stream, prompt: Prompt) -> bool:
        """Whether the replica's keys are those of this prompt: an adapter has others."""
        return prompt.tokens is not None and prompt.model in (None, *stream.models)

    @property
    def block_size(self) -> int:
        """In which work is counted: any replica's."""
        sizes = (stream.block_size for stream in self.streams.values() if stream.is_fresh)
        return next(sizes, 0)

    # ------------------------------------------------------------ told by the replicas

    def follow(self, url: str) -> None:
        """Read the events of a replica from now on."""
        if url not in self.streams:
            stream = self.streams[url] = Stream()
            stream.task = asyncio.ensure_future(self.read_again(url, stream))

    def leave(self, url: str) -> None:
        """Read them no more, and forget what the replica has."""
        stream = self.streams.pop(url, None)
        if stream is not None:
            stream.follower.is_behind = True
            stream.task.cancel()
        self.index.drop(url)

    def lost(self, url: str) -> None:
        """A replica did not answer. If it lives, it tells everything anew."""
        if url in self.streams:
            self.leave(url)
            self.follow(url)

    async def stop(self) -> None:
        """Read none any more."""
        tasks = [stream.task for stream in self.streams.values()]
        for url in list(self.streams):
            self.leave(url)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def read_again(self, url: str, stream: Stream) -> None:
        """Read, and begin anew whenever the stream ends."""
        while True:
            wait_s = self.args.health_interval
            try:
                if not await self.read(url, stream):
                    wait_s *= RARELY
            except Behind:
                self.resyncs[url] = self.resyncs.get(url, 0) + 1
                wait_s = 0.0
            except (httpx.TransportError, ValueError):  # it is gone, or says what is no batch
                pass
            finally:
                if self.streams.get(url) is stream:  # and no newer one has begun
                    stream.follower = Follower()
                    self.index.drop(url)
            await asyncio.sleep(wait_s)

    async def read(self, url: str, stream: Stream) -> bool:
        """One stream to its end. False: the replica has none. Raises Behind, ValueError and
        httpx.TransportError.
        """
        wait = httpx.Timeout(self.args.events_timeout, connect=self.args.connect_timeout)
        key = self.args.replica_api_key
        request = httpx.Request(
            "GET",
            url + PATH,
            headers={"authorization": f"Bearer {key}"} if key else {},
            extensions={"timeout": wait.as_dict()},
        )
        response = await self.transport.handle_async_request(request)
        async with aclosing(response), aclosing(response.aiter_lines()) as lines:
            if response.status_code != 200:
                return False
            async for line in lines:
                if line.startswith("data:"):
                    self.take(url, stream, json.loads(line[len("data:") :]))
        return True

    def take(self, url: str, stream: Stream, found: dict) -> None:
        """A batch has come. Raises Behind and ValueError."""
        events = stream.follower.take(from_json(found))
        if stream.follower.is_behind:
            raise Behind
        if events is not None:
            stream.block_size, stream.models = int(found["block_size"]), found["models"]
            self.index.apply(url, events)
