"""The engine for an event loop: one thread runs the steps, many tasks wait for their answers.

engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="models/tiny"))
async for output in engine.generate("def f(", SamplingParams(), "request 1"):
    print(output.outputs[0].text)

The thread, the mailboxes and the commands are lesson 22's; here are whom it lets in, and its
counts.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from lessons.l22_serving.admission import (
    AdmissionControl,
    Limits,
    Overloaded,
    ServiceRate,
)
from lessons.l22_serving.mailbox import RequestStream, deliver
from lessons.l22_serving.optimized import (
    AsyncEngine,
    DeadlineExceeded,
    Draining,
    EngineDeadError,
)
from lessons.toolbox.exercises.drop_ins import PartFailed, naming_exercises
from lessons.toolbox.model.arguments import is_number, refuse
from reference.engine.admitted import queue_of_all
from reference.engine.assembly import new_engine
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs, takes_vllm_names
from reference.engine.outputs import RequestOutput
from reference.engine.request import EngineRequest
from reference.engine.sampling_params import SamplingParams
from reference.engine.stats import EngineStats, IterationStats, StatsCounter
from reference.features.lora import LoRARequest
from reference.features.structured import StructuredOutputsParams

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "DeadlineExceeded",
    "Draining",
    "EngineDeadError",
    "Overloaded",
]


class WorkersDied(BaseException):
    """No Exception, which a command would give to who has asked for it."""


@takes_vllm_names("EngineArgs")
@dataclass
class AsyncEngineArgs(EngineArgs):
    """The same arguments, and whom to turn away; vLLM has a class for each, too.

    max_waiting_requests, max_waiting_tokens: of the queue, beyond those for whom there is a place;
    max_waiting_per_user: requests of one user; max_wait_s: seconds that the queue would take. None:
    no limit. A request that would exceed one gets Overloaded.
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_waiting_per_user: int | None = None
    max_wait_s: float | None = None

    def __post_init__(self):
        super().__post_init__()
        self.limits  # noqa: B018, because it checks them

    @property
    def limits(self) -> Limits:
        """For admission control. Raises ValueError for one that cannot work."""
        return Limits(
            self.max_waiting_requests,
            self.max_waiting_tokens,
            self.max_waiting_per_user,
            self.max_wait_s,
        )


class Generates(ABC):
    """What gives a request's outputs as they come: a thread of this process, or another process."""

    @abstractmethod
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
        """Queue a request; `async for` over what this returns gives it as it stands after its
        tokens. A reader who is slower than the engine skips some, and sees the newest. Leaving
        early, or close(), aborts it.

        user: among whom scheduling_policy "fair" shares, and whom max_waiting_per_user limits.
        timeout_s: seconds after which the answer is not wanted: then, or as soon as it cannot come
        in time, reading raises DeadlineExceeded. Raises ValueError for a request that cannot be
        served, Overloaded (with retry_after_s) for one that is not let in, Draining, which is one,
        before the end, EngineDeadError if a step failed, and PartFailed if a learner's part did.
        """

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        user: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """add_request and its outputs in one, as vLLM has it. Leaving the loop early aborts it."""
        wishes = (prompt, sampling_params, priority, lora_request, user, timeout_s)
        stream = await self.add_request(request_id, *wishes)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()


