"""Proves JSON schemas against a validator: every text of the grammar is a document of the
schema.
"""

import json
import random
from itertools import islice

import pytest

from lessons.l24_structured_outputs.automata.automaton import compile_grammar
from lessons.l24_structured_outputs.lab.testing import matcher_of, random_text
from lessons.l24_structured_outputs.languages.json_numbers import digits_between
from lessons.l24_structured_outputs.languages.json_text import Layout
from lessons.l24_structured_outputs.languages.syntax import ROOT, Grammar
from lessons.l24_structured_outputs.matcher import Matcher

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["integer", "null"]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}
LIKE_OURS = {  # names of properties that look like those of our own rules
    "type": "object",
    "properties": {
        "a": {"type": ["object", "null"], "properties": {"x": {"const": 1}, "y": {"const": 2}}},
        "object of a": {"type": "boolean"},
        "a object": {"type": "boolean"},
        "a from 1": {"type": "boolean"},
        "b": {"$ref": "#/properties/a object"},
        "c": {"$ref": "#/properties/a from 1"},
        "d": {"$ref": "#/properties/object of a"},
    },
    "required": ["a", "b", "c", "d"],
}
SCHEMAS = [
    {
        "type": "object",
        "title": "Person",
        "properties": {
            'na"me/~': {"type": "string", "minLength": 1, "maxLength": 4},
            "age": {"type": "integer", "minimum": -7, "exclusiveMaximum": 123},
            "size": {"type": "number", "minimum": -2, "maximum": 12},
            "tags": {"type": "array", "items": {"enum": ["é", 3, None, {"a": [1]}]}, "minItems": 1},
        },
        "required": ["age", "tags"],
    },
    TREE,
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {
        "type": "object",
        "properties": {"ab": {"type": "null"}, "a": {"type": "string"}},
        "required": ["x"],
        "additionalProperties": {"type": "integer"},
    },
    {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"const": "b"}, {"type": "null"}],
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 5,
    },
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
    {"type": "string", "pattern": '^[a-z]|[\n"\\\\é]$'},
    {"anyOf": [{"type": "string", "format": name} for name in ("date", "time", "ipv4", "email")]},
    {"anyOf": [{"type": "string", "format": name} for name in ("date-time", "uuid")]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]}
            for k in ("a", "b", 1, True)
        ],
        "discriminator": {"propertyName": "kind"},
    },
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}], "default": None},
    {
        "$defs": {
            "endless": {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1}
        },
        "anyOf": [{"const": 1}, {"properties": {"a": {"$ref": "#/$defs/endless"}}}],
    },
    {"type": ["string", "number", "integer"]},
    {"enum": [1, "1", True, None, [], {}], "type": ["integer", "boolean"]},
    {"allOf": [{"minimum": 5, "maximum": 12345}]},
    {"type": "object", "properties": {"a": False, "b": {"type": "boolean"}}},
    True,
    LIKE_OURS,
    {"patternProperties": {"^x": {"type": "null"}}, "properties": {"a": {"type": "boolean"}}},
    {
        "propertyNames": {"maxLength": 2},
        "minProperties": 1,
        "additionalProperties": {"type": "null"},
    },
]


