"""Which replicas there are, which of them take requests, and how many each has.

Two things say that a replica takes none. It is asked every second, so that one that drains or still
loads its model gets no request. And a request that cannot reach it tells the others, so that none
tries before it has answered again.

Where a name stands for them, it is looked up again and again. One that has gone from it gets no
request new, and one that has come gets its share of the prefixes.
"""

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
import numpy as np

from reference.router.args import RouterArgs
from reference.router.blocks import Blocks
from reference.router.cache_aware import CacheAware, Reader, Share
from reference.router.policies import PrefixHash, Prompt, new_policy


@dataclass
class Replica:
    """One server. in_flight: requests that this router has sent there and that have not ended."""

    url: str
    in_flight: int = 0
    is_ready: bool = False
    kv_transfer: dict | None = None  # where it takes K and V of prompts computed elsewhere


async def urls_of(name: str, wait_s: float) -> list[str]:
    """The addresses of dns://name:port. wait_s: how long an answer may take, in s.

    Raises OSError (or TimeoutError) where the name is not known now.
    """
    parts = urlsplit(name)
    loop = asyncio.get_running_loop()
    found = loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    hosts = {address[0] for *_, address in await asyncio.wait_for(found, wait_s)}
    bracketed = (f"[{host}]" if ":" in host else host for host in hosts)
    return sorted(f"http://{host}:{parts.port}" for host in bracketed)


def kv_transfer_in(said: bytes) -> dict | None:
    """What a replica says of --kv-transfer-config when it is asked whether it is ready."""
    try:
        found = json.loads(said)["kv_transfer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) and "remote_host" in found else None


class Replicas:
    """All of them. transport: how they are asked."""

    def __init__(self, args: RouterArgs, transport: httpx.AsyncBaseTransport):
        self.args = args
        self.transport = transport
        self.names = [url for url in args.replicas if url.startswith("dns:")]
        self.found: dict[str, list[str]] = {}  # what each name stood for when it was last known
        self.all: list[Replica] = []
        self.homes = PrefixHash([], args.balance)
        self.blocks: Blocks | None = None
        if args.policy == "kv":
            self.blocks = Blocks(args, transport)
            self.reader = Reader(transport, args.tokenize_timeout)
            self.policy = CacheAware(self.homes, self.blocks, args)
        else:
            self.policy = self.homes if args.policy == "prefix" else new_policy(args)
        self.watchers: dict[str, asyncio.Task] = {}
        self.take([url for url in args.replicas if url not in self.names])

    def take(self, urls: list[str]) -> None:
        """These there are from now on. Those that were there before are kept as they are."""
        known = {one.url: one for one in self.all}
        self.all = [known.get(url) or Replica(url) for url in urls]
        self.homes.names = urls

    def candidates(self, prompt: Prompt) -> Iterator[Replica]:
        """Replicas for a request, the best first, each once. Each is chosen when it is asked for,
        by the loads of that moment.
        """
        tried: set[str] = set()
        while True:
            loads = np.array(
                [
                    one.in_flight if one.is_ready and one.url not in tried else np.inf
                    for one in self.all
                ]
            )
            if not (loads < np.inf).any():
                return
            replica = self.all[self.policy.choose(prompt, loads)]
            tried.add(replica.url)
            yield replica

    async def read(self, prompt: Prompt, path: str, body: bytes, headers) -> Prompt:
        """The prompt with its tokens, if the policy needs them and there is an entry to compare
        them with. Those are asked that tell of their blocks, first the one with the fewest
        requests.
        """
        if prompt.prefix is None or self.blocks is None or not self.blocks.index.count:
            return prompt
        ready = [one for one in self.all if one.is_ready and self.blocks.is_fresh(one.url)]
        urls = [one.url for one in sorted(ready, key=lambda one: one.in_flight)]
        tokens = await self.reader.tokens(urls, path, body, headers)
        return prompt if tokens is None else replace(prompt, tokens=tokens)

    def begin(self, replica: Replica, prompt: Prompt, body: bytes) -> Share | None:
        """Note what a request is for a replica to do; None: the policy does not ask."""
        replica.in_flight += 1
        if self.blocks is None or prompt.prefix is None:
            return None
        return self.policy.begin(replica.url, prompt, body)

    def lost(self, replica: Replica) -> None:
        """It gets no request until it answers when it is asked, and what it held counts no more."""
        replica.is_ready = False
        if self.blocks is not None:
            self.blocks.lost(replica.url)

    def is_home(self, prompt: Prompt, replica: Replica) -> bool | None:
        """Whether no other ready replica comes before it for this prefix; None without a prefix."""
        if prompt.prefix is None:
            return None
        ranked = (self.all[at] for at in self.homes.ranked(prompt.prefix))
        return replica is next(one for one in ranked if one.is_ready)

    @property
    def num_ready(self) -> int:
        return sum(replica.is_ready for replica in self.all)

    async def start(self) -> None:
        """Ask each once, then go on asking. Call it in the event loop that serves."""
        await self.look_up()
        if self.names:
            self.watchers["names"] = asyncio.ensure_future(self.watch_names())

    async def stop(self) -> None:
        """Ask no longer."""
        for watcher in self.watchers.values():
            watcher.cancel()
        await asyncio.gather(*self.watchers.values(), return_exceptions=True)
        if self.blocks is not None:
            await self.blocks.stop()

    async def look_up(self) -> None:
        """Who stands behind the names now. A name that is not known at the moment keeps its last
        addresses, because the replicas are asked themselves whether they live.
        """
        for name in self.names:
            try:
                self.found[name] = await urls_of(name, self.args.connect_timeout)
            except (OSError, asyncio.TimeoutError):
                continue
        urls = []
        for url in self.args.replicas:
            urls += self.found.get(url, ()) if url in self.names else [url]
        self.take(list(dict.fromkeys(urls)))
        for url in self.watchers.keys() - {one.url for one in self.all} - {"names"}:
            self.watchers.pop(url).cancel()
            if self.blocks is not None:
                self.blocks.leave(url)
        new = [one for one in self.all if one.url not in self.watchers]
        await asyncio.gather(*map(self.ask, new))
        for one in new:
            self.watchers[one.url] = asyncio.ensure_future(self.watch(one))
            if self.blocks is not None:
                self.blocks.follow(one.url)

    async def watch_names(self) -> None:
        """Look up again and again."""
        while True:
            await asyncio.sleep(self.args.health_interval)
            await self.look_up()

    async def watch(self, replica: Replica) -> None:
        """Ask again and again. Each replica has a task, so that a slow one delays no other."""
        while True:
            await asyncio.sleep(self.args.health_interval)
            await self.ask(replica)

    async def ask(self, replica: Replica) -> None:
        """Whether it takes requests."""
        wait_s = self.args.connect_timeout
        request = httpx.Request(
            "GET",
            replica.url + self.args.ready_path,
            # a connection of its own, because a kept one says nothing of new ones
            headers={"connection": "close"},
            extensions={"timeout": httpx.Timeout(wait_s).as_dict()},
        )
        try:
            response = await self.transport.handle_async_request(request)
            said = await response.aread()
            await response.aclose()
            replica.is_ready = response.status_code == 200
            replica.kv_transfer = kv_transfer_in(said)
        except httpx.TransportError:
            replica.is_ready = False
