"""The server's side of an engine in a process of its own, with AsyncLLMEngine's interface.

    engine = AsyncProcessEngine(AsyncEngineArgs(model="models/tiny"))
    async for output in engine.generate("def f(", SamplingParams(), "request 1"): ...

A thread waits at the pipe. Each message holds what a step has made for all requests, so the thread
wakes up once a step, fills the mailboxes and rings once, exactly as the engine's own thread would.
"""

import asyncio
import atexit
import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from lessons.l20_parallelism.processes.launch import exit_of, process_context
from lessons.l22_serving.mailbox import Bell, Bells, Mailbox, RequestStream, deliver
from reference.engine.async_engine import (
    AsyncEngineArgs,
    EngineDeadError,
    EngineInfo,
    Generates,
    check_timeout,
)
from reference.engine.model import load_tokenizer
from reference.engine.outputs import RequestOutput
from reference.engine.process.core import core_main
from reference.engine.process.messages import Change, Message, Raised, with_news
from reference.engine.sampling_params import SamplingParams
from reference.engine.stats import EngineStats, IterationStats
from reference.features.lora import LoRARequest
from reference.features.structured import StructuredOutputsParams
from reference.parallel.processes import without_main

WARM = "reference.engine.process.warm"
END_S = 10.0  # how long the process may take to end when it is asked to


@dataclass(eq=False)
class Reader:
    """Who waits for a request's outputs, and the newest of them."""

    mailbox: Mailbox
    bell: Bell
    newest: RequestOutput | None = None


