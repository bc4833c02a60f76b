"""Proves the automata: regular expressions against Python's re, grammars against their definition, JSON
schemas against a validator, and that hostile input is refused in one line and within a second.
"""

import json
import random
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings

from lessons.l22_serving.grammar import matcher as matcher_module
from lessons.l22_serving.grammar.automaton import compile_grammar
from lessons.l22_serving.grammar.ebnf import read_grammar
from lessons.l22_serving.grammar.json_schema import read_schema
from lessons.l22_serving.grammar.json_text import Layout, digits_between
from lessons.l22_serving.grammar.matcher import Matcher, TooAmbiguous
from lessons.l22_serving.grammar.reading import compile_structure
from lessons.l22_serving.grammar.syntax import ROOT, Grammar
from lessons.l22_serving.grammar.utf8 import byte_sequences
from lessons.l22_serving.lab.grammar_testing import (
    LETTERS,
    all_texts,
    is_stuck,
    language,
    patterns,
    random_grammar,
    random_text,
)


def matcher_of(kind: str, value, layout=None) -> Matcher:
    return Matcher(compile_structure(kind, value, layout))


def refused(said: str, kind: str, value) -> None:
    """In one line, and within a second."""
    start = time.process_time()
    with pytest.raises(ValueError, match=said) as caught:
        matcher_of(kind, value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert str(caught.value).startswith((kind, "pattern"))
    assert time.process_time() - start < 1.5  # this machine may be busy


# ---------------------------------------------------------------- characters and regular expressions


def test_byte_ranges_are_the_utf8_of_the_characters(seed):
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    for _ in range(100):
        low = min(random.choice(edges) + random.randint(0, 99), 0x10FFFF)
        high = random.choice([low, min(low + random.randint(0, 9000), 0x10FFFF), 0x10FFFF])
        sequences = list(byte_sequences(((low, high),)))
        for code in [low - 1, low, high, high + 1, *random.choices(range(low, high + 1), k=20)]:
            if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                continue
            data = chr(code).encode()
            fitting = [
                one
                for one in sequences
                if len(one) == len(data) and all(a <= b <= c for b, (a, c) in zip(data, one))
            ]
            assert len(fitting) == (low <= code <= high), (low, high, code)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=patterns())
def test_regular_expressions_fit_the_texts_that_re_fits(pattern):
    matcher = matcher_of("regex", pattern)
    python = re.compile(pattern, re.ASCII)
    texts = ["".join(random.choices(LETTERS, k=random.randint(0, 5))) for _ in range(30)]
    walked = [random_text(matcher) for _ in range(3)]
    texts += [data.decode() for data in walked if data is not None]
    texts += [text[:-1] + random.choice(LETTERS) for text in texts[-3:]]
    for text in texts:
        assert matcher.fits(text) == (python.fullmatch(text) is not None), text


def test_anchors_at_the_ends_change_nothing():
    matcher = matcher_of("regex", "^ab$|^c|d$")
    assert [text for text in ("ab", "c", "d", "abc", "") if matcher.fits(text)] == ["ab", "c", "d"]


REFUSED_PATTERNS = [
    ("", "1 to 20000"),
    (3, "accepted: a pattern"),
    ("(a", r"a \) for each"),
    ("a)", r"as many \( as \)"),
    ("[a", "a ] for each"),
    ("a\\", "does not end here"),
    ("*a", "in front of a repetition"),
    ("a**", "one repetition"),
    ("a*+", "possessive"),
    ("a{3,2}", "m <= n"),
    ("a{6000}", "at most 5000"),
    ("a{99999999999999}", "at most 5000"),
    (r"(a)\1", "backreferences"),
    (r"\bword", "no \\\\b"),
    (r"\p{L}", "properties"),
    ("(?=a)b", "no look-around"),
    ("(?<!a)b", "no look-around"),
    ("(?i)a", "flags"),
    ("a^b", "ends of an alternative"),
    ("a$b", "ends of an alternative"),
    ("(^a)", "ends of an alternative"),
    (r"[\d-z]", "a range from a character"),
    ("[z-a]", "a range from a character"),
    ("[[:alpha:]]", "POSIX"),
    (r"\xg1", "2 hexadecimal"),
    (r"\U00110000", "8 hexadecimal"),
    (r"[^\s\S]", "no text fits"),
    ("\ud800", "no text fits"),
]
HOSTILE_PATTERNS = [
    "(a|b)*a(a|b){30}",
    "((a{100}){100}){100}",
    "((((a{1,50}){1,50}){1,50}){1,50})b",
    ".*x.{5000}",
    "(.*.*.*=){900}",
    "(" * 5000 + ")" * 5000,
    "(a?){5000}" * 20,
    "[" + "".join(map(chr, range(256, 4000, 2))) + "]{90}",
]


