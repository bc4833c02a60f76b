"""One piece of work at a time, and the users whose work waits take turns.

Texts to embed are no requests of the scheduler, so its fairness does not reach them. A piece is one
text. A user with a thousand texts, or a thousand calls, gets every second turn beside a user with
one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Whose turn it is. waiting: {user: those who wait}; the first user is the next."""

    def __init__(self):
        self.is_busy = False
        self.waiting: dict[str, deque[asyncio.Future]] = {}

    @asynccontextmanager
    async def turn(self, user: str) -> AsyncIterator[None]:
        """Wait for a turn of this user, and have it inside the block. Who is cancelled while it
        waits has had none.
        """
        if self.is_busy:
            await self.called(user)
        self.is_busy = True
        try:
            yield
        finally:
            self.next(user)

    async def called(self, user: str) -> None:
        """Wait until it is a turn of this user."""
        ready = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(user, deque()).append(ready)
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():
                self.next(user)  # it was called and left in the same moment
            raise

    def next(self, user: str) -> None:
        """The turn of this user has ended: put it after all who wait now, and call the first user's
        oldest. Not before the end, because who asks again after each answer would wait for two.
        """
        if user in self.waiting:
            self.waiting[user] = self.waiting.pop(user)
        while self.waiting:
            first = next(iter(self.waiting))
            ready = self.waiting[first].popleft()
            if not self.waiting[first]:
                del self.waiting[first]
            if not ready.done():
                ready.set_result(None)
                return
        self.is_busy = False
