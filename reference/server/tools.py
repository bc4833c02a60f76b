"""Calls of functions, read from the text that the model writes.

A model is told about functions by its chat template and answers in the form it was trained on:

| --tool-call-parser | form |
|---|---|
| hermes | text, then <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of times |
| llama3_json | {"name": …, "parameters": {…}} and nothing else |

What does not keep to the form is text. With tool_choice "required", or a function's name, a grammar
makes the model keep to it (`schema_of`).
"""

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from reference.server.protocol.chat import NamedToolChoice, Tool

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass
class CalledTool:
    """A call that the model made. arguments: JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_openai(self) -> dict[str, Any]:
        """As an answer shows it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Part = str | CalledTool


class Reader:
    """Reads an answer as it comes. This one takes everything for text."""

    def feed(self, text: str) -> list[Part]:
        """Take new text; returns what is certain."""
        return [text] if text else []

    def finish(self) -> list[Part]:
        """The answer has ended; returns the rest."""
        return []


def called(value: Any) -> CalledTool | None:
    """The call that a parsed object stands for; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return CalledTool(value["name"], json.dumps(arguments, ensure_ascii=False))


def read_json(text: str) -> Any:
    """Parsed JSON; None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class HermesReader(Reader):
    """Text with calls between tags."""

    def __init__(self):
        self.held = ""  # what may be a tag's beginning, or an open call

    def feed(self, text: str) -> list[Part]:
        self.held += text
        found: list[Part] = []
        while (begin := self.held.find(BEGIN)) >= 0:
            end = self.held.find(END, begin)
            if end < 0:
                break
            found += [self.held[:begin]] * (begin > 0)
            inner = self.held[begin + len(BEGIN) : end]
            found.append(called(read_json(inner)) or self.held[begin : end + len(END)])
            self.held = self.held[end + len(END) :]
        safe = begin if begin >= 0 else len(self.held) - overlap(self.held, BEGIN)
        found += [self.held[:safe]] * (safe > 0)
        self.held = self.held[safe:]
        return found

    def finish(self) -> list[Part]:
        left, self.held = self.held, ""
        call = called(read_json(left.removeprefix(BEGIN))) if left.startswith(BEGIN) else None
        return [call or left] if left else []


class JsonReader(Reader):
    """A call as an object, a list of them, or text. named: a function whose arguments the answer
    is.
    """

    def __init__(self, named: str | None = None):
        self.named = named
        self.held = ""
        self.is_text = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        if self.is_text:
            return [text] if text else []
        self.held += text
        start = self.held.lstrip()[:1]
        if self.num_calls or not start or start in "{[":
            # calls of a list are told one by one; each ends with a brace
            return self.calls() if "}" in text and self.named is None else []
        self.is_text = True
        return [self.held]

    def calls(self) -> list[Part]:
        """The calls that are whole."""
        found: list[Part] = []
        while True:
            rest = self.held.lstrip("[, \t\r\n" if not self.num_calls else ", \t\r\n")
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return found
            if (call := called(value)) is None:
                return found
            found.append(call)
            self.num_calls += 1
            self.held = rest[end:]

    def finish(self) -> list[Part]:
        if self.is_text or self.num_calls or not self.held:
            return []  # what is left is a list's end, or a call that was cut off
        return [CalledTool(self.named, self.held)] if self.named else [self.held]


READERS = {"hermes": HermesReader, "llama3_json": JsonReader}


def reader_for(parser: str, tools: list[Tool] | None, choice: Any) -> Reader:
    """Who reads the answer. parser: of --tool-call-parser. choice: the request's tool_choice."""
    if not tools or choice == "none":
        return Reader()
    if isinstance(choice, NamedToolChoice):
        return JsonReader(choice.function.name)
    return JsonReader() if choice == "required" else READERS[parser]()


def schema_of(tools: list[Tool], choice: Any, parallel: bool = True) -> dict[str, Any] | None:
    """The JSON schema that forces a call, None where the model is free. parallel: many calls."""
    if isinstance(choice, NamedToolChoice):
        return next(parameters(t) for t in tools if t.function.name == choice.function.name)
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": parameters(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments; without one it takes none."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.function.parameters or nothing


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
