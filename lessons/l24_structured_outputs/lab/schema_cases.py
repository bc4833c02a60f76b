"""Which keywords of JSON Schema we, XGrammar and llguidance serve, by the schemas and documents of
the public test suite; prints MORE.md's table.

    python -m lessons.l24_structured_outputs.lab.schema_cases

A library serves a keyword if it compiles the keyword's first schema in the suite, then accepts some
valid document and no invalid one. Properties may come in any order, and the schema may say the type
that the keyword is about, because each library has a subset in which that matters.
"""

import itertools
import json
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import Matcher

FILE = Path(__file__).with_name("json_schema_cases.json")
TYPED = {  # the type that each keyword is about
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {
        "items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains",
        "uniqueItems", "unevaluatedItems",
    },
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
        "unevaluatedProperties",
    },
}  # fmt: skip
Fits = Callable[[str], bool]  # whether a text is a document of the schema


@dataclass(frozen=True, eq=False)
class Case:
    """A schema of the suite, with documents that it accepts and that it does not."""

    keyword: str
    about: str
    schema: dict | bool
    valid: list
    invalid: list


@lru_cache
def suite() -> list[Case]:
    """The cases, in the suite's order."""
    by_keyword = json.loads(FILE.read_text())["schemas"]
    return [Case(name, *each) for name, cases in by_keyword.items() for each in cases]


def orders(value) -> list:
    """The value with the keys of its objects in every order."""
    if isinstance(value, list):
        return [list(each) for each in itertools.product(*map(orders, value))]
    if not isinstance(value, dict):
        return [value]
    return [
        dict(zip(keys, values))
        for keys in itertools.permutations(value)
        for values in itertools.product(*(orders(value[key]) for key in keys))
    ]


def accepts(fits: Fits, document) -> bool:
    """Whether the document fits with its keys in some order."""
    return any(fits(json.dumps(each, ensure_ascii=False)) for each in orders(document))


def typed(schema):
    """The schema with the type that its keywords are about, if it names none."""
    if isinstance(schema, dict) and "type" not in schema:
        for kind, names in TYPED.items():
            if names & set(schema):
                return {"type": kind, **schema}
    return schema


# ---------------------------------------------------------------- libraries

BYTES = [bytes([byte]) for byte in range(256)] + [b"</s>"]
END = 256


def ours(schema) -> list[Fits]:
    """Our automaton of a schema. Raises ValueError."""
    return [Matcher(compile_structure("json", schema)).fits]


def xgrammar(schema) -> list[Fits]:
    """XGrammar's matchers of a schema, strict and not. Raises RuntimeError."""
    import xgrammar

    info = xgrammar.TokenizerInfo(BYTES, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    found = []
    for is_strict in (True, False):
        compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=is_strict)

        def fits(written: str, compiled=compiled) -> bool:
            matcher = xgrammar.GrammarMatcher(compiled)
            return matcher.accept_string(written) and matcher.accept_token(END)

        found.append(fits)
    return found


class ByteTokenizer:
    """A token for each byte, as llguidance asks for them."""

    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, BYTES, [END]

    def __call__(self, written: str | bytes) -> list[int]:
        return list(written.encode() if isinstance(written, str) else written)


def llguidance(schema) -> list[Fits]:
    """llguidance's matcher of a schema. Raises ValueError."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokenizer()))
    source = llguidance.LLMatcher.grammar_from_json_schema(schema)
    if error := llguidance.LLMatcher(tokenizer, source).get_error():
        raise ValueError(error)

    def fits(written: str) -> bool:
        matcher, data = llguidance.LLMatcher(tokenizer, source), list(written.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return [fits]


LIBRARIES = {"ours": ours, "XGrammar": xgrammar, "llguidance": llguidance}


def serves(library: Callable, case: Case) -> bool:
    """Whether the library compiles the schema in a way that accepts some valid document and no
    invalid one. Where all documents are invalid, it is enough to accept none.
    """
    for schema in (case.schema, typed(case.schema)):
        try:
            ways = library(schema)
        except (ValueError, RuntimeError):
            continue
        for fits in ways:
            is_useful = not case.valid or any(accepts(fits, each) for each in case.valid)
            if is_useful and not any(accepts(fits, each) for each in case.invalid):
                return True
    return False


@lru_cache
def served(name: str) -> frozenset[Case]:
    """The cases that a library serves."""
    return frozenset(case for case in suite() if serves(LIBRARIES[name], case))


# ---------------------------------------------------------------- the table


def keywords(cases: Set[Case]) -> set[str]:
    """Those whose first case is among the cases."""
    firsts: dict[str, Case] = {}
    for case in suite():
        firsts.setdefault(case.keyword, case)
    return {word for word, case in firsts.items() if case in cases}


def rows(by_library: dict[str, Set[Case]]) -> list[str]:
    """MORE.md's table: keywords by which others serve them, and cases that several serve."""
    mine, one, other = (keywords(by_library[name]) for name in LIBRARIES)
    groups = {
        "XGrammar and llguidance": one & other,
        "XGrammar alone": one - other,
        "llguidance alone": other - one,
        "neither": keywords({*suite()}) - one - other,
    }
    found = ["| others that serve it | we serve | we refuse |", "|---|---|---|"]
    for name, words in groups.items():
        cells = [
            ", ".join(f"`{word}`" for word in sorted(each)) for each in (words & mine, words - mine)
        ]
        found.append(f"| {name} | {cells[0] or '–'} | {cells[1] or '–'} |")
    cases = by_library["XGrammar"], by_library["llguidance"]
    found.append("")
    for others, words, schemas in (
        ("both others serve", one & other, cases[0] & cases[1]),
        ("one of them or both serve", one | other, cases[0] | cases[1]),
    ):
        shares = len(words & mine), len(words), len(schemas & by_library["ours"]), len(schemas)
        found.append(
            "Of the keywords that {} we serve {} of {}, of the schemas {} of {}.".format(
                others, *shares
            )
        )
    return found


def main() -> None:
    """Print the table."""
    print("\n".join(rows({name: served(name) for name in LIBRARIES})))


if __name__ == "__main__":
    main()