@pytest.mark.sample(12)
@pytest.mark.parametrize("layout", [None, Layout.compact()], ids=["free", "compact"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_text_is_a_document_of_the_schema(schema, layout, seed):
    jsonschema = pytest.importorskip("jsonschema", reason="NOT RUN: needs jsonschema")
    matcher = matcher_of("json", schema, layout)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = (random_text(matcher, 80, b'"}],0ela') for _ in range(64))
    found = list(islice(filter(None, texts), 3))  # a walk that has not ended in time is none
    assert len(found) == 3
    for data in found:
        validator.validate(json.loads(data))


LIST_OR_NULL = {
    "properties": {"a": {"type": ["array", "null"]}, "b": {"$ref": "#/properties/a"}},
    "required": ["a", "b"],
}
KEYS_BY_PATTERN = {
    "patternProperties": {"a": {"type": "integer"}},
    "properties": {"b": {"type": "null"}},
}
UNIQUE = {
    "items": {"anyOf": [{"enum": ["a", 6]}, {"const": "a"}]},
    "uniqueItems": True,
}
TREE_AND_LIST = {  # both refer to themselves, and meet at each depth
    "$defs": {
        **TREE["$defs"],
        "list": {
            "properties": {
                "value": {"type": "integer"},
                "children": {"items": {"$ref": "#/$defs/list"}},
            },
            "required": ["children"],
        },
    },
    "allOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/list"}],
}
DOCUMENTS = [
    (SCHEMAS[0], {"age": 5, "tags": [3, None]}, True),
    (SCHEMAS[0], {'na"me/~': "日本é\n", "age": -7, "size": -0.5, "tags": [3, "é"]}, True),
    (SCHEMAS[0], {"age": 123, "tags": [3]}, False),
    (SCHEMAS[0], {"tags": [3], "age": 5}, False),  # the schema's order
    (SCHEMAS[0], {"age": 5, "tags": [3], "more": 1}, False),
    (TREE, {"value": 1, "children": [{"value": None}, {"value": 2, "children": []}]}, True),
    (TREE, {"value": 1, "children": [{"value": 1}] * 3}, False),
    (SCHEMAS[3], {"a": "b", "x": 1, "aa": 2, "b": 3}, True),
    (SCHEMAS[3], {"x": 1, "a": 2}, False),
    ({"type": "object"}, {"a": {"b": [1, 2.5e3, "\\u00e9"]}}, True),
    ({"type": "string", "maxLength": 2}, "日🙂", True),
    ({"type": "string", "maxLength": 2}, "abc", False),
    ({"type": "string", "pattern": "b+$"}, "aab", True),
    ({"type": "string", "pattern": "b+$"}, "aba", False),
    ({"type": "string", "format": "date"}, "2024-02-30", False),
    ({"maximum": 12, "minimum": 5, "type": "number"}, 12.5, False),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7}, 6, True),
    ({"type": "integer", "exclusiveMinimum": 5, "minimum": 3}, 5, False),
    ({"type": "integer", "exclusiveMaximum": 7, "maximum": 9}, 7, False),
    (LIKE_OURS, {"a": {"x": 1}, "b": True, "c": False, "d": True}, True),
    (LIST_OR_NULL, {"a": None, "b": None}, True),
    (LIST_OR_NULL, {"a": [], "b": []}, True),
    ({"type": "array", "minItems": 2}, [1], False),
    ({"minProperties": 1}, {}, False),
    ({"minProperties": 1, "maxProperties": 2}, {"a": 1, "b": 2}, True),
    ({"minProperties": 1, "maxProperties": 2}, {"a": 1, "b": 2, "c": 3}, False),
    (KEYS_BY_PATTERN, {"b": None, "a": 1, "ca": 2}, True),
    (KEYS_BY_PATTERN, {"b": None, "c": 1}, False),
    ({"propertyNames": {"maxLength": 2}}, {"ab": 1}, True),
    ({"propertyNames": {"maxLength": 2}}, {"abc": 1}, False),
    ({"propertyNames": {"enum": ["a", 1]}}, {"a": [1]}, True),
    ({"propertyNames": False}, {}, True),
    ({"type": "array", "minItems": 2, "maxItems": 3}, [1, 2, 3, 4], False),
    ({"type": "array", "prefixItems": [{}, {}], "minItems": 1}, [1], True),
    ({"type": "array", "prefixItems": [{}, {}], "minItems": 2}, [1], False),
    (UNIQUE, ["a", 6], True),
    (UNIQUE, ["a", 6, "a"], False),
    ({"anyOf": [{"const": 0}, {"const": False}], "type": ["boolean", "integer"]}, False, True),
    (TREE_AND_LIST, {"value": 1, "children": [{"value": 2, "children": []}]}, True),
    (TREE_AND_LIST, {"value": 1, "children": [{"value": 2}]}, False),
    (TREE_AND_LIST, {"value": 1, "children": [{"value": None, "children": []}]}, False),
    ({"type": "number", "multipleOf": 0.01, "minimum": 0}, 0.07, True),
    ({"type": "number", "multipleOf": 0.01, "minimum": 0}, 0.075, False),
    ({"type": "number", "multipleOf": 0.25}, 0.5, True),
    ({"type": "number", "multipleOf": 0.25}, 7, True),
    ({"type": "number", "multipleOf": 0.25}, 0.2, False),
    ({"allOf": [{"properties": {"a": {"const": v}}} for v in (0, False)]}, {"a": 0}, False),
]


