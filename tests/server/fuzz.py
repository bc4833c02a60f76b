"""Random requests for every route: bodies made from the routes' own pydantic models, and JSON that
no model had a part in.

A body begins as a small good one, so that most of it is served. Then some of its fields get values
of their types, values at the edges of the types, or any JSON. Request `at` of a seed is always the
same.
"""

import json
import random
import string
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from reference.server.protocol.chat import ChatCompletionRequest
from reference.server.protocol.completions import CompletionRequest
from reference.server.protocol.generate import LegacyRequest, TgiRequest
from reference.server.protocol.messages import CountTokensRequest, MessagesRequest
from reference.server.protocol.responses import ResponsesRequest
from reference.server.protocol.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest

USER = {"role": "user", "content": "x"}
TGI = dict(inputs="x", parameters=dict(max_new_tokens=2))
GOOD: dict[str, list[tuple[type[BaseModel], dict]]] = {
    "/v1/completions": [(CompletionRequest, dict(prompt="x", max_tokens=2))],
    "/v1/chat/completions": [(ChatCompletionRequest, dict(messages=[USER], max_tokens=2))],
    "/v1/responses": [(ResponsesRequest, dict(input="x", max_output_tokens=2))],
    "/v1/messages": [(MessagesRequest, dict(messages=[USER], max_tokens=2))],
    "/v1/messages/count_tokens": [(CountTokensRequest, dict(messages=[USER]))],
    "/v1/embeddings": [(EmbeddingRequest, dict(input="x"))],
    "/tokenize": [(TokenizeRequest, dict(prompt="x")), (TokenizeRequest, dict(messages=[USER]))],
    "/detokenize": [(DetokenizeRequest, dict(tokens=[1]))],
    "/generate": [(LegacyRequest, dict(prompt="x", max_tokens=2)), (TgiRequest, TGI)],
    "/generate_stream": [(TgiRequest, TGI)],
    "/": [(TgiRequest, TGI)],
}
# Fields that say how much work a request is: small, so that thousands take minutes.
FEW = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n", "best_of")
EDGES = {
    int: [0, 1, -1, 2, 2**31, -(2**31), 2**63, 10**30, 4, 20],
    float: [0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-300, 1e300, 3, -2.5],
    str: ["", "x", " ", "\n", "\0", "é", "🙂", "\u2028", "a" * 300, "{{ x }}", "<|endoftext|>",
          "[a-z]+", "{", "data:,", "file:///", "none", "auto", "json", "-1", "1e5", "﷽" * 40],
}  # fmt: skip
KEYS = ["type", "x", "", "__proto__", "properties", "items", "enum", "$ref", "0", "é", "self",
        "messages", "anyOf", "text", "url", "name", "tokenize", "minLength", "pattern"]  # fmt: skip
WORDS = ["object", "string", "array", "integer", "number", "#", "text", "image_url", "function",
         "tool_use", "tool_result", "image", "input_image", "input_text", "refusal"]  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """One request. data: its body, as bytes."""

    at: int
    path: str
    data: bytes


