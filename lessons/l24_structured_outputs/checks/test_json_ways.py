"""Proves schemas that combine others against a validator: random schemas accept exactly the random
documents that they should. Types and other keys are always said, so nothing of our subset matters.
"""

import json
import random

import pytest

from lessons.l24_structured_outputs.lab.testing import matcher_of

VALUES = [None, True, False, *range(7), "", "a", "b", "ab", "ba", "abc"]
KINDS = ["integer", "string", "null", "boolean", "number"]
TYPES = {"type": ["integer", "string", "null", "boolean"]}
NAMES, OTHERS = ["a", "b", "c"], ["aa", "ab", "ba", "x"]
PATTERNS = ["^a", "b$", "a", "^ab?$", "[^a]"]
REFUSED = (  # words of errors
    "combinations",
    "too large",
    "'unevaluatedProperties' at",
    "'uniqueItems' at",
    "'contains' at",
    "'patternProperties' at",
    "/minProperties'",
    "inside not, if or oneOf",
    "which one document may fit",
)


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
    if name == "true":
        return random.random() < 0.8
    value = {
        "type": some(KINDS),
        "const": random.choice(VALUES),
        "enum": some(VALUES, 5),
        "pattern": random.choice(PATTERNS),
        "multipleOf": random.choice([1, 2, 3]),
        "$ref": "#/$defs/value",
    }
    return {name: value.get(name, random.randint(0, 4))}


def about_object(depth: int = 0) -> dict:
    """A schema of an object with some of the keys in NAMES."""
    if random.random() < 0.5 and depth < 2:
        return combined(about_object, depth)
    name = random.choice(
        [
            "properties",
            "required",
            "dependentRequired",
            "dependentSchemas",
            "two",
            "minProperties",
            "maxProperties",
            "propertyNames",
            "patternProperties",
        ]
    )
    if name == "dependentSchemas":
        return {name: {random.choice(NAMES): about_object(depth + 1)}}
    if name == "two":
        return {**about_object(2), **about_object(2)}
    value = {
        "properties": {key: about_value(1) for key in some(NAMES)},
        "required": some(NAMES),
        "dependentRequired": {random.choice(NAMES): some(NAMES)},
        "propertyNames": {"maxLength": random.choice([1, 2])},
        "patternProperties": {random.choice(PATTERNS): {"allOf": [TYPES, about_value(2)]}},
    }
    return {name: value.get(name, random.randint(0, 3))}


def about_array(depth: int = 0) -> dict:
    """A schema of an array."""
    if random.random() < 0.5 and depth < 2:
        return combined(about_array, depth)
    name = random.choice(
        ["contains", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"]
    )
    value = {
        "contains": about_value(2),
        "items": about_value(1),
        "prefixItems": [about_value(1) for _ in range(random.randint(1, 3))],
        "uniqueItems": random.random() < 0.7,
    }
    counts = {count: random.randint(0, 3) for count in some(["minContains", "maxContains"], 2)}
    made = {name: value.get(name, random.randint(0, 3))}
    return made | (counts if name == "contains" and random.random() < 0.6 else {})


def with_conditions(base: dict, about) -> dict:
    """A schema, and one or two more that its documents have to fit."""
    base |= {"$defs": {"value": TYPES | random.choice([{"minLength": 2}, {"enum": VALUES[:5]}])}}
    condition = about()
    if set(condition) & {*base, "prefixItems"}:
        condition = {"allOf": [condition, about()]}
    return base | condition


def object_schema() -> dict:
    """An object with three properties, and perhaps others."""
    values = [TYPES, TYPES | {"minimum": 2}]
    base = {"type": "object", "properties": {name: random.choice(values) for name in NAMES}}
    other = random.choice([False, False, {"type": "integer"}])
    base |= {random.choice([*["additionalProperties"] * 4, "unevaluatedProperties"]): other}
    if random.random() < 0.3:
        base |= {"patternProperties": {key: random.choice(values) for key in some(PATTERNS, 2)}}
    return with_conditions(base, about_object)


def array_schema() -> dict:
    """An array of constants or of types."""
    items = random.choice([TYPES, {"enum": some(VALUES, 6)}, {"type": "boolean"}])
    return with_conditions({"type": "array", "items": items}, about_array)


def document(kind: str) -> dict | list:
    """Some of the keys with any values, or a short list."""
    if kind == "object":
        keys = [*NAMES, *random.sample(OTHERS, random.choice([0, 0, 1, 2]))]
        return {name: random.choice(VALUES) for name in keys if random.random() < 0.7}
    values = random.sample(VALUES, 4)
    return [random.choice(values) for _ in range(random.randint(0, 4))]


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ["object", "array"])
@pytest.mark.parametrize("number", range(10))
def test_combined_schemas_accept_exactly_their_documents(kind, number, seed):
    jsonschema = pytest.importorskip("jsonschema", reason="NOT RUN: needs jsonschema")
    served = 0
    for _ in range(25):
        made = object_schema() if kind == "object" else array_schema()
        validator = jsonschema.Draft202012Validator(made)
        documents = [document(kind) for _ in range(40)]
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
        served += any(is_valid)
    assert served > 3
