"""Which replicas there are, which of them take requests, and how many each has.

Two things say that a replica takes none. It is asked every second, so that one that drains or still
loads its model gets nobody. And whoever cannot reach it tells the others, so that nobody else tries
before it has answered again.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import numpy as np

from reference.router.args import RouterArgs
from reference.router.policies import PrefixHash, Prompt, new_policy


@dataclass
class Replica:
    """One server. in_flight: requests that this router has sent there and that have not ended."""

    url: str
    in_flight: int = 0
    is_ready: bool = False


class Replicas:
    """All of them. transport: how they are asked."""

    def __init__(self, args: RouterArgs, transport: httpx.AsyncBaseTransport):
        self.args = args
        self.transport = transport
        self.all = [Replica(url) for url in args.replicas]
        self.policy = new_policy(args)
        self.homes = PrefixHash(args.replicas, args.balance)
        self.watchers: list[asyncio.Task] = []

    def candidates(self, prompt: Prompt) -> Iterator[Replica]:
        """Replicas for a request, the best first, each once. Each is chosen when it is asked for, by
        the loads of that moment.
        """
        tried: set[str] = set()
        while True:
            loads = np.array(
                [
                    one.in_flight if one.is_ready and one.url not in tried else np.inf
                    for one in self.all
                ]
            )
            if loads.min() == np.inf:
                return
            replica = self.all[self.policy.choose(prompt, loads)]
            tried.add(replica.url)
            yield replica

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
        await asyncio.gather(*map(self.ask, self.all))
        self.watchers = [asyncio.ensure_future(self.watch(replica)) for replica in self.all]

    async def stop(self) -> None:
        """Ask no longer."""
        for watcher in self.watchers:
            watcher.cancel()
        await asyncio.gather(*self.watchers, return_exceptions=True)

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
            await response.aclose()
            replica.is_ready = response.status_code == 200
        except httpx.TransportError:
            replica.is_ready = False
