"""Conversations as prompts, for LLM.chat. The server has its own way, as its clients are
strangers.
"""

from pathlib import Path

from jinja2 import TemplateError

from lessons.toolbox.model.arguments import one_line, refuse

FORMATS = ("auto", "string", "openai")


def as_prompts(tokenizer, messages: list, content_format: str, **how) -> list[list[int]]:
    """The token ids of one conversation, or of each in a list. how: of apply_chat_template. Raises
    ValueError as LLM.chat does.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        refuse("messages", messages, "a conversation, or a list of them")
    if how["add_generation_prompt"] and how["continue_final_message"]:
        refuse("continue_final_message", True, "False with add_generation_prompt")
    if content_format not in FORMATS:
        refuse("chat_template_content_format", content_format, " or ".join(FORMATS))
    how["chat_template"] = how["chat_template"] or tokenizer.chat_template
    if not how["chat_template"]:
        raise ValueError(
            "messages: this tokenizer has no chat template; accepted: generate(), or a "
            "chat_template"
        )
    many = messages if isinstance(messages[0], list) else [messages]
    return [
        rendered(tokenizer, [formed(message, content_format) for message in conversation], **how)
        for conversation in many
    ]


def formed(message: dict, content_format: str) -> dict:
    """The message with its content in this format."""
    content = message.get("content") if isinstance(message, dict) else None
    if content_format == "openai" and isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    if content_format == "string" and isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            refuse("messages", content, "parts that are text, with the format 'string'")
        return message | {"content": "\n".join(texts)}  # as vLLM joins them
    return message


def read_template(template: str | Path | None) -> str | None:
    """A chat template that may be in a file. Raises ValueError for a name that is no file."""
    if template is None or (isinstance(template, str) and ("{" in template or "\n" in template)):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError):
        refuse("chat_template", template, "a template, or a file that holds one")


def rendered(tokenizer, messages: list[dict], **how) -> list[int]:
    """A conversation as token ids. Raises ValueError, in one line, if the template fails."""
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **how)
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(one_line(f"messages: {error}; accepted: what the template can")) from None
