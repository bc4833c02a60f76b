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
            self.next()

    async def called(self, user: str) -> None:
        """Wait until it is a turn of this user."""
        ready = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(user, deque()).append(ready)
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():
                self.next()  # it was called and left in the same moment
            raise

    def next(self) -> None:
        """Call the next user's oldest, and put the user after all others."""
        while self.waiting:
            user = next(iter(self.waiting))
            queue = self.waiting.pop(user)
            ready = queue.popleft()
            if queue:
                self.waiting[user] = queue
            if not ready.done():
                ready.set_result(None)
                return
        self.is_busy = False
