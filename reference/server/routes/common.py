"""What the routes of several APIs do alike."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from reference.server.calls import Answer, Delta
from reference.server.errors import refused
from reference.server.generation import Run
from reference.server.protocol.sampling import SamplingFields
from reference.server.service import Service
from reference.server.streaming import DONE, EventStream, Watched, Whole, as_json, event

MOST_ANSWERS = 1024  # of a call
Choice = Callable[[Delta | Answer, bool], dict[str, Any] | None]


def user_of(http: Request, *names: str | None) -> str:
    """Whose turn a call counts as: who the client says it is, else its key, else its address."""
    named = next((name for name in names if name), None)
    key = http.headers.get("authorization") or http.headers.get("x-api-key")
    return named or key or (http.client.host if http.client else "")


def check_answers(service: Service, prompts: list[list[int]], n: int) -> None:
    """Raise ApiError for a call of too many answers."""
    if len(prompts) * n > MOST_ANSWERS:
        raise refused("n", n, f"at most {MOST_ANSWERS} answers for all {len(prompts)} prompts")


class OpenAIAnswer:
    """A call's answer in OpenAI's envelope: whole, or in chunks. choice: what of an answer is
    shown; its second argument says whether it is the answer's first delta. kinds: "object" of both
    forms. about_prompt: what a whole answer has beside its choices.
    """

    def __init__(
        self,
        run: Run,
        body: SamplingFields,
        kinds: tuple[str, str],
        choice: Choice,
        about_prompt: Callable[[], dict[str, Any]] = dict,
    ):
        self.about_prompt = about_prompt
        self.run = run
        self.body = body
        self.kinds = kinds
        self.choice = choice
        self.created = int(time.time())
        self.begun: set[int] = set()

    def response(self) -> Watched:
        """What the route returns."""
        timeout_s = self.run.service.args.write_timeout
        if self.body.stream:
            return EventStream(self.chunks(), timeout_s)
        return Whole(self.whole(), timeout_s)

    def envelope(self, kind: str, choices: list[dict]) -> dict[str, Any]:
        """What every chunk has."""
        call = self.run.call
        return {
            "id": call.id,
            "object": kind,
            "created": self.created,
            "model": call.model,
            "choices": choices,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        answers = await self.run.answers()
        choices = [self.choice(answer, True) for answer in answers]
        body = self.envelope(self.kinds[0], choices)
        body |= {"system_fingerprint": None, "usage": self.run.usage.as_openai()}
        handed_over = self.run.outputs[0].kv_transfer_params
        body |= {} if handed_over is None else {"kv_transfer_params": handed_over}
        return body | self.about_prompt()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as events."""
        options, usage = self.body.stream_options, self.run.usage
        with_usage = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        # What all chunks have is written once. `choices` is its last key, and stays open here.
        head = as_json(self.envelope(self.kinds[1], [])).removesuffix("]}")
        tail = '],"usage":null}' if with_usage else "]}"
        async with aclosing(self.run.deltas()) as deltas:
            async for delta in deltas:
                is_first = delta.index not in self.begun
                self.begun.add(delta.index)
                choice = self.choice(delta, is_first)
                if choice is None:
                    continue
                if always:
                    tail = f'],"usage":{as_json(usage.as_openai())}}}'
                yield f"data: {head}{as_json(choice)}{tail}\n\n".encode()
        if with_usage:
            yield event(self.envelope(self.kinds[1], []) | {"usage": usage.as_openai()})
        yield DONE


def check_stream(body: SamplingFields) -> None:
    """Raise ApiError for wishes that a stream cannot keep."""
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", body.stream_options, "none without stream")
    if body.stream and body.best_of is not None and body.best_of > body.n:
        accepted = f"n ({body.n}) with stream, because the best are known at the end only"
        raise refused("best_of", body.best_of, accepted)
    if body.stream and body.prompt_logprobs is not None:
        raise refused("prompt_logprobs", body.prompt_logprobs, "none with stream")
