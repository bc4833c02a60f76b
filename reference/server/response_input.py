"""A request of /v1/responses in the form of /v1/chat/completions."""

from typing import Any

from reference.engine.sampling_params import SamplingParams
from reference.server.errors import refused
from reference.server.pictures import IMAGE_URL
from reference.server.protocol.base import note
from reference.server.protocol.chat import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from reference.server.protocol.responses import InputItem, InputPart, ResponsesRequest
from reference.server.sampling import (
    call_form,
    check_logprobs,
    form_of,
    new_params,
    structured_outputs,
)
from reference.server.service import Service
from reference.server.tools import schema_of

TEXTS = ("input_text", "output_text")
LOGPROBS = "message.output_text.logprobs"


def messages_of(body: ResponsesRequest) -> list[ChatMessage]:
    """The conversation. Raises ApiError for an item that misses a part."""
    found = []
    if body.instructions:
        found.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*found, ChatMessage(role="user", content=body.input)]
    if not body.input:
        raise refused("input", body.input, "a text, or one item at least")
    for at, item in enumerate(body.input):
        if item.type == "reasoning":
            note("input.reasoning")
        else:
            found.append(message_of(item, f"input[{at}]"))
    if not found:
        raise refused("input", "reasoning alone", "a message, or a call of a function")
    return found


def message_of(item: InputItem, place: str) -> ChatMessage:
    """One item."""

    def needs(*names: str) -> None:
        for name in names:
            if getattr(item, name) is None:
                raise refused(f"{place}.{name}", None, f"one, because this is a {item.type}")

    if item.type == "function_call":
        needs("name", "call_id")
        function = FunctionCall(name=item.name, arguments=item.arguments or "{}")
        calls = [ToolCall(id=item.call_id, function=function)]
        return ChatMessage(role="assistant", tool_calls=calls)
    if item.type == "function_call_output":
        needs("output", "call_id")
        content = parts_of(item.output)
        return ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
    needs("role", "content")
    return ChatMessage(role=item.role, content=parts_of(item.content))


def parts_of(content: str | list[InputPart]) -> str | list[ContentPart]:
    """Parts under the names of /v1/chat/completions; other kinds keep theirs and are refused."""
    if isinstance(content, str):
        return content
    return [as_picture(part) if part.type == "input_image" else as_text(part) for part in content]


def as_text(part: InputPart) -> ContentPart:
    """A part that is text, or that `chat.text_of` refuses."""
    kind = "text" if part.type in TEXTS else part.type
    return ContentPart(type=kind, text=part.text, refusal=part.refusal)


def as_picture(part: InputPart) -> ContentPart:
    """A picture. Raises ApiError for a file, because the server keeps none."""
    if part.file_id is not None or part.image_url is None:
        raise refused("input_image.file_id", part.file_id, "none, and an image_url")
    value = {"url": part.image_url} | ({} if part.detail is None else {"detail": part.detail})
    return ContentPart(type=IMAGE_URL, image_url=value)


def tools_of(body: ResponsesRequest) -> list[Tool]:
    """The functions."""
    return [
        Tool(
            function=FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.parameters
            )
        )
        for tool in body.tools
    ]


def choice_of(body: ResponsesRequest) -> Any:
    """tool_choice."""
    if isinstance(body.tool_choice, str):
        return body.tool_choice
    return NamedToolChoice(function=NamedFunction(name=body.tool_choice.name))


def params_of(service: Service, body: ResponsesRequest) -> SamplingParams:
    """What is asked of the engine. Raises ApiError."""
    check_logprobs("top_logprobs", body.top_logprobs, service.args.max_logprobs)
    form = form_of(body.text.format.type, body.text.format.schema_)
    form = structured_outputs(**form, sent_as="text.format") if form else None
    schema = schema_of(tools_of(body), choice_of(body), body.parallel_tool_calls)
    if schema is not None:
        form = call_form(schema, form, body.tool_choice)
    if set(body.include) - {LOGPROBS}:
        note("include")
    wants_logprobs = LOGPROBS in body.include or body.top_logprobs is not None
    return new_params(
        body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        structured_outputs=form,
    )
