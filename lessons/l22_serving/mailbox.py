"""What is between the engine's thread and a reader in an event loop: room for one message.

An output holds the whole answer so far, so the newest one replaces those that were not read. A
reader who is slow, or an event loop that is held up, then skips messages and misses no token. The
engine never waits for a reader, and memory does not grow, however slow the reader is.

naive.py has the two queues that one would write first, and what goes wrong with each.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol


class Mailbox:
    """The newest output of one request. One thread puts, one task of one event loop gets."""

    def __init__(self):
        self.newest: deque = deque(maxlen=1)  # whose append and popleft are atomic
        self.has_come = asyncio.Event()

    def put(self, output) -> None:
        """From any thread; ring the reader's Bell afterwards."""
        self.newest.append(output)

    async def get(self):
        """The newest output, as soon as there is one that was not read. An exception is raised."""
        while not self.newest:
            # What is put from here on rings, and only this loop answers a bell: so it sets the
            # event after this line, never before.
            self.has_come.clear()
            await self.has_come.wait()
        output = self.newest.popleft()
        if isinstance(output, BaseException):
            raise output
        return output


class Bell:
    """Wakes the readers of one event loop. To call into a loop from another thread costs a system
    call, so all mailboxes that a step filled share one; and while the loop has not come to answer
    it, they share that one, too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.lock = threading.Lock()
        self.filled: set[Mailbox] = set()

    def ring(self, mailboxes: Iterable[Mailbox]) -> None:
        """From any thread. A loop that is closed has no reader left to wake."""
        with self.lock:
            is_ringing = bool(self.filled)
            self.filled.update(mailboxes)
        if not is_ringing:
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # it has just been closed
                self.filled.clear()

    def _wake(self) -> None:
        with self.lock:
            filled, self.filled = self.filled, set()
        for mailbox in filled:
            mailbox.has_come.set()


class Waits(Protocol):
    """Who waits for outputs, and in which loop."""

    mailbox: Mailbox
    bell: Bell


class Bells:
    """A bell for each event loop in which a reader waits."""

    def __init__(self):
        self.known: dict[asyncio.AbstractEventLoop, Bell] = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> Bell:
        """The bell of this loop."""
        if loop not in self.known:
            # loops that were closed have gone for good
            self.known = {one: bell for one, bell in self.known.items() if not one.is_closed()}
            self.known[loop] = Bell(loop)
        return self.known[loop]


def deliver(messages: Iterable[tuple[Waits, object]]) -> None:
    """Put each message into its reader's mailbox, and ring once for each loop."""
    filled: dict[Bell, list[Mailbox]] = {}
    for waiter, message in messages:
        waiter.mailbox.put(message)
        filled.setdefault(waiter.bell, []).append(waiter.mailbox)
    for bell, mailboxes in filled.items():
        bell.ring(mailboxes)


class RequestStream:
    """The outputs of one request, for `async for`. A reader who leaves early closes it, or drops
    it.
    """

    def __init__(self, mailbox: Mailbox, forget: Callable[[], None]):
        self.mailbox = mailbox
        self.forget = forget
        self.is_open = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.is_open:
            raise StopAsyncIteration
        try:
            output = await self.mailbox.get()
        except Exception:
            self.is_open = False  # it has ended
            raise
        self.is_open = not output.finished
        return output

    def close(self) -> None:
        """The reader has left: the request is aborted, if it has not ended."""
        if self.is_open:
            self.is_open = False
            self.forget()

    def __del__(self):
        self.close()
