"""The engine's process: it does what comes through the pipe, and tells what its steps have made.

The main thread reads orders and the engine's thread runs them between two steps, as it does for an
event loop of its own process. What a step made goes out in one message, because its mailboxes are
Outboxes and share one bell: this one.
"""

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lessons.l20_parallelism.processes.launch import end_with_parent
from lessons.l22_serving.optimized import Waiter
from lessons.toolbox.model.arguments import one_line
from reference.engine.async_engine import AsyncEngineArgs, AsyncLLMEngine, EngineInfo
from reference.engine.process.messages import Message, Outbox, Raised
from reference.engine.stats import IterationStats
from reference.features.lora import LoRARequest
from reference.features.structured import StructuredOutputsParams


class Core:
    """An AsyncLLMEngine at the end of a pipe. Its methods without _ are what may be ordered: each
    returns what to reply, or a Future of it.
    """

    def __init__(self, served: AsyncLLMEngine, pipe: Connection):
        self.served = served
        self.pipe = pipe
        self.sending = threading.Lock()
        self.steps: list[IterationStats] = []
        self.is_over = False
        self.compilers = ThreadPoolExecutor(2, "compile")  # of structures
        served.observers.append(self._note)

    # ------------------------------------------------------------ orders

    def add(self, number: int, asked_s: float, timeout_s: float | None, wishes: tuple) -> Future:
        """A request. wishes: of Engine.add_request, and all of them."""
        request_id, _, params = wishes[:3]
        whole = params is not None and params.drawn > params.n
        waiter = Waiter(Outbox(number, whole), self)
        add = partial(self.served.add_now, wishes, timeout_s)
        enter = partial(self.served.enter, waiter, request_id, add, timeout_s, asked_s)
        return self.served.send(enter)

    def forget(self, number: int, request_id: str) -> Future:
        """This request has no reader any more."""

        def forget() -> None:
            waiter = self.served.waiters.get(request_id)
            if waiter is not None and waiter.mailbox.number == number:  # and no namesake
                self.served.forget(request_id)

        return self.served.send(forget)

    def abort(self, request_id: str) -> Future:
        """As AsyncLLMEngine.abort."""
        return self.served.send(partial(self.served.forget, request_id))

    def begin_drain(self) -> Future:
        """Let no request in any more. The reply comes when all have their answers."""
        drained = Future()

        def begin() -> None:
            self.served.begin_drain().add_done_callback(lambda _: drained.set_result(None))

        self.served.send(begin)
        return drained

    def forget_all(self) -> Future:
        """End all requests. The reply says how many there were."""
        return self.served.send(self.served.forget_all)

    def prepare(self, params: StructuredOutputsParams) -> Future:
        """Compile a structure, beside the steps."""

        def compile_it() -> None:  # and reply nothing, because what was compiled stays here
            self.served.engine.structures.prepare(params)

        return self.compilers.submit(compile_it)

    def call(self, function: Callable, arguments: tuple) -> Future:
        """function(engine, *arguments) between two steps."""
        return self.served.send(partial(function, self.served.engine, *arguments))

    def shutdown(self) -> Future:
        """End the engine. Nothing is done after it."""
        self.is_over = True
        self.served.shutdown()
        return self.served.send(lambda: None)  # which says that the engine has ended

    # ------------------------------------------------------------ in and out

    def serve(self) -> None:
        """Do what is ordered, until that is the end. Raises EOFError or OSError when no process is
        at the other end.
        """
        threading.Thread(target=self._tell_of_the_end, name="end", daemon=True).start()
        while not self.is_over:
            number, order = pickle.loads(self.pipe.recv_bytes())
            done = Future()
            try:
                name, arguments = pickle.loads(order)
                done = getattr(self, name)(*arguments)
            except Exception as error:
                done.set_exception(error)
            done.add_done_callback(partial(self._reply, number))

    def ring(self, outboxes: Iterable[Outbox]) -> None:
        """As a Bell: a step has filled these. In the engine's thread."""
        self._send(changes=[outbox.change() for outbox in outboxes])

    def _note(self, step: IterationStats) -> None:
        with self.sending:
            self.steps.append(step)
        if not (step.num_generation_tokens or step.finished_requests):
            self._send()  # no client's bell rings, and the counts have changed

    def _reply(self, number: int, done: Future) -> None:
        error = done.exception()
        value = None if error is not None else done.result()
        try:
            self._send(replies=[(number, value, error and Raised.of(error))])
        except (pickle.PicklingError, TypeError, AttributeError) as wrong:
            self._send(replies=[(number, None, Raised.of(RuntimeError(str(wrong))))])

    def _tell_of_the_end(self) -> None:
        self.served.thread.join()
        self._send()  # a step may have raised when no client waited

    def _send(self, **news: Any) -> None:
        failure = self.served.failure
        has_failed = failure is not None and not isinstance(failure, SystemExit)
        said = one_line(f"{type(failure).__name__}: {failure}") if has_failed else None
        with self.sending, suppress(OSError):  # no process is at the other end
            message = Message(self.served.stats(), steps=self.steps, failure=said, **news)
            self.pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            self.steps = []


def core_main(pipe: Connection, args: AsyncEngineArgs, adapters: list[LoRARequest]) -> None:
    """The body of the process. It tells an EngineInfo first, or what was Raised."""
    end_with_parent()
    # The server's process decides what they mean. Both may go to all processes of a terminal, or of
    # a service, and this one has answers to finish.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    with suppress(EOFError, OSError):  # no process is at the other end
        try:
            served = AsyncLLMEngine.from_engine_args(args, adapters)
        except Exception as error:
            pipe.send_bytes(pickle.dumps(Raised.of(error)))
            return
        # What was loaded stays, so no collection of garbage needs to look at it.
        gc.collect()
        gc.freeze()
        pipe.send_bytes(pickle.dumps(EngineInfo.of(served.engine)))
        Core(served, pipe).serve()
    os._exit(0)  # because a thread may still be compiling
