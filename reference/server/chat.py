"""Messages to the ids of a prompt. Every API with messages comes through here, in OpenAI's form."""

import asyncio
from typing import Any

from lessons.toolbox.model.arguments import shown
from reference.server.errors import refused
from reference.server.pictures import IMAGE_URL, pictures_of
from reference.server.protocol.chat import ChatMessage, ContentPart, TemplateFields, Tool
from reference.server.sampling import parsed_json
from reference.server.service import Service
from reference.server.templates import check_kwargs
from reference.vision.pictures import Picture

MANY_CHARACTERS = 1024  # shorter texts are read between two events of the loop


def text_of(
    content: str | list[ContentPart] | None, name: str, image_token: str | None = None
) -> str:
    """The text of a message. name: where it stands. image_token: what stands for a picture, which a
    message has in front of its text, wherever it was between its parts; None: this model sees none.
    Raises ApiError for a part that it cannot read.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts, pictures = [], []
    for at, part in enumerate(content):
        if part.type == IMAGE_URL and image_token is not None:
            pictures.append(image_token)
            continue
        if part.type not in ("text", "refusal"):
            place = f"{name}[{at}].type"
            raise refused(place, part.type, "'text', because this model reads nothing else")
        text = getattr(part, part.type)
        if text is None:
            raise refused(f"{name}[{at}].{part.type}", None, "a string")
        texts.append(text)
    return "\n".join(pictures + texts)


def for_template(
    messages: list[ChatMessage], image_token: str | None = None
) -> list[dict[str, Any]]:
    """Messages as templates expect them: text is one string, arguments of calls are objects."""
    found = []
    for at, message in enumerate(messages):
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        content = text_of(message.content, f"messages[{at}].content", image_token)
        entry = {"role": role, "content": content or message.refusal or ""}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            place = f"messages[{at}].tool_calls"
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": parsed_json(place, call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        found.append(entry)
    return found


async def prompt_of(
    service: Service,
    messages: list[ChatMessage],
    tools: list[Tool] | None = None,
    how: TemplateFields | None = None,
) -> tuple[list[int], list[Picture]]:
    """The ids of a conversation's prompt, and its pictures. how: as the client wishes. Raises
    ApiError.
    """
    how = how or TemplateFields()
    more: dict[str, Any] = {
        **check_kwargs(how.chat_template_kwargs or {}),
        "add_generation_prompt": how.add_generation_prompt,
    }
    if how.documents is not None:
        more["documents"] = how.documents
    if how.continue_final_message:
        if "add_generation_prompt" in how.model_fields_set and how.add_generation_prompt:
            accepted = "false together with continue_final_message"
            raise refused("add_generation_prompt", True, accepted)
        more |= dict(continue_final_message=True, add_generation_prompt=False)
    pictures = await pictures_of(service, messages)
    entries = for_template(messages, service.image_token)
    offered = [tool.model_dump(exclude_none=True) for tool in tools or []] or None
    if how.chat_template is None:
        text = service.template.render(entries, offered, more)
    elif service.args.trust_request_chat_template:
        render = service.template.render_request
        text = await asyncio.to_thread(render, how.chat_template, entries, offered, more)
    else:
        accepted = "none, because the server was started without --trust-request-chat-template"
        raise refused("chat_template", how.chat_template, accepted)
    # None, as /tokenize may have it, is no: the template has written what begins a text
    ids = await encode(service, "messages", text, bool(how.add_special_tokens))
    return service.with_rows(ids, pictures), pictures


async def encode(
    service: Service, name: str, text: str, special: bool = True, keep: int | None = None
) -> list[int]:
    """The ids of a text; a long one is read in a thread, so that no stream waits for it, and after
    a short one others have their turn. The arguments are those of Tokens.encode.
    """
    if len(text) < MANY_CHARACTERS:
        await asyncio.sleep(0)
        return service.tokens.encode(name, text, special, keep)
    async with service.reading:
        return await asyncio.to_thread(service.tokens.encode, name, text, special, keep)


def check_tools(tools: list[Tool] | None, choice: Any) -> None:
    """Raise ApiError for a tool_choice that names nothing."""
    names = [tool.function.name for tool in tools or []]
    if len(set(names)) < len(names):
        raise refused("tools", names, "functions of different names")
    if isinstance(choice, str) or choice is None:
        if choice == "required" and not names:
            raise refused("tool_choice", choice, "a choice among tools, and there are none")
    elif choice.function.name not in names:
        accepted = f"one of tools: {', '.join(map(shown, names)) or 'there are none'}"
        raise refused("tool_choice", choice.function.name, accepted)