@pytest.mark.parametrize("pattern, said", REFUSED_PATTERNS)
def test_patterns_that_are_refused(pattern, said):
    refused(said, "regex", pattern)


@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS, ids=range(len(HOSTILE_PATTERNS)))
def test_hostile_patterns_are_refused_within_a_second(pattern):
    refused("too large|in one another|1 to 20000", "regex", pattern)


def test_patterns_that_make_engines_backtrack_are_read_in_one_pass():
    """Each step of a text costs one look-up, whatever the pattern."""
    for pattern in ("(a+)+b", "(a|a)*b", "(a*)*b", "(a|aa)+b", "(x+x+)+y"):
        matcher = matcher_of("regex", pattern)
        letter = pattern.strip("(")[0]
        assert not matcher.fits(letter * 3000)
        assert matcher.fits(letter * 3000 + pattern[-1])
        assert matcher.steps <= 6010


# ---------------------------------------------------------------- grammars


def test_grammars_fit_their_language(seed, request):
    """Left and right recursion, rules that fit the empty text, ambiguity: against sets of texts from the
    definition. And no text is stuck.
    """
    texts = all_texts("xy", 5)
    for _ in range(400 if request.config.getoption("--all") else 60):
        grammar = random_grammar()
        wanted = language(grammar, 5)
        try:
            matcher = Matcher(compile_grammar(grammar))
        except ValueError as error:
            assert "no text fits" in str(error) and not wanted, grammar
            continue
        assert {text for text in texts if matcher.fits(text)} == wanted, grammar
        beginnings = {text[:n] for text in wanted for n in range(len(text))}
        for text in texts[:15]:
            state = matcher.read(text.encode())
            assert state is not None or text not in beginnings, grammar
            assert state is None or not is_stuck(matcher, state, "xy"), grammar


def test_equal_states_are_one_object_and_right_recursion_does_not_grow():
    matcher = matcher_of("grammar", 'root ::= item "," root | item\nitem ::= [0-9] | "(" root ")"')
    once, later = matcher.read(b"(1,"), matcher.read(b"(1,(2,(3)),4,5,")
    assert once is later
    assert matcher.read(b"((1,") is not once
    assert max(len(state.items) for state in matcher.known.values()) < 8


def test_an_ambiguous_grammar_ends_in_one_line(monkeypatch):
    """Its readings grow with the text, polynomially; beyond a bound the text is given up."""
    monkeypatch.setattr(matcher_module, "MOST_STEPS", 2000)
    matcher = matcher_of("grammar", 'root ::= root root root | "a" | ""')
    state = matcher.start
    with pytest.raises(TooAmbiguous, match="too ambiguous"):
        for _ in range(100):
            before, state = matcher.steps, matcher.step(state, ord("a"))
            assert state.may_end and matcher.steps - before < 5000
    assert not matcher_of("grammar", 'root ::= "a" root root | "b"').fits("aab")


GBNF = r"""
# a comment
root  ::= "[" ws item ("," ws item)* "]"   # with a comment
item  ::= number | "\x41" | "\u00e9\n" |
          "(" root ")" | [^a-z\]",]{2,3} | [;]
number ::= "-"? [0-9]+
ws ::= [ \t]*
"""
LARK = r"""
// a comment
?start: "[" item ("," item)* "]" -> list
item: NUMBER | "A" | "(" start ")" | [ "b" ] "c" | "d" ~ 2..3
NUMBER: /-?[0-9]+\/?/
"""
TEXTS = {
    GBNF: (["[1]", "[ 1,A,-12]", "[é\n]", "[([1])]", "[ABC]", "[;]"], ["", "[]", "[abc]", "[1,]"]),
    LARK: (
        ["[1]", "[1,A,-12/]", "[([1])]", "[c,bc]", "[dd,ddd]"],
        ["[b]", "[d]", "[dddd]", "[1/2]"],
    ),
}


@pytest.mark.parametrize("source", TEXTS, ids=("gbnf", "lark"))
def test_both_notations_of_grammars(source):
    matcher = matcher_of("grammar", source)
    fitting, others = TEXTS[source]
    assert [text for text in fitting + others if matcher.fits(text)] == fitting


REFUSED_GRAMMARS = [
    ("", "1 to 100000"),
    (None, "1 to 100000"),
    ("hello", "a rule, name :"),
    ('a ::= "x"', "no rule 'root'"),
    ('a: "x"', "no rule 'start'"),
    ('root ::= "x" b', "rules that are defined"),
    ('root ::= root "x"', "no text fits"),
    ('root ::= "x"\nroot ::= "y"', "each rule once"),
    ('root ::= ("x"', r"a \) for each"),
    ('root ::= "x', 'a " for each'),
    ("root ::= <x>", "a literal"),
    ('start: "x"i', "without flags"),
    ('start: X\n%ignore " "', "no %ignore"),
    ('start: "x" ~ 3..2', "m <= n"),
    ("start: /(?=x)/", "look-around"),
    ("root ::= " + "(" * 5000, "in one another"),
    ('root ::= "a"{5000}{5000}', "too large"),
    (
        "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} |" for n in range(1500)),
        "rules that are defined",
    ),
    ("root ::= [a]\nunused ::= b", "rules that are defined"),
]