@pytest.mark.parametrize("schema, document, fits", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_documents(schema, document, fits):
    written = json.dumps(document, ensure_ascii=False)
    indented = json.dumps(document, ensure_ascii=False, indent=2)
    assert matcher_of("json", schema, Layout.compact()).fits(written) is fits
    assert matcher_of("json", schema).fits(written) is fits
    assert not fits or matcher_of("json", schema).fits(indented)


def test_keys_cannot_hide_in_escapes():
    """ "\\u0061" is "a", so a second value of a property could be written that way."""
    schema = {"properties": {"a": {"type": "null"}}, "additionalProperties": True}
    matcher = matcher_of("json", schema)
    assert matcher.fits('{"a": null, "b": 1}')
    assert not matcher.fits('{"b": 1, "\\u0061": 1}') and not matcher.fits('{"a": 1}')


def test_ranges_of_whole_numbers(seed):
    for _ in range(25):
        low = random.choice([0, 1, 9, 10, random.randrange(2000)])
        high = low + random.choice([0, 1, 9, 99, random.randrange(3000)])
        matcher = Matcher(compile_grammar(Grammar({ROOT: digits_between(low, high)})))
        around = {*range(max(0, low - 15), low + 15), *range(max(0, high - 15), high + 15), 10**6}
        for number in around | set(random.choices(range(9999), k=30)):
            assert matcher.fits(str(number)) is (low <= number <= high)
            assert not matcher.fits(f"0{number}")


def test_bounds_of_numbers(seed):
    """Against comparing the numbers, near the bounds and as a float64 rounds them."""
    for _ in range(30):
        digits = random.choice([0, 1, 2, 5])
        low = round(random.uniform(-30, 30), digits)
        high = round(low + random.choice([0, 10**-digits, 1, 17.5]), digits)
        names = (
            random.choice(["minimum", "exclusiveMinimum"]),
            random.choice(["maximum", "exclusiveMaximum"]),
        )
        bounds = dict(random.sample([*zip(names, (low, high))], random.randint(1, 2)))
        for kind in ("number", "integer"):
            try:
                matcher = matcher_of("json", {"type": kind, **bounds})
            except ValueError as error:
                assert "no text fits" in str(error)
                matcher = None
            around = [end + step for end in (low, high, 0) for step in (-1, -1e-7, 0, 1e-7, 1, 2.5)]
            for number in (f"{each:.9f}".rstrip("0").rstrip(".") for each in around):
                value = float(number)
                fits = bounds.get("minimum", value) <= value <= bounds.get("maximum", value)
                fits &= value > bounds.get("exclusiveMinimum", value - 1)
                fits &= value < bounds.get("exclusiveMaximum", value + 1)
                if kind == "integer":
                    fits &= "." not in number
                if number != "-0":
                    assert bool(matcher and matcher.fits(number)) is fits, (kind, bounds, number)
            for _ in range(5):
                data = matcher and random_text(matcher, 40, b"")
                assert not data or float(data) >= bounds.get("minimum", -1e16)
                assert not data or float(data) <= bounds.get("maximum", 1e16)
                assert not data or float(data) > bounds.get("exclusiveMinimum", -1e17)
                assert not data or float(data) < bounds.get("exclusiveMaximum", 1e17)
    nines = {"type": "number", "exclusiveMaximum": 5}
    assert matcher_of("json", nines).fits("4." + "9" * 14)
    assert not matcher_of("json", nines).fits("4." + "9" * 16)  # is 5.0


def test_a_json_object_nests_to_any_depth():
    matcher = matcher_of("json_object", True)
    deep = '{"a": [' * 200 + "1" + "]}" * 200
    assert matcher.fits(deep) and not matcher.fits(deep[:-1] + "]")
    assert not matcher.fits("[1]") and not matcher.fits('{"a": "\\ud800"}')
