"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from reference.engine.sampling_params import SamplingParams
from reference.server.calls import Answer, Delta
from reference.server.chat import check_tools, prompt_of
from reference.server.conversation import AnswerReader
from reference.server.errors import refused
from reference.server.generation import Run
from reference.server.pictures import IMAGE_URL, of_anthropic
from reference.server.protocol.base import note
from reference.server.protocol.chat import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    TemplateFields,
    Tool,
    ToolCall,
)
from reference.server.protocol.messages import Block, CountTokensRequest, MessagesRequest
from reference.server.routes.common import user_of
from reference.server.sampling import call_form, new_params
from reference.server.service import Service
from reference.server.streaming import EventStream, Watched, Whole, event
from reference.server.tools import CalledTool, Part, schema_of
from reference.vision.pictures import Picture

# Of earlier answers, perhaps another model's. Templates have no place for them.
THOUGHTS = ("thinking", "redacted_thinking")
ELSEWHERE = ("tool_use", "tool_result", *THOUGHTS)

# ---------------------------------------------------------------- into OpenAI's form


def parts_of(content: str | list[Block], place: str) -> list[ContentPart]:
    """Blocks of text and pictures, and others for `chat.text_of` to refuse."""
    if isinstance(content, str):
        return [ContentPart(type="text", text=content)]
    return [
        ContentPart(type=IMAGE_URL, image_url=of_anthropic(block.source, f"{place}[{at}]"))
        if block.type == "image"
        else ContentPart(type=block.type, text=block.text)
        for at, block in enumerate(content)
    ]


def messages_of(body: CountTokensRequest) -> list[ChatMessage]:
    """The conversation in OpenAI's form. Raises ApiError for a block that has no place in it."""
    found = []
    if body.system:
        found.append(ChatMessage(role="system", content=parts_of(body.system, "system")))
    for at, message in enumerate(body.messages):
        place = f"messages[{at}].content"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [Block(type="text", text=blocks)]
        calls = [tool_call(block, place) for block in blocks if block.type == "tool_use"]
        for block in blocks:
            if block.type == "tool_result":
                content = parts_of(block.content or "", place)
                found.append(
                    ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id)
                )
        others = [block for block in blocks if block.type not in ELSEWHERE]
        if any(block.type in THOUGHTS for block in blocks):
            note("messages.thinking")
        if others or calls:
            content = parts_of(others, place)
            found.append(ChatMessage(role=message.role, content=content, tool_calls=calls or None))
    return found


def tool_call(block: Block, place: str) -> ToolCall:
    """A call that an earlier answer made."""
    if not block.name:
        raise refused(f"{place}.name", block.name, "the name of the tool that was used")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return ToolCall(id=block.id or "", function=FunctionCall(name=block.name, arguments=arguments))


def tools_of(body: CountTokensRequest) -> list[Tool]:
    """The tools in OpenAI's form."""
    return [
        Tool(
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            )
        )
        for tool in body.tools
    ]