class Fuzz:
    """Random values, all from one generator."""

    def __init__(self, seed: int | str):
        self.rng = random.Random(seed)

    def any_json(self, depth: int = 0) -> Any:
        """Any value that JSON can write."""
        rng, kind = self.rng, self.rng.randrange(6 if depth > 3 else 9)
        if kind < 3:
            return rng.choice([None, True, False, *WORDS])
        if kind < 6:
            return rng.choice(EDGES[(int, float, str)[kind - 3]])
        if kind == 6:
            return [self.any_json(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(KEYS): self.any_json(depth + 1) for _ in range(rng.randrange(1, 5))}

    def schema(self, depth: int = 0) -> Any:
        """A JSON schema, most of them right."""
        rng = self.rng
        leaf = [{"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 1]}, {"const": None}, True,
                {"type": "string", "maxLength": 3}, {"type": "number", "minimum": 0},
                {"type": "string", "pattern": "^[a-c]{1,3}$"}]  # fmt: skip
        if depth > 2 or rng.random() < 0.4:
            return rng.choice(leaf)
        if rng.random() < 0.15:
            return self.any_json()
        inner = [self.schema(depth + 1) for _ in range(rng.randrange(1, 4))]
        properties = dict(zip("abc", inner))
        return rng.choice([
            {"type": "object", "properties": properties, "required": [*properties][:1]},
            {"type": "array", "items": inner[0], "maxItems": rng.randrange(4)},
            {"anyOf": inner}, {"oneOf": inner}, {"allOf": inner}, {"not": inner[0]},
        ])  # fmt: skip

    def model(self, kind: type[BaseModel], depth: int) -> dict:
        """What a model asks for, with some of the fields that it does not."""
        found = {}
        for name, field in kind.model_fields.items():
            if field.is_required() or self.rng.random() < 0.25:
                found[field.alias or name] = self.value(name, field.annotation, depth + 1)
        return found

    def value(self, name: str, annotation: Any, depth: int = 0) -> Any:
        """A value for a field, which fits its type in most cases. name: of the field."""
        rng = self.rng
        if rng.random() < 0.04:
            return self.any_json()
        is_schema = "schema" in name or name in ("parameters", "guided_json", "json_")
        # a model of the same name holds the schema in a field of its own
        if is_schema and get_origin(annotation) is not None and rng.random() < 0.8:
            return self.schema()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self.model(annotation, depth) if depth < 5 else {}
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            return rng.choice(inner)
        if origin is Annotated:
            return self.value(name, inner[0], depth)
        if origin in (Union, types.UnionType):
            return self.value(name, rng.choice(inner), depth)
        if origin is list:
            return [self.value(name, inner[0], depth + 1) for _ in range(rng.randrange(4))]
        if origin is dict:
            keys = [rng.choice(KEYS) for _ in range(rng.randrange(4))]
            return {key: self.value(key, inner[1], depth + 1) for key in keys}
        if annotation is bool:
            return rng.random() < 0.5
        if annotation in EDGES:
            return self.plain(annotation)
        return None if annotation is type(None) else self.any_json()

    def plain(self, kind: type) -> Any:
        """A number or a string, often an ordinary one."""
        rng = self.rng
        if rng.random() < 0.5:
            return rng.choice(EDGES[kind])
        if kind is str:
            return "".join(rng.choices(string.printable, k=rng.randrange(12)))
        return rng.randrange(-2, 300) if kind is int else rng.uniform(-1, 3)

    def body(self, path: str) -> dict:
        """The body of a request to a route."""
        rng = self.rng
        kind, good = rng.choice(GOOD[path])
        found = json.loads(json.dumps(good))
        fields = list(kind.model_fields.items())
        for name, field in rng.sample(fields, min(len(fields), rng.choice((0, 1, 1, 2, 3, 6)))):
            found[field.alias or name] = self.value(name, field.annotation)
        others = [*kind.refused, *kind.hints]
        if others and rng.random() < 0.2:
            found[rng.choice(others)] = self.any_json()
        if rng.random() < 0.03:
            found[rng.choice(KEYS)] = self.any_json()
        if rng.random() < 0.03 and (left := [name for name in found if name not in FEW]):
            found.pop(rng.choice(left))
        return self.little(found)

    def little(self, body: dict) -> dict:
        """The same, with counts of tokens and answers that cost little."""
        for place in (body, body.get("parameters")):
            if isinstance(place, dict):
                for name in FEW:
                    is_much = type(place.get(name)) is int and 4 < place[name] < 10**6
                    # a null is an answer as long as the model's context
                    if is_much or (name in place and place[name] is None):
                        place[name] = self.rng.randrange(1, 5)
        return body

    def data(self, path: str) -> bytes:
        """A body as bytes, some of them broken."""
        rng = self.rng
        if rng.random() < 0.05:
            return json.dumps(self.any_json()).encode()
        data = json.dumps(self.body(path), ensure_ascii=rng.random() < 0.5).encode()
        if rng.random() < 0.08:
            broken = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(broken))
                broken[at : at + rng.randrange(2)] = rng.choice(
                    [b"", b"\xff", b'"', b"[", b"}", b"\\", b"1e999", b"NaN", b"\\ud800", b"\0"]
                )
            return bytes(broken) or b"{"
        return data


def request_of(seed: int, at: int) -> Sent:
    """Request `at` of a seed."""
    fuzz = Fuzz(f"{seed} {at}")
    path = fuzz.rng.choice(list(GOOD))
    return Sent(at, path, fuzz.data(path))