class CoreClient(Generates):
    """An engine at the other end of a pipe. tokenizer, info: its, as AsyncLLMEngine has them."""

    def __init__(self, pipe: Connection, tokenizer, info: EngineInfo):
        self.pipe = pipe
        self.tokenizer = tokenizer
        self.info = info
        self.failure: EngineDeadError | None = None
        self.is_draining = self.is_ending = False
        self.newest_stats = EngineStats(0, 0, 0.0)
        self.observers: list[Callable[[IterationStats], None]] = []
        self.bells = Bells()
        self.readers: dict[int, Reader] = {}
        self.replies: dict[int, Future] = {}
        self.numbers = itertools.count()
        self.outgoing: deque[tuple[int, Future, bytes]] = deque()  # append and popleft are atomic
        self.lock = threading.Lock()  # of the pipe's end, and of who waits for something from it
        self.thread = threading.Thread(target=self._read, name="engine", daemon=True)
        self.thread.start()

    @property
    def is_ready(self) -> bool:
        """As AsyncEngine.is_ready."""
        return self.failure is None and not self.is_draining

    def stats(self) -> EngineStats:
        """What the engine has done up to its newest message. From any thread."""
        return self.newest_stats

    # ------------------------------------------------------------ in the event loop

    async def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        user: str = "",
        timeout_s: float | None = None,
    ) -> RequestStream:
        """As in Generates."""
        check_timeout(timeout_s)
        reader = Reader(Mailbox(), self.bells.of(asyncio.get_running_loop()))
        number = next(self.numbers)
        wishes = (request_id, prompt, sampling_params, priority, lora_request, user)

        def forget() -> None:
            self.readers.pop(number, None)
            self._send("forget", number, request_id)

        self.readers[number] = reader  # first, because its output may come before the reply
        try:
            await self._ask("add", number, time.monotonic(), timeout_s, wishes)
        except asyncio.CancelledError:
            forget()
            raise
        except BaseException:
            self.readers.pop(number, None)
            raise
        return RequestStream(reader.mailbox, forget)

    async def abort(self, request_id: str) -> None:
        """As AsyncEngine.abort."""
        await self._ask("abort", request_id)

    async def drain(self, timeout_s: float | None = None) -> int:
        """As AsyncEngine.drain."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._ask("begin_drain"), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return await self._ask("forget_all")
        return 0

    async def prepare(self, params: StructuredOutputsParams) -> None:
        """As AsyncLLMEngine.prepare."""
        await self._ask("prepare", params)

    async def call(self, function: Callable, *arguments):
        """As AsyncLLMEngine.call. function: at the top of a module that the process can import."""
        return await self._ask("call", function, arguments)

    async def _ask(self, order: str, *arguments):
        return await asyncio.wrap_future(self._send(order, *arguments))

    def _send(self, order: str, *arguments) -> Future:
        """Send an order. Returns what the reply, or EngineDeadError, will come to."""
        number, done = next(self.numbers), Future()
        message = pickle.dumps((number, pickle.dumps((order, arguments))))
        self.outgoing.append((number, done, message))
        self._send_what_waits()
        return done

    def _send_what_waits(self) -> None:
        """The thread that has the lock sends all orders. None waits for it, because a thread that
        has it may come here again: garbage is collected at any line, and a dropped stream then says
        that no client reads it.
        """
        while self.outgoing and self.lock.acquire(blocking=False):
            dead = None
            try:
                number, done, message = self.outgoing.popleft()
                dead = self.failure
                if dead is None:
                    self.replies[number] = done
                    self.pipe.send_bytes(message)
            except IndexError:
                continue  # another thread has sent it
            except OSError:
                del self.replies[number]
                dead = EngineDeadError("the engine has ended: its process is gone")
            finally:
                self.lock.release()
            if dead is not None and done.set_running_or_notify_cancel():
                done.set_exception(dead)

    # ------------------------------------------------------------ in the thread at the pipe

    def _read(self) -> None:
        """What comes, until the process has ended."""
        with suppress(EOFError, OSError):
            while True:
                self._take(pickle.loads(self.pipe.recv_bytes()))
        self._end("shut down" if self.is_ending else self.cause_of_death())

    def _take(self, message: Message) -> None:
        self.newest_stats = message.stats
        for step in message.steps:
            for observe in self.observers:
                observe(step)
        deliver(self._news(message.changes))
        for number, value, raised in message.replies:
            done = self.replies.pop(number, None)
            if done is None or not done.set_running_or_notify_cancel():
                continue  # who asked has gone
            if raised is None:
                done.set_result(value)
            else:
                done.set_exception(raised.error())
        if message.failure is not None:
            self._end(message.failure)

    def _news(self, changes: list[Change]) -> Iterator[tuple[Reader, RequestOutput]]:
        """Who gets what. A request without a reader was forgotten."""
        for number, news in changes:
            reader = self.readers.get(number)
            if reader is None:
                continue
            if isinstance(news, Raised):
                output = news.error()
            elif isinstance(news, RequestOutput):
                output = news
            else:
                output = with_news(reader.newest, news)
            if isinstance(output, BaseException) or output.finished:
                self.readers.pop(number, None)
            reader.newest = output
            yield reader, output

    def _end(self, said: str) -> None:
        """The engine answers no call any more."""
        with self.lock:
            self.failure = self.failure or EngineDeadError(said)
            readers, self.readers = self.readers, {}
            replies, self.replies = self.replies, {}
        deliver((reader, self.failure) for reader in readers.values())
        for done in replies.values():
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineDeadError(f"the engine has ended: {said}"))
        self._send_what_waits()  # to no caller: who asked while the lock was taken here is told so

    def cause_of_death(self) -> str:
        """Why nothing comes any more."""
        return "its process died"

    def shutdown(self) -> None:
        """End the engine after the step under way. Requests that have not ended are aborted."""
        self.is_ending = True
        self._send("shutdown")
        self.thread.join(END_S)


class AsyncProcessEngine(CoreClient):
    """An engine in a process of its own. adapters: those that are read before the first request.

    Raises ValueError, in one line, for arguments that cannot work.
    """

    def __init__(self, args: AsyncEngineArgs, adapters: Iterable[LoRARequest] = ()):
        context = process_context((WARM,))
        pipe, theirs = context.Pipe()
        # no daemon, because those may not start the workers of a model that is cut into parts
        arguments = (theirs, args, list(adapters))
        self.process = context.Process(target=core_main, args=arguments, name="engine")
        with without_main():
            self.process.start()
        theirs.close()  # so that we read the end of file when the process dies
        atexit.register(self.kill)
        try:
            info = self.wait_until_ready(pipe)
            tokenizer = load_tokenizer(args.tokenizer or args.model)
        except BaseException:
            self.kill()
            raise
        super().__init__(pipe, tokenizer, info)

    def wait_until_ready(self, pipe: Connection) -> EngineInfo:
        """What the process says when it has loaded. Raises what it raised."""
        try:
            found = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError(f"engine: {self.cause_of_death()} while it loaded") from None
        if isinstance(found, Raised):
            raise found.error()
        return found

    def cause_of_death(self) -> str:
        """How the process ended."""
        self.process.join(END_S)
        return f"its process died ({exit_of(self.process)})"

    def shutdown(self) -> None:
        """End the process after the step under way. Requests that have not ended are aborted."""
        super().shutdown()
        self.kill()
        self.thread.join()

    def kill(self) -> None:
        """End the process at once."""
        atexit.unregister(self.kill)
        self.process.kill()
        self.process.join()
