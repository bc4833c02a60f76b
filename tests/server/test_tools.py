"""Calls in the text of a model: however the text is cut, the same parts come out."""

import json
import random

import pytest

from reference.server.calls import Delta
from reference.server.conversation import AnswerReader
from reference.server.protocol.chat import NamedFunction, NamedToolChoice, Tool
from reference.server.tools import CalledTool, schema_of

TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in "fg"]
F, G = '{"name": "f", "arguments": {"a": "<tool_call>"}}', '{"name": "g", "parameters": {}}'


def read(text: str, parser: str = "hermes", choice="auto", parallel: bool = True, cuts: int = 0):
    """(text, calls) of an answer that comes in pieces."""
    reader = AnswerReader(parser, TOOLS, choice, parallel)
    places = sorted(random.choices(range(len(text) + 1), k=cuts))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    parts = []
    for at, piece in enumerate(pieces):
        reason = "stop" if at == len(pieces) - 1 else None
        parts += reader.read(Delta(0, piece, [], finish_reason=reason))
    calls = [
        (part.name, json.loads(part.arguments)) for part in parts if isinstance(part, CalledTool)
    ]
    return "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize(
    "text, parser, want",
    [
        ("no call", "hermes", ("no call", [])),
        (f"So: <tool_call>\n{G}\n</tool_call>", "hermes", ("So: ", [("g", {})])),
        (
            f"<tool_call>{G}</tool_call>\n<tool_call>{G}</tool_call>",
            "hermes",
            ("", [("g", {})] * 2),
        ),
        (f"<tool_call>{F}</tool_call>", "hermes", ("", [("f", {"a": "<tool_call>"})])),
        (f"<tool_call>{G}", "hermes", ("", [("g", {})])),
        ("<tool_call>{nonsense}</tool_call>", "hermes", ("<tool_call>{nonsense}</tool_call>", [])),
        ("<tool_call>[1]</tool_call> x", "hermes", ("<tool_call>[1]</tool_call> x", [])),
        ("a <tool_cal", "hermes", ("a <tool_cal", [])),
        ("a < b <tool> c", "hermes", ("a < b <tool> c", [])),
        (F, "llama3_json", ("", [("f", {"a": "<tool_call>"})])),
        (f" [{F}, {G}]", "llama3_json", ("", [("f", {"a": "<tool_call>"}), ("g", {})])),
        (f"[{G}, {F[:20]}", "llama3_json", ("", [("g", {})])),
        ("{1}", "llama3_json", ("{1}", [])),
        ('{"a": {}}', "llama3_json", ('{"a": {}}', [])),
        ("no {call}", "llama3_json", ("no {call}", [])),
    ],
)
def test_readers(text, parser, want, seed):
    assert read(text, parser) == want
    for _ in range(40):
        assert read(text, parser, cuts=random.randint(1, 12)) == want


def test_choices():
    text = f"<tool_call>{G}</tool_call> and <tool_call>{G}</tool_call>"
    assert read(text, choice="none") == (text, [])
    assert read(text, parallel=False) == ("", [("g", {})])
    named = NamedToolChoice(function=NamedFunction(name="f"))
    assert read('{"x": 1}', choice=named, cuts=3) == ("", [("f", {"x": 1})])
    assert read(f"[{G},{G}]", choice="required", cuts=3) == ("", [("g", {})] * 2)


def test_schemas_of_forced_calls():
    assert schema_of(TOOLS, "auto") is None and schema_of(TOOLS, None) is None
    assert schema_of(TOOLS, "required", parallel=False)["maxItems"] == 1
    names = [
        one["properties"]["name"]["const"] for one in schema_of(TOOLS, "required")["items"]["anyOf"]
    ]
    assert names == ["f", "g"]
