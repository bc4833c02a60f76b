"""Messages to a prompt by a chat template, which is a program in Jinja.

The operator's own template (--chat-template, or the checkpoint's) runs here, in the sandbox that
transformers uses. What a client writes into its messages is data and never a template. A template
that a client sends is a program of a stranger: it is refused, unless --trust-request-chat-template
says otherwise, and then runs in a process of its own with little memory and little time.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from lessons.toolbox.model.arguments import shown
from reference.server.errors import ApiError, bad_request

DEFAULT = Path(__file__).with_name("default_template.jinja")
RENDERER = Path(__file__).with_name("render_alone.py")
MOST_CHARACTERS = 100_000  # of a client's template
MOST_SECONDS = 2.0  # that it may take
# What the server itself hands to a template.
RESERVED = ("messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
            "continue_final_message", "return_dict", "return_tensors", "tokenizer_kwargs",
            "padding", "truncation", "max_length", "return_assistant_tokens_mask",
            "conversation", "self")  # fmt: skip


def read_template(wanted: str | None) -> str | None:
    """The text of --chat-template: a file, or a template in one line. Raises ValueError."""
    if wanted is None or "{" in wanted:
        return wanted
    try:
        return Path(wanted).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        accepted = "a file, or a template in one line"
        raise ValueError(f"--chat-template: {error}; accepted: {accepted}") from None


class ChatTemplate:
    """How this server's model wants its conversations. text: the template, None for the
    tokenizer's.
    """

    def __init__(self, tokenizer, text: str | None):
        self.tokenizer = tokenizer
        self.text = text

    @classmethod
    def of(cls, tokenizer, text: str | None) -> "ChatTemplate":
        """text: None for the tokenizer's, or a plain one if it has none. Raises ValueError for one
        that is no template.
        """
        if text is None and not tokenizer.chat_template:
            text = DEFAULT.read_text("utf-8")
        template = cls(tokenizer, text)
        try:
            template.render([{"role": "user", "content": "Hello"}])
        except ApiError as error:
            raise ValueError(f"--chat-template: {error}; accepted: one that can render") from None
        return template

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        more: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. more: arguments of the template, under any names. Raises ApiError for
        messages that the template refuses.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.text, tokenize=False, **(more or {})
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise bad_request(
                f"messages: the chat template refuses them: {error}", "messages"
            ) from None

    def render_request(
        self, template: str, messages: list[dict], tools: list[dict] | None, more: dict[str, Any]
    ) -> str:
        """The prompt's text by a client's own template, in a process of its own. It takes as long
        as starting Python does. Raises ApiError.
        """
        if len(template) > MOST_CHARACTERS:
            accepted = f"at most {MOST_CHARACTERS} characters"
            raise bad_request(
                f"chat_template: got {len(template)} characters; accepted: {accepted}"
            )
        if more.get("continue_final_message"):
            raise bad_request(
                "continue_final_message: got true; accepted: false with chat_template"
            )
        special = self.tokenizer.special_tokens_map
        words = {name: token for name, token in special.items() if isinstance(token, str)}
        variables = {**words, **more, "messages": messages, "tools": tools}
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(RENDERER)],
                input=json.dumps({"template": template, "variables": variables}),
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            accepted = f"a template that needs less than {MOST_SECONDS} s"
            raise bad_request(
                f"chat_template: got one that takes longer; accepted: {accepted}"
            ) from None
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it needed too much memory or time"])[-1]
            raise bad_request(
                f"chat_template: got one that fails: {why}; accepted: one that renders"
            )
        return json.loads(done.stdout)


def check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """chat_template_kwargs. Raises ApiError for names that are the server's own."""
    for name in kwargs:
        if name in RESERVED:
            raise bad_request(
                f"chat_template_kwargs: got {shown(name)}; accepted: names that no field of the "
                f"request has",
                "chat_template_kwargs",
            )
    return kwargs
