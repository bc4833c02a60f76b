"""OpenAI's /v1/responses, for text and functions. Nothing is stored."""

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from reference.server.calls import Answer, Delta
from reference.server.chat import check_tools, prompt_of
from reference.server.conversation import AnswerReader
from reference.server.errors import ApiError, body_of
from reference.server.generation import Run
from reference.server.logprobs import TokenNames, for_chat
from reference.server.protocol.responses import ResponsesRequest
from reference.server.response_input import choice_of, messages_of, params_of, tools_of
from reference.server.routes.common import user_of
from reference.server.service import Service
from reference.server.streaming import EventStream, Watched, Whole, event
from reference.server.tools import CalledTool, Part


class ResponseAnswer:
    """One response, whole or as events. items: the output so far. untold: log-probabilities of
    tokens whose text is not told yet, such as the first of a character that is several.
    """

    def __init__(self, run: Run, body: ResponsesRequest):
        self.run = run
        self.body = body
        self.created = int(time.time())
        parser = run.service.args.tool_call_parser
        tools, choice = tools_of(body), choice_of(body)
        self.reader = AnswerReader(parser, tools, choice, body.parallel_tool_calls)
        self.names = TokenNames(run.service.tokens, False)
        self.items: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None  # the message that text goes to
        self.untold: list[dict[str, Any]] = []
        self.sequence = 0

    # ------------------------------------------------------------ the object

    def response(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """The response as it stands."""
        body, usage = self.body, self.run.usage
        is_over = status != "in_progress"
        return {
            "id": self.run.call.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.run.call.model,
            "output": self.items if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": self.run.call.params.temperature,
            "top_p": self.run.call.params.top_p,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_unset=True)
                     or {"type": "text"}},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str)
            else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            } if is_over else None,
        }  # fmt: skip

    def logprobs(self, delta: Delta | Answer) -> list[dict[str, Any]]:
        """Of the tokens of an answer, if they were asked for."""
        if self.run.call.params.logprobs is None:
            return []
        count = self.body.top_logprobs or 0
        return for_chat(delta.token_ids, delta.logprobs or [], self.names, count)

    def end_of(self, answer: Delta | Answer) -> tuple[str, str | None]:
        """Status and reason."""
        if answer.finish_reason == "length":
            return "incomplete", "max_output_tokens"
        return "completed", None

    async def whole(self) -> dict[str, Any]:
        """The response in one."""
        answer = (await self.run.answers())[0]
        for part in self.reader.read(answer):
            self.take(part)
        if self.open is None and not self.items:
            self.take("")
        if self.open is not None:
            self.open["content"][0]["logprobs"] = self.logprobs(answer)
        status, reason = self.end_of(answer)
        for item in self.items:
            item["status"] = "completed"
        if self.open is not None:
            self.open["status"] = status
        return self.response(status, reason)

    def take(self, part: Part) -> list[bytes]:
        """Put a part into the output; returns its events."""
        if isinstance(part, CalledTool):
            return [*self.close(), *self.add_call(part)]
        begin = [] if self.open is not None else self.begin_text()
        self.open["content"][0]["text"] += part
        return begin

    # ------------------------------------------------------------ the events

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event."""
        self.sequence += 1
        return event({"type": kind, "sequence_number": self.sequence - 1, **fields}, kind)

    async def events(self) -> AsyncIterator[bytes]:
        """The response as events."""
        async with aclosing(self.checked_deltas()) as deltas:
            async for delta in deltas:
                if isinstance(delta, bytes):
                    yield delta
                    return
                if not self.sequence:
                    yield self.event("response.created", response=self.response("in_progress"))
                    yield self.event("response.in_progress", response=self.response("in_progress"))
                parts = self.reader.read(delta)
                self.untold += self.logprobs(delta)
                if delta.finish_reason is not None and not (parts or self.items):
                    parts = [""]
                for part in parts:
                    for data in self.take(part):
                        yield data
                    if isinstance(part, str):
                        yield self.text_delta(part)
                if delta.finish_reason is not None:
                    if self.untold and self.open is not None:  # of a last token without text
                        yield self.text_delta("")
                    status, reason = self.end_of(delta)
                    for data in self.close(status):
                        yield data
                    response = self.response(status, reason)
                    yield self.event(f"response.{status}", response=response)

    async def checked_deltas(self) -> AsyncIterator[Delta | bytes]:
        """Deltas; an error behind the first becomes this API's own event."""
        try:
            async with aclosing(self.run.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        except ApiError as error:
            if not self.sequence:
                raise
            failed = self.response("failed")
            code = error.code or "server_error"
            failed["error"] = {"code": code, "message": body_of(error, "/v1")["error"]["message"]}
            yield self.event("response.failed", response=failed)

    def text_delta(self, text: str) -> bytes:
        """New text of the open message."""
        logprobs, self.untold = self.untold, []
        self.open["content"][0]["logprobs"] += logprobs
        at = self.items.index(self.open)
        return self.event("response.output_text.delta", item_id=self.open["id"], output_index=at,
                          content_index=0, delta=text, logprobs=logprobs)  # fmt: skip

    def begin_text(self) -> list[bytes]:
        """Open a message."""
        self.open = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        at = len(self.items)
        self.items.append(self.open)
        added = self.event("response.output_item.added", output_index=at, item=self.open)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.open["content"].append(part)
        place = dict(item_id=self.open["id"], output_index=at, content_index=0)
        return [added, self.event("response.content_part.added", **place, part=part)]

    def close(self, status: str = "completed") -> list[bytes]:
        """Close the open message, if there is one."""
        if self.open is None:
            return []
        item, self.open = self.open, None
        item["status"] = status
        part, at = item["content"][0], self.items.index(item)
        place = dict(item_id=item["id"], output_index=at, content_index=0)
        text = dict(text=part["text"], logprobs=part["logprobs"])
        return [
            self.event("response.output_text.done", **place, **text),
            self.event("response.content_part.done", **place, part=part),
            self.event("response.output_item.done", output_index=at, item=item),
        ]

    def add_call(self, call: CalledTool) -> list[bytes]:
        """A call of a function, whole."""
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        at = len(self.items)
        self.items.append(item)
        added = self.event("response.output_item.added", output_index=at, item=item)
        item |= {"arguments": call.arguments, "status": "completed"}
        place = dict(item_id=item["id"], output_index=at)
        done = dict(arguments=call.arguments, name=call.name)
        return [
            added,
            self.event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self.event("response.function_call_arguments.done", **place, **done),
            self.event("response.output_item.done", output_index=at, item=item),
        ]


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, http: Request) -> Watched:
        """Answer a text or a conversation."""
        tools, choice = tools_of(body), choice_of(body)
        check_tools(tools, choice)
        offered = None if choice == "none" else tools
        ids, pictures = await prompt_of(service, messages_of(body), offered)
        prompts = [service.tokens.cut("input", ids, None)]
        user = user_of(http, body.user, body.safety_identifier)
        more = dict(user=user, pictures=pictures)
        call = service.new_call("resp_", body.model, prompts, params_of(service, body), **more)
        answer, timeout_s = ResponseAnswer(Run(service, call), body), service.args.write_timeout
        if body.stream:
            return EventStream(answer.events(), timeout_s)
        return Whole(answer.whole(), timeout_s)

    return router
