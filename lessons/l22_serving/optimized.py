"""An engine for many people: one thread runs its steps, an event loop waits for its readers.

Read `_run` beside naive.py's `serve`. The thread owns the engine, so nothing is locked. All others
send it commands, which it runs between two steps: so a client who comes, goes or gives up is heard
within one step. What a step has made is put into mailboxes, and the engine waits for no reader.

Source: vLLM, vllm/v1/engine/async_llm.py and core_client.py, where the thread is a process.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from lessons.l22_serving.admission import Overloaded
from lessons.l22_serving.mailbox import Bell, Bells, Mailbox, RequestStream, deliver


class StepEngine(Protocol):
    """What is driven: lesson 22's LessonEngine, or the engine of reference/. One thread calls
    it.
    """

    has_unfinished_requests: bool

    def step(self) -> list:
        """Run one step. Returns an output for each request that got a token; it has a request_id,
        `finished`, and the whole answer so far.
        """

    def abort_request(self, request_id: str):
        """End a request and free what it holds. Returns its output, or None for an unknown one."""


class EngineDeadError(RuntimeError):
    """A step raised; the engine answers no request any more. The cause is attached."""


class Draining(Overloaded):
    """The server is about to end, and takes no new request. Another replica may."""

    def __init__(self):
        super().__init__("this server is shutting down", retry_after_s=1)


class DeadlineExceeded(TimeoutError):
    """The answer was not there, or could not have been there, when its time was over."""


@dataclass(eq=False)
class Waiter:
    """Who waits for a request's outputs. start_by_s, end_by_s: on the engine's clock, when it is
    too late to begin it and to go on with it; None: never.
    """

    mailbox: Mailbox
    bell: Bell
    start_by_s: float | None = None
    end_by_s: float | None = None


class AsyncEngine:
    """An engine and the thread that owns it."""

    def __init__(self, engine: StepEngine, clock: Callable[[], float] = time.monotonic):
        self.engine = engine
        self.clock = clock
        self.waiters: dict[str, Waiter] = {}
        self.bells = Bells()
        self.commands: SimpleQueue[tuple[Callable, Future]] = SimpleQueue()
        self.failure: BaseException | None = None
        self.drained: Future | None = None  # not None: no new request comes in
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests: the answer to a readiness probe. A server that drains is
        alive, and not ready.
        """
        return self.thread.is_alive() and self.failure is None and self.drained is None

    # ------------------------------------------------------------ in the event loop

    async def submit(
        self, request_id: str, add: Callable[[], float], timeout_s: float | None = None
    ) -> RequestStream:
        """Queue a request and return its outputs to come. add(): called in the engine's thread,
        gives it to the engine and returns the seconds that it will take once it has begun.

        timeout_s: seconds after which the answer is of no use: it is dropped before it is begun if
        that would be too late already, and at its present token if it has begun. Raises what add
        raises, Draining, and EngineDeadError.
        """
        waiter = Waiter(Mailbox(), self.bells.of(asyncio.get_running_loop()))
        enter = partial(self.enter, waiter, request_id, add, timeout_s, self.clock())

        def forget() -> None:
            self.send(lambda: self.forget(request_id, waiter))

        try:
            await self._do(enter)
        except asyncio.CancelledError:
            forget()  # it may have been added all the same
            raise
        return RequestStream(waiter.mailbox, forget)

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets what it has. An unknown one: nothing happens."""
        await self._do(lambda: self.forget(request_id))

    async def drain(self, timeout_s: float | None = None) -> int:
        """Take no new request, wait until all have their answers, at most timeout_s seconds, and
        abort the rest. Returns how many were aborted.
        """
        drained = await self._do(self.begin_drain)
        try:
            # shielded, because another caller may wait for it, too
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(drained)), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return await self._do(self.forget_all)
        return 0

    async def between_steps(self, command: Callable):
        """Run command() in the engine's thread, between two steps; returns what it returns.
        All tokens wait for it. Raises what it raises, and EngineDeadError.
        """
        return await self._do(command)

    def shutdown(self) -> None:
        """End the thread after the step under way. Requests that have not ended are aborted."""
        self.send(self.stop)
        self.thread.join()

    def send(self, command: Callable) -> Future:
        """Let the engine's thread run command() between two steps. From any thread."""
        done = Future()
        self.commands.put((command, done))
        # Not whether the thread is alive: between its own _refuse_all and its end it still is. It
        # sets `failure` before it refuses, so it refuses whatever was put by those who see none
        # yet.
        if self.failure is not None:
            self._refuse_all()
        return done

    async def _do(self, command: Callable):
        return await asyncio.wrap_future(self.send(command))

    # ------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                self._drop_late()
                self._deliver(self.step())
        except BaseException as error:
            self.failure = error
            if not isinstance(error, SystemExit):
                dead = EngineDeadError(f"{type(error).__name__}: {error}")
                dead.__cause__ = error
                deliver((waiter, dead) for waiter in self.waiters.values())
                self.waiters.clear()
            self._note_drained()
            self._refuse_all()

    def step(self) -> list:
        """One step of the engine. In the engine's thread; a subclass may look at what it did."""
        return self.engine.step()

    def _obey(self) -> None:
        """Run the commands that are there; sleep while there is nothing else to do. Those that come
        meanwhile run after the next step, or a flood of them would stop all tokens.
        """
        while True:
            for _ in range(self.commands.qsize()):
                self._obey_next()
            if self.engine.has_unfinished_requests:
                return
            self._obey_next()

    def _obey_next(self) -> None:
        """Run one command; sleep until there is one."""
        command, done = self.commands.get()
        if not done.set_running_or_notify_cancel():
            return  # who asked has gone
        try:
            done.set_result(command())
        except Exception as error:
            done.set_exception(error)

    def enter(
        self,
        waiter: Waiter,
        request_id: str,
        add: Callable[[], float],
        timeout_s: float | None,
        asked_s: float,
    ) -> None:
        """Let a request in whose outputs `waiter` gets. asked_s: when, on the engine's clock. The
        rest as in submit.
        """
        if self.drained is not None:
            raise Draining
        service_s = add()
        if timeout_s is not None:
            waiter.end_by_s = asked_s + timeout_s
            waiter.start_by_s = waiter.end_by_s - service_s
        self.waiters[request_id] = waiter

    def _drop_late(self) -> None:
        """End the requests whose time is over, before they cost a step more."""
        now = self.clock()
        for request_id, waiter in list(self.waiters.items()):
            if waiter.end_by_s is None:
                continue
            is_late = now >= waiter.end_by_s
            if is_late or (now > waiter.start_by_s and not self.has_begun(request_id)):
                del self.waiters[request_id]
                self.end(request_id, was_late=True)
                deliver([(waiter, DeadlineExceeded(f"request {request_id}: not in time"))])
        self._note_drained()

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has run at all. A subclass knows its engine."""
        return True

    def end(self, request_id: str, was_late: bool = False):
        """Abort a request, because of its deadline or because its reader has left."""
        return self.engine.abort_request(request_id)

    def _deliver(self, outputs: list) -> None:
        """Put what a step has made into the mailboxes. A request without one was forgotten."""
        known = [(self.waiters.get(output.request_id), output) for output in outputs]
        deliver((waiter, output) for waiter, output in known if waiter is not None)
        for output in outputs:
            if output.finished:
                self.waiters.pop(output.request_id, None)
        self._note_drained()

    def forget(self, request_id: str, mine: Waiter | None = None) -> None:
        """End a request. mine: only if it is this waiter's, and not a namesake that was refused."""
        waiter = self.waiters.get(request_id)
        if waiter is None or mine not in (None, waiter):
            return
        del self.waiters[request_id]
        output = self.end(request_id)
        if output is not None:
            deliver([(waiter, output)])
        self._note_drained()

    def forget_all(self) -> int:
        """End all requests. Returns how many there were."""
        count = len(self.waiters)
        for request_id in list(self.waiters):
            self.forget(request_id)
        return count

    def begin_drain(self) -> Future:
        """Let no request in any more. Returns what is done when all have their answers."""
        if self.drained is None:
            self.drained = Future()
        self._note_drained()
        return self.drained

    def _note_drained(self) -> None:
        if self.drained is not None and not self.waiters and not self.drained.done():
            self.drained.set_result(None)

    def stop(self) -> None:
        """End all requests, and the thread."""
        self.forget_all()
        raise SystemExit("shut down")

    def _refuse_all(self) -> None:
        """Answer the commands that came too late."""
        while True:
            try:
                _, done = self.commands.get_nowait()
            except Empty:
                return
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineDeadError(f"the engine has ended: {self.failure}"))
