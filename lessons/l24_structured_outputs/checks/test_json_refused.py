"""Proves that schemas which cannot be masked are refused, in one line and after little work."""

import pytest

from lessons.l24_structured_outputs.lab.testing import assert_refused

MANY_PRODUCTS = {f"p{n}": {"pattern": f"a{{{n}}}b*a", "maxLength": n} for n in range(50)}
REFUSED_SCHEMAS = [
    ({"properties": MANY_PRODUCTS}, "fewer at once"),
    ("{", "a JSON schema"),
    (3, "a schema: an object"),
    ({"type": "text"}, "object, array, string"),
    ({"type": []}, "object, array, string"),
    ({"patternProperties": [1]}, "an object of schemas"),
    ({"type": "object", "minProperties": 2}, "may be written twice"),
    ({"type": "string", "format": "hostname"}, "date, time"),
    ({"type": "string", "pattern": "(?=a)"}, "pattern: got"),
    ({"type": "string", "maxLength": 10**6}, "0 to 5000"),
    ({"type": "string", "minLength": 1.5}, "0 to 5000"),
    ({"type": "integer", "multipleOf": 0}, "above 0"),
    ({"type": "integer", "multipleOf": 997}, "a step with fewer remainders"),
    ({"type": "number", "multipleOf": 1e-8}, "a step with fewer remainders"),
    ({"type": "integer", "minimum": "0"}, "a number"),
    ({"type": "number", "exclusiveMinimum": 0.1234567890123456}, "a number"),
    ({"type": "number", "exclusiveMinimum": 2, "maximum": 2}, "no text fits"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no text fits"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at '#'"),
    ({"uniqueItems": True, "items": {"enum": [*range(9)]}}, "'uniqueItems' at '#'"),
    ({"uniqueItems": 1}, "true or false"),
    ({"contains": {"const": 1}, "minItems": 99, "minContains": 50}, "large counts"),
    ({"contains": {"items": {"uniqueItems": True}}, "maxContains": 2}, "'uniqueItems' at"),
    ({"patternProperties": {c: {} for c in "abcd"}}, "'patternProperties' at '#'"),
    ({"propertyNames": {"minlength": 3}}, "'minlength' at '#/propertyNames'"),
    ({"properties": {f"p{n}": {} for n in range(99)}, "minProperties": 50}, "minProperties"),
    ({"type": "array", "items": [True]}, "prefixItems"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "no text fits"),
    ({"type": "object", "required": "a"}, "a list of names"),
    ({"properties": {"a": 3}}, "got 3 at '#/properties/a'"),
    ({"properties": {}, "required": ["a"], "additionalProperties": False}, "no text fits"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text fits"),
    ({"not": {}}, "no text fits"),
    ({"not": {"uniqueItems": True}}, "'uniqueItems' at '#/not' inside not"),
    ({"not": {"enum": [[1]]}}, "arrays"),
    ({"anyOf": [], "type": "string"}, "a list, not empty"),
    ({"allOf": {}}, "a list, not empty"),
    ({"allOf": [{"type": "null"}, {"type": "string"}]}, "no text fits"),
    ({"allOf": [{"anyOf": [{"required": [x + y]} for x in "abcde"]} for y in "abc"]}, "combinat"),
    ({"oneOf": [{"format": "date"}, {"type": "string"}]}, "schemas 0 and 1"),
    ({"oneOf": [{"$ref": "#"}, {"type": "number"}]}, "schemas 0 and 1"),
    ({"$ref": "http://example.com/schema"}, "a place in this schema"),
    ({"$ref": "#/$defs/a"}, "a place in this schema"),
    ({"$ref": "#"}, "no text fits"),
    ({"$ref": "#", "type": "null"}, "in a circle"),
    ({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}, "y": {"$anchor": "a"}}}, "a place in this"),
    ({"none of": [{"type": "string"}]}, "'none of' at '#'"),
    ({"enum": [*range(9000)], "anyOf": [{"const": n} for n in range(50)]}, "more constants"),
    ({"dependentRequired": {"a": "b"}}, "lists of names"),
    ({"dependentSchemas": []}, "an object of schemas"),
    ({"enum": []}, "a list, not empty"),
    ({"const": float("inf")}, "JSON"),
    ({"enum": ["a"], "type": "integer"}, "no text fits"),
    ({"pattern": ["a"]}, "a regular expression"),
    ({"pattern": "a", "maxLength": 4000}, "got 'pattern, maxLength' at '#'"),
    ({"patternProperties": {f"a.{{{n}}}b": {} for n in range(9, 12)}}, "'patternProperties' at"),
    (
        {"properties": {f"p{n}": {"pattern": "a" * n + "b*a", "maxLength": n} for n in range(50)}},
        "fewer at once",
    ),
    ('{"items":' * 150 + "{}" + "}" * 150, "at most 100"),
    ('{"items":' * 40000 + "{}" + "}" * 40000, "at most"),
    ({"enum": ["x" * 300] * 100}, "too large"),
    ({"properties": {f"p{n}": {"minLength": 900} for n in range(40)}}, "too large"),
    ({"a": "x" * 300_000}, "200000"),
]


@pytest.mark.parametrize("schema, said", REFUSED_SCHEMAS, ids=range(len(REFUSED_SCHEMAS)))
def test_schemas_that_are_refused(schema, said):
    assert_refused(said, "json", schema)