def choice_of(body: CountTokensRequest) -> str | NamedToolChoice:
    """tool_choice in OpenAI's form."""
    choice = body.tool_choice
    if choice.type == "tool":
        if not choice.name:
            raise refused("tool_choice.name", choice.name, "the name of a tool")
        return NamedToolChoice(function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


async def prompt(service: Service, body: CountTokensRequest) -> tuple[list[int], list[Picture]]:
    """The ids of the prompt, and its pictures. An answer whose beginning the client has written is
    gone on with.
    """
    tools, choice = tools_of(body), choice_of(body)
    check_tools(tools, choice)
    how = TemplateFields()
    if body.messages[-1].role == "assistant":
        how = TemplateFields(continue_final_message=True, add_generation_prompt=False)
    return await prompt_of(service, messages_of(body), tools if choice != "none" else None, how)


def params_of(body: MessagesRequest) -> SamplingParams:
    """What is asked of the engine. Raises ApiError."""
    parallel = not body.tool_choice.disable_parallel_tool_use
    schema = schema_of(tools_of(body), choice_of(body), parallel)
    return new_params(
        body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        structured_outputs=None if schema is None else call_form(schema),
    )


# ---------------------------------------------------------------- out


class MessageAnswer:
    """One answer, whole or as events."""

    def __init__(self, run: Run, body: MessagesRequest):
        self.run = run
        self.body = body
        parser = run.service.args.tool_call_parser
        parallel = not body.tool_choice.disable_parallel_tool_use
        self.reader = AnswerReader(parser, tools_of(body), choice_of(body), parallel)
        self.open: int | None = None  # the block of text that deltas go to
        self.blocks = 0

    def usage(self) -> dict[str, int]:
        """Tokens, in Anthropic's words: those from the cache are counted apart."""
        usage = self.run.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }

    def message(self, content: list[dict], reason: dict[str, Any]) -> dict[str, Any]:
        """The envelope."""
        return {
            "id": self.run.call.id,
            "type": "message",
            "role": "assistant",
            "model": self.run.call.model,
            "content": content,
            **reason,
            "usage": self.usage(),
        }

    def reason(self, answer: Answer | Delta) -> dict[str, Any]:
        """Why it ended."""
        text = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        if answer.finish_reason == "length":
            reason = "max_tokens"
        elif self.reader.num_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if text is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": text}

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        answer = (await self.run.answers())[0]
        content, text = [], ""
        for part in [*self.reader.read(answer), None]:
            if isinstance(part, str):
                text += part
                continue
            if text:
                content.append({"type": "text", "text": text})
                text = ""
            if part is not None:
                content.append(tool_use(part))
        content = content or [{"type": "text", "text": ""}]
        return self.message(content, self.reason(answer))

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as events."""
        is_begun = False
        async with aclosing(self.run.deltas()) as deltas:
            async for delta in deltas:
                if not is_begun:
                    is_begun = True
                    nothing = {"stop_reason": None, "stop_sequence": None}
                    yield typed("message_start", message=self.message([], nothing))
                for part in self.reader.read(delta):
                    for data in self.part_events(part):
                        yield data
                if delta.finish_reason is not None:
                    if not self.blocks:
                        yield self.begin_text()
                    if self.open is not None:
                        yield typed("content_block_stop", index=self.open)
                    yield typed("message_delta", delta=self.reason(delta), usage=self.usage())
        yield typed("message_stop")

    def begin_text(self) -> bytes:
        """Open a block of text."""
        self.open, self.blocks = self.blocks, self.blocks + 1
        block = {"type": "text", "text": ""}
        return typed("content_block_start", index=self.open, content_block=block)

    def part_events(self, part: Part) -> list[bytes]:
        """The events of one part."""
        if isinstance(part, str):
            begin = [] if self.open is not None else [self.begin_text()]
            delta = {"type": "text_delta", "text": part}
            return [*begin, typed("content_block_delta", index=self.open, delta=delta)]
        end = [] if self.open is None else [typed("content_block_stop", index=self.open)]
        at, self.open, self.blocks = self.blocks, None, self.blocks + 1
        delta = {"type": "input_json_delta", "partial_json": part.arguments}
        return [
            *end,
            typed("content_block_start", index=at, content_block=tool_use(part) | {"input": {}}),
            typed("content_block_delta", index=at, delta=delta),
            typed("content_block_stop", index=at),
        ]


def typed(kind: str, **fields: Any) -> bytes:
    """An event, whose type stands in its name and in its data."""
    return event({"type": kind, **fields}, kind)


def tool_use(call: CalledTool) -> dict[str, Any]:
    """A block for a call."""
    value = json.loads(call.arguments) if is_object(call.arguments) else {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def is_object(text: str) -> bool:
    """Whether it is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["Anthropic"])

    @router.post("/v1/messages")
    async def create_message(body: MessagesRequest, http: Request) -> Watched:
        """Answer a conversation."""
        ids, pictures = await prompt(service, body)
        prompts = [service.tokens.cut("messages", ids, None)]
        more = dict(user=user_of(http, body.metadata.user_id), pictures=pictures)
        call = service.new_call("msg_", body.model, prompts, params_of(body), **more)
        answer = MessageAnswer(Run(service, call), body)
        timeout_s = service.args.write_timeout
        return EventStream(answer.events(), timeout_s) if body.stream else Whole(
            answer.whole(), timeout_s
        )  # fmt: skip

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """How long a conversation's prompt is."""
        service.models.find(body.model)
        ids, _ = await prompt(service, body)
        return {"input_tokens": len(ids)}

    return router
