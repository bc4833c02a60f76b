"""The engine for an event loop: one thread runs the steps, many tasks wait for their answers.

engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="models/tiny"))
async for output in engine.generate("def f(", SamplingParams(), "request 1"):
    print(output.outputs[0].text)
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from reference.engine import Engine
from reference.engine_args import EngineArgs
from reference.llm import new_engine
from reference.lora import LoRARequest
from reference.outputs import RequestOutput
from reference.sampling_params import SamplingParams


class AsyncEngineArgs(EngineArgs):
    """The same arguments; vLLM has a class for each."""


class EngineDeadError(RuntimeError):
    """A step raised; the engine answers nobody any more. The cause is attached."""


@dataclass(eq=False)
class Waiter:
    """Who waits for a request's outputs, in which loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue

    def put(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread. A loop that is closed has nobody left to tell."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncLLMEngine:
    """An Engine and the thread that owns it. Everybody else sends that thread commands, which it
    runs between two steps; so nothing is locked, and nobody waits longer than a step.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.waiters: dict[str, Waiter] = {}
        self.commands: SimpleQueue[tuple[Callable, Future]] = SimpleQueue()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLMEngine":
        """A new engine. Raises ValueError, in one line, for arguments that cannot work."""
        return cls(new_engine(args))

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The request as it stands after each of its tokens. Leaving the loop early aborts it.

        Raises ValueError for a request that cannot be served, EngineDeadError if a step failed.
        """
        waiter = Waiter(asyncio.get_running_loop(), asyncio.Queue())

        def add() -> None:
            self.engine.add_request(request_id, prompt, sampling_params, priority, lora_request)
            self.waiters[request_id] = waiter

        finished = False
        try:
            await self._do(add)
            while not finished:
                item = await waiter.queue.get()
                if isinstance(item, BaseException):
                    raise EngineDeadError(f"{type(item).__name__}: {item}") from item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._send(lambda: self._forget(request_id, waiter))

    async def abort(self, request_id: str) -> None:
        """End a request; whoever waits for it gets what it has. An unknown one: nothing happens."""
        await self._do(lambda: self._forget(request_id))

    def shutdown(self) -> None:
        """End the thread after the step under way, and what runs the model."""
        self._send(self._stop)
        self.thread.join()
        self.engine.close()

    # ------------------------------------------------------------ commands

    def _send(self, command: Callable) -> Future:
        done = Future()
        self.commands.put((command, done))
        if not self.thread.is_alive():
            self._refuse_all()  # nobody runs commands any more
        return done

    async def _do(self, command: Callable) -> None:
        await asyncio.wrap_future(self._send(command))

    # ------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        try:
            while True:
                self._obey()
                for output in self.engine.step():
                    if (waiter := self.waiters.get(output.request_id)) is not None:
                        waiter.put(output)
                        if output.finished:
                            del self.waiters[output.request_id]
        except BaseException as error:
            self.failure = error
            if not isinstance(error, SystemExit):
                for waiter in self.waiters.values():
                    waiter.put(error)
            self._refuse_all()

    def _obey(self) -> None:
        """Run the commands that have come; sleep while there is nothing else to do."""
        while not (self.commands.empty() and self.engine.has_unfinished_requests):
            command, done = self.commands.get()
            if not done.set_running_or_notify_cancel():
                continue  # who asked has gone
            try:
                done.set_result(command())
            except Exception as error:
                done.set_exception(error)

    def _forget(self, request_id: str, mine: Waiter | None = None) -> None:
        """End a request. mine: only if it is this waiter's, and not a namesake that was refused."""
        waiter = self.waiters.get(request_id)
        if waiter is None or mine not in (None, waiter):
            return
        del self.waiters[request_id]
        output = self.engine.abort_request(request_id)
        if output is not None:
            waiter.put(output)

    def _stop(self) -> None:
        for request_id in list(self.waiters):
            self._forget(request_id)
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