@pytest.mark.parametrize("source, said", REFUSED_GRAMMARS, ids=range(len(REFUSED_GRAMMARS)))
def test_grammars_that_are_refused(source, said):
    refused(said, "grammar", source)


def test_a_choice_is_one_of_its_texts():
    matcher = matcher_of("choice", ["ja", "jawohl", "nein", "日本"])
    fitting = [text for text in ("ja", "jawohl", "日本", "j", "jaw", "日") if matcher.fits(text)]
    assert fitting == ["ja", "jawohl", "日本"]
    for value in ([], ["a", ""], "abc", [1], None):
        refused("accepted: a list of texts", "choice", value)


# ---------------------------------------------------------------- JSON

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
]


@pytest.mark.parametrize("layout", [None, Layout.compact()], ids=["free", "compact"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_text_is_a_document_of_the_schema(schema, layout, seed):
    jsonschema = pytest.importorskip("jsonschema", reason="NOT RUN: needs jsonschema")
    matcher = matcher_of("json", schema, layout)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    found = 0
    for _ in range(15):
        data = random_text(matcher, 80, b'"}],0ela')
        if data is not None:
            found += 1
            validator.validate(json.loads(data))
    assert found


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


def test_a_json_object_nests_to_any_depth():
    matcher = matcher_of("json_object", True)
    deep = '{"a": [' * 200 + "1" + "]}" * 200
    assert matcher.fits(deep) and not matcher.fits(deep[:-1] + "]")
    assert not matcher.fits("[1]") and not matcher.fits('{"a": "\\ud800"}')


REFUSED_SCHEMAS = [
    ("{", "a JSON schema"),
    (3, "a schema: an object"),
    ({"type": "text"}, "object, array, string"),
    ({"type": []}, "object, array, string"),
    ({"patternProperties": {}}, "'patternProperties' at '#'"),
    ({"type": "string", "minLength": 1, "format": "date"}, "'format' at '#'"),
    ({"type": "string", "format": "hostname"}, "date, time"),
    ({"type": "string", "pattern": "(?=a)"}, "pattern: got"),
    ({"type": "string", "maxLength": 10**6}, "0 to 5000"),
    ({"type": "string", "minLength": 1.5}, "0 to 5000"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"type": "integer", "minimum": 0.5}, "a whole number"),
    ({"type": "integer", "minimum": "0"}, "a whole number"),
    ({"type": "number", "exclusiveMinimum": 0}, "exclusiveMinimum"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no text fits"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": [True]}, "prefixItems"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "no text fits"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"type": "object", "required": "a"}, "a list of names"),
    ({"properties": {"a": 3}}, "got 3 at '#/properties/a'"),
    ({"properties": {}, "required": ["a"], "additionalProperties": False}, "no text fits"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text fits"),
    ({"not": {}}, "'not' at '#'"),
    ({"if": {}, "then": {}}, "'if' at '#'"),
    ({"anyOf": [], "type": "string"}, "beside anyOf"),
    ({"anyOf": []}, "a list, not empty"),
    ({"allOf": [True, True]}, "with several schemas"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "schemas 0 and 1"),
    ({"oneOf": [{"$ref": "#"}, {"type": "number"}]}, "schemas 0 and 1"),
    ({"$ref": "http://example.com/schema"}, "a place in this schema"),
    ({"$ref": "#/$defs/a"}, "a place in this schema"),
    ({"$ref": "#"}, "no text fits"),
    ({"enum": []}, "a list, not empty"),
    ({"const": float("inf")}, "JSON"),
    ({"enum": ["a"], "type": "integer"}, "no text fits"),
    ({"minLength": 1, "pattern": "a"}, "'pattern' at '#'"),
    ('{"items":' * 150 + "{}" + "}" * 150, "at most 100"),
    ('{"items":' * 40000 + "{}" + "}" * 40000, "at most"),
    ({"enum": ["x" * 300] * 400}, "too large"),
    ({"properties": {f"p{n}": {"minLength": 900} for n in range(100)}}, "too large"),
    ({"a": "x" * 300_000}, "200000"),
]


@pytest.mark.parametrize("schema, said", REFUSED_SCHEMAS, ids=range(len(REFUSED_SCHEMAS)))
def test_schemas_that_are_refused(schema, said):
    refused(said, "json", schema)


def test_sizes_are_bounded_before_the_text_begins():
    """What the readers give is small; the automaton is bounded, too."""
    read_grammar("root ::= " + " | ".join(f'"{n}"' for n in range(2000)))
    read_schema({"enum": list(range(3000))})
