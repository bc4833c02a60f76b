"""Proves schemas that combine others against a validator: random schemas accept exactly the random
documents that they should. Types and other keys are always said, so nothing of our subset matters.
"""

import json
import random

import pytest

from lessons.l24_structured_outputs.lab.testing import matcher_of

VALUES = [None, True, False, *range(7), "", "a", "b", "ab", "ba", "abc"]
KINDS = ["integer", "string", "null", "boolean", "number"]
NAMES = ["a", "b", "c"]
REFUSED = ("combinations", "'unevaluatedProperties' at", "too large")


def some(values: list, most: int = 3) -> list:
    """One to `most` of them, in their order."""
    found = random.sample(range(len(values)), random.randint(1, min(most, len(values))))
    return [values[n] for n in sorted(found)]


def combined(part, depth: int) -> dict:
    """Schemas in a schema. part(depth): one of them."""
    name = random.choice(["allOf", "anyOf", "oneOf", "not", "if"])
    if name == "not":
        return {"not": part(depth + 1)}
    if name == "if":
        sides = {side: part(depth + 1) for side in some(["then", "else"])}
        return {"if": part(depth + 1), **sides}
    return {name: [part(depth + 1) for _ in range(random.randint(1, 3))]}


def about_value(depth: int = 0) -> dict | bool:
    """A schema of one value."""
    if random.random() < 0.5 and depth < 2:
        return combined(about_value, depth)
    name = random.choice(
        [
            "type",
            "const",
            "enum",
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
            "minLength",
            "maxLength",
            "pattern",
            "multipleOf",
            "$ref",
            "true",
        ]
    )
    made = {
        "type": lambda: some(KINDS),
        "const": lambda: random.choice(VALUES),
        "enum": lambda: some(VALUES, 5),
        "pattern": lambda: random.choice(["^a", "b$", "a", "^ab?$", "[^a]"]),
        "multipleOf": lambda: random.choice([1, 2, 3]),
        "$ref": lambda: "#/$defs/value",
    }
    if name == "true":
        return random.random() < 0.8
    return {name: made.get(name, lambda: random.randint(0, 4))()}


def about_object(depth: int = 0) -> dict:
    """A schema of an object with some of the keys in NAMES."""
    if random.random() < 0.5 and depth < 2:
        return combined(about_object, depth)
    name = random.choice(
        ["properties", "required", "dependentRequired", "dependentSchemas", "both"]
    )
    if name == "required":
        return {"required": some(NAMES)}
    if name == "dependentRequired":
        return {name: {random.choice(NAMES): some(NAMES)}}
    if name == "dependentSchemas":
        return {name: {random.choice(NAMES): about_object(depth + 1)}}
    if name == "both":
        return {**about_object(2), **about_object(2)}
    return {"properties": {key: about_value(1) for key in some(NAMES)}}


def schema() -> dict:
    """An object with three properties, and conditions on them."""
    types = {"type": ["integer", "string", "null", "boolean"]}
    found = {
        "type": "object",
        "properties": {name: random.choice([types, types | {"minimum": 2}]) for name in NAMES},
        "$defs": {"value": {**types, **random.choice([{"minLength": 2}, {"enum": VALUES[:5]}])}},
    }
    closed = random.choice([*["additionalProperties"] * 3, "unevaluatedProperties"])
    found |= {closed: False}
    condition = about_object()
    if set(condition) & set(found):
        condition = {"allOf": [condition, about_object()]}
    return found | condition


def document() -> dict:
    """Some of the keys, with any values."""
    return {name: random.choice(VALUES) for name in NAMES if random.random() < 0.7}


@pytest.mark.sample(12)
@pytest.mark.parametrize("number", range(40))
def test_combined_schemas_accept_exactly_their_documents(number, seed):
    jsonschema = pytest.importorskip("jsonschema", reason="NOT RUN: needs jsonschema")
    for _ in range(20):
        made = schema()
        validator = jsonschema.Draft202012Validator(made)
        documents = [document() for _ in range(40)]
        is_valid = [validator.is_valid(each) for each in documents]
        try:
            matcher = matcher_of("json", made)
        except ValueError as error:
            said = str(error)
            is_known = any(word in said for word in REFUSED)
            assert is_known or ("no text fits" in said and not any(is_valid)), (said, made)
            continue
        for each, fits in zip(documents, is_valid):
            assert matcher.fits(json.dumps(each)) is fits, (each, made)
