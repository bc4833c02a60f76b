"""Proves JSON schemas by the public test suite of JSON Schema 2020-12: a schema is refused in one
line, or it accepts no document that it should not, and each valid one of our subset.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from lessons.l24_structured_outputs.lab import schema_cases
from lessons.l24_structured_outputs.lab.schema_cases import TYPED, accepts, suite, typed

CASES = suite()
IDS = [f"{case.keyword}: {case.about}" for case in CASES]
COMBINING = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}
INSIDE = {"properties", "patternProperties", "$defs"}  # schemas by name
PAGE = Path(schema_cases.__file__).parents[1] / "MORE.md"


def narrowed(schema):
    """The schema with what our subset adds to it, written as JSON Schema: the type that its
    keywords are about, no properties and items but those that it names.
    """
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in INSIDE:
            value = {key: narrowed(each) for key, each in value.items()}
        elif isinstance(value, list) and name not in ("enum", "const"):
            value = [narrowed(each) for each in value]
        elif name not in ("enum", "const"):
            value = narrowed(value)
        found[name] = value
    if {"properties", "patternProperties"} & set(found):
        found.setdefault("additionalProperties", False)
    if "prefixItems" in found:
        found.setdefault("items", False)
    kinds = [kind for kind, names in TYPED.items() if names & set(found)]
    if kinds and "type" not in found and not COMBINING & set(found):
        found["type"] = kinds[0] if len(kinds) == 1 else "no single type"
    return found


def has_other_form(value) -> bool:
    """Whether a document has a whole number that is written with a point: we write it without."""
    if isinstance(value, (dict, list)):
        return any(map(has_other_form, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


def words_of(schema) -> set[str]:
    """Every key in a schema."""
    if isinstance(schema, list):
        return set().union(*map(words_of, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(words_of, schema.values()))


@pytest.mark.sample(40)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_case_of_the_suite(case):
    for schema in (case.schema, typed(case.schema)):
        try:
            (fits,) = schema_cases.ours(schema)
        except ValueError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 400
            named = any(f"'{word}'" in said or f"/{word}'" in said for word in words_of(schema))
            assert named or ("no text fits" in said and not covered(schema, case.valid))
            continue
        accepted = [each for each in case.invalid if accepts(fits, each)]
        assert not accepted, "these do not fit the schema"
        rejected = [each for each in covered(schema, case.valid) if not accepts(fits, each)]
        assert not rejected, "these fit the schema, and are in our subset"


def covered(schema, valid: list) -> list:
    """The valid documents that our subset has."""
    jsonschema = pytest.importorskip("jsonschema", reason="NOT RUN: needs jsonschema")
    schema = narrowed(schema)
    if "no single type" in json.dumps(schema):
        return []
    validator = jsonschema.Draft202012Validator(schema)
    return [each for each in valid if validator.is_valid(each) and not has_other_form(each)]


def test_the_subset_is_no_excuse():
    """Of the served schemas with valid documents, nine of ten have some in our subset."""
    with_valid = [case for case in schema_cases.served("ours") if case.valid]
    idle = [case.about for case in with_valid if not covered(case.schema, case.valid)]
    assert len(idle) * 10 <= len(with_valid), idle


def test_the_page_says_which_keywords_are_served():
    mine = schema_cases.keywords(schema_cases.served("ours"))
    text = PAGE.read_text()
    table = re.findall(r"^\| (?:XGrammar|llguidance|neither).* \| (.*) \| (.*) \|$", text, re.M)
    cells = [[set(re.findall("`(.+?)`", cell)) for cell in row] for row in table]
    assert set().union(*itertools.chain(*cells)) == {case.keyword for case in CASES}
    for we_serve, we_refuse in cells:
        assert we_serve <= mine and not we_refuse & mine
    for others, rows in (("both others serve", 1), ("one of them or both serve", 3)):
        ours, refused = (sum(len(row[n]) for row in cells[:rows]) for n in range(2))
        assert f"that {others} we serve {ours} of {ours + refused}, of the schemas" in text


def test_the_page_says_what_others_serve():
    for name in ("xgrammar", "llguidance"):
        pytest.importorskip(name, reason=f"NOT RUN: needs {name}")
    by_library = {name: schema_cases.served(name) for name in schema_cases.LIBRARIES}
    assert "\n".join(schema_cases.rows(by_library)) in PAGE.read_text()