class AsyncLLMEngine(AsyncEngine, Generates):
    """An Engine and the thread that owns it. limits: which requests it turns away; None: none."""

    engine: Engine

    def __init__(self, engine: Engine, limits: Limits | None = None):
        self.rate = ServiceRate()
        queue = partial(queue_of_all, engine.engines)
        self.admission = AdmissionControl(limits or Limits(), self.rate, queue)
        self.counter = StatsCounter(engine)
        self.tokenizer = engine.tokenizer
        self.info = EngineInfo.of(engine)
        super().__init__(engine)
        for part in engine.engines:
            part.runner.when_dead(self.end_dead)

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, adapters: Iterable[LoRARequest] = ()
    ) -> "AsyncLLMEngine":
        """A new engine, and these adapters on the host. Raises ValueError, in one line, for
        arguments that cannot work.
        """
        engine = new_engine(args)
        for adapter in adapters:
            engine.add_lora(adapter)
        return cls(engine, getattr(args, "limits", None))

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
        wishes = (request_id, prompt, sampling_params, priority, lora_request, user)
        return await self.submit(request_id, partial(self.add_now, wishes, timeout_s), timeout_s)

    async def prepare(self, params: StructuredOutputsParams) -> None:
        """Compile a structure before a request asks for it. Beside the steps, because a large
        schema takes long. Raises ValueError in one line.
        """
        await asyncio.to_thread(self.engine.structures.prepare, params)

    async def call(self, function: Callable, *arguments):
        """function(engine, *arguments), between two steps. All tokens wait for it."""
        return await self.between_steps(partial(function, self.engine, *arguments))

    def end_dead(self, error: BaseException) -> None:
        """What runs the model has died. End now and not with the next request, so that a probe of
        /health hears of it. From any thread.
        """

        def end() -> None:
            raise WorkersDied(error) from error

        self.send(end)

    def shutdown(self) -> None:
        """End the thread after the step under way, and what runs the model."""
        super().shutdown()
        self.engine.close()

    @property
    def observers(self) -> list[Callable[[IterationStats], None]]:
        """Each is called after each step, with what it added."""
        return self.counter.observers

    def stats(self) -> EngineStats:
        """What the engine does now, and has done. From any thread."""
        return self.counter.stats()

    # ------------------------------------------------------------ in the engine's thread

    def add_now(self, wishes: tuple, timeout_s: float | None) -> float:
        """Give a request to the engine, if it is let in. wishes: of Engine.add_request, and all of
        them. Returns the seconds that it will take once it has begun.
        """
        request_id, *_, user = wishes

        def admit(request: EngineRequest) -> None:
            prompt_tokens = len(request.prompt_token_ids)
            self.admission.admit(
                user, prompt_tokens, request.most_tokens - prompt_tokens, timeout_s
            )

        for part in self.engine.engines:
            part.admit = admit
        try:
            with naming_exercises():
                self.engine.add_request(*wishes)
        except Overloaded:
            self.counter.totals["num_refused"] += 1
            raise
        request = self.engine.requests[request_id]
        longest = max(sequence.max_new_tokens for sequence in request.sequences)
        return self.rate.service_s(len(request.prompt_token_ids), longest)

    def step(self) -> list[RequestOutput]:
        """One step, counted."""
        begin = time.perf_counter()
        try:
            with naming_exercises():
                touched = self.engine.advance()
        except PartFailed as failed:
            self.end_failed(failed)
            return []
        counted = self.counter.count(touched)
        tokens = counted.num_prompt_tokens + counted.num_generation_tokens
        self.rate.ran(tokens, time.perf_counter() - begin)
        for request in counted.finished_requests:
            self.rate.answered(request.num_generation_tokens)
        return [request.output() for request in touched]

    def end_failed(self, failed: PartFailed) -> None:
        """A learner's part has raised: the requests of the step end, and the engine goes on."""
        if all(request_id in self.engine.requests for request_id in self.waiters):
            # It raised before it was known what would run, and would do so again.
            for request_id in list(self.engine.requests):
                self.engine.abort_request(request_id)
        ended = [name for name in self.waiters if name not in self.engine.requests]
        deliver([(self.waiters.pop(name), failed) for name in ended])

    def has_begun(self, request_id: str) -> bool:
        """Whether it has run at all."""
        return self.engine.requests[request_id].metrics.first_scheduled is not None

    def end(self, request_id: str, was_late: bool = False) -> RequestOutput | None:
        """Abort a request, and count it."""
        request = self.engine.requests.get(request_id)
        output = self.engine.abort_request(request_id)
        if request is not None:
            self.counter.left(request, "num_timeouts" if was_late else "num_aborted")
        return output


@dataclass(frozen=True)
class EngineInfo:
    """What a server tells of a model. dtype: as PyTorch names it, without "torch."; None if the
    model lies in workers, which alone know it. kv_transfer: where it takes K and V; None: nowhere.
    """

    max_model_len: int
    dtype: str | None
    device_type: str
    kv_transfer: dict | None = None

    @classmethod
    def of(cls, engine: Engine) -> "EngineInfo":
        """Of an engine."""
        model = engine.runner.model
        dtype = getattr(model, "dtype", None)
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        about = engine.engines[0].transfers.about
        return cls(engine.max_model_len, name, model.device.type, about)


def check_timeout(timeout_s: float | None) -> None:
    """Raise ValueError unless it is None or a positive number of seconds."""
    if timeout_s is not None and not (is_number(timeout_s, 0) and timeout_s > 0):
        refuse("timeout_s", timeout_s, "None, or a positive, finite number of seconds")
