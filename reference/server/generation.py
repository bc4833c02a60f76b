"""A call under way: what the engine gives, cut into what is new.

Read `Run.deltas`. A reader that stops, because the client has gone or an error came, ends the
call's requests in the engine, and their blocks are free after the step under way.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing

from lessons.toolbox.exercises.drop_ins import PartFailed
from reference.engine.async_engine import DeadlineExceeded, Draining, EngineDeadError, Overloaded
from reference.engine.outputs import CompletionOutput, RequestOutput
from reference.server.calls import Answer, Call, Delta, Usage
from reference.server.errors import ApiError, bad_request
from reference.server.service import Service

Tagged = tuple[int, RequestOutput]  # of which prompt


class Run:
    """A call and what has been told of it so far. outputs: the newest of each prompt."""

    def __init__(self, service: Service, call: Call):
        self.service = service
        self.call = call
        self.usage = Usage(prompt=call.num_prompt_tokens)
        self.outputs: dict[int, RequestOutput] = {}
        self.told: dict[int, list[int]] = {}  # of each answer: characters, tokens

    async def answers(self) -> list[Answer]:
        """All answers, finished. Raises ApiError."""
        answers = [Answer(at) for at in range(len(self.call.prompts) * self.call.params.n)]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                answers[delta.index].add(delta)
        return answers

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, as it comes; the last delta of an answer has a finish_reason.

        Raises ApiError for a call that cannot be served, and when the server ends it early.
        """
        try:
            await self.prepare()
            async with aclosing(self.all_outputs()) as outputs:
                async for prompt, output in outputs:
                    if prompt not in self.outputs:
                        self.usage.cached += output.num_cached_tokens
                    self.outputs[prompt] = output
                    for delta in self.news(prompt, output):
                        if delta.finish_reason == "abort":
                            raise ended_early(delta.stop_reason)
                        yield delta
        except (ValueError, Overloaded, DeadlineExceeded, EngineDeadError, PartFailed) as error:
            raise refusal(error) from error

    async def prepare(self) -> None:
        """Compile the form of the answer. Raises ApiError that names it as the client did."""
        wish = self.call.params.structure
        if wish is None:
            return
        try:
            await self.service.engine.prepare(wish)
        except ValueError as error:
            message = wish.as_sent(str(error))
            raise bad_request(message, re.match(r"\w+", message)[0]) from None

    def request_id(self, prompt: int) -> str:
        """The engine's name of one prompt of the call."""
        return f"{self.call.id}-{prompt}"

    # ------------------------------------------------------------ from the engine

    def all_outputs(self) -> AsyncIterator[Tagged]:
        """Of all prompts, as they come."""
        count = len(self.call.prompts)
        return self.outputs_of(0) if count == 1 else merged(map(self.outputs_of, range(count)))

    async def outputs_of(self, prompt: int) -> AsyncIterator[Tagged]:
        """Of one prompt."""
        call = self.call
        outputs = self.service.engine.generate(
            call.engine_prompt(prompt),
            call.params,
            self.request_id(prompt),
            priority=call.priority,
            lora_request=call.lora,
            user=call.user,
            timeout_s=self.service.args.request_timeout,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield prompt, output

    # ------------------------------------------------------------ to the client

    def news(self, prompt: int, output: RequestOutput) -> list[Delta]:
        """What of an output has not been told."""
        params = self.call.params
        if params.drawn > params.n and not output.finished:
            return []  # which of them are the best shows at the end
        found = [self.delta(prompt * params.n + one.index, one) for one in output.outputs]
        return [delta for delta in found if delta is not None]

    def delta(self, index: int, answer: CompletionOutput) -> Delta | None:
        """What of an answer has not been told; None for nothing."""
        told = self.told.setdefault(index, [0, 0])
        characters, tokens = told
        is_over = tokens < 0
        if is_over or (len(answer.token_ids) == tokens and not answer.finished):
            return None
        new = answer.token_ids[tokens:]
        told[:] = len(answer.text), -1 if answer.finished else len(answer.token_ids)
        self.usage.completion += len(new)
        return Delta(
            index,
            answer.text[characters:],
            new,
            None if answer.logprobs is None else answer.logprobs[tokens:],
            answer.finish_reason,
            answer.stop_reason,
        )


def ended_early(why: str | None) -> ApiError:
    """An answer that the engine alone ended. why: what its grammar says, if that was it."""
    if why is not None:
        return bad_request(why)
    return ApiError(503, "the server ended this answer: it is shutting down")


def refusal(error: Exception) -> ApiError:
    """What the engine raised, as the client is told."""
    if isinstance(error, Draining):
        return ApiError(503, str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), None, "rate_limit_exceeded", error.retry_after_s)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, f"{error} (--request-timeout)")
    if isinstance(error, (EngineDeadError, PartFailed)):
        return ApiError(500, str(error))
    # the engine's own name of a request means nothing to a client
    return bad_request(re.sub(r"^request \S+: ", "n: got ", str(error)))


async def merged(streams) -> AsyncIterator:
    """Items of many asynchronous iterators, as they come. The first error ends all of them. No task
    runs ahead of the reader by more than an item, so that mailboxes behind them can skip.
    """
    queue: asyncio.Queue = asyncio.Queue()

    async def pump(stream) -> None:
        taken = asyncio.Event()
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((item, taken, None))
                    await taken.wait()
                    taken.clear()
            queue.put_nowait((None, None, None))
        except Exception as error:
            queue.put_nowait((None, None, error))

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item, taken, error = await queue.get()
            if error is not None:
                raise error
            if taken is None:
                left -= 1
            else:
                yield item
                taken.set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
