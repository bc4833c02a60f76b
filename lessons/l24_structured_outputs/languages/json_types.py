"""Schemas of strings, numbers, arrays and objects as expressions.

A `reader` is json_schema.py's SchemaReader: it reads the schemas inside, has the layout, and keeps
rules.
"""

import json
from decimal import Decimal
from functools import reduce
from math import ceil, floor

from lessons.l24_structured_outputs.automata.automaton import compile_grammar
from lessons.l24_structured_outputs.automata.nfa import TooLarge
from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_keywords import (
    BOUNDS,
    EXCLUDED,
    each_of,
    fraction_of,
    not_read,
    wrong,
)
from lessons.l24_structured_outputs.languages.json_numbers import (
    EXACT_DIGITS,
    FRACTION_DIGITS,
    LARGEST,
    integer_between,
    multiples,
    number_between,
)
from lessons.l24_structured_outputs.languages.json_text import enclosed, separated
from lessons.l24_structured_outputs.languages.syntax import (
    EMPTY,
    ROOT,
    Call,
    Choice,
    Expression,
    Grammar,
    Repeat,
    choice,
    optional,
    sequence,
)
from lessons.l24_structured_outputs.matcher import Matcher

LONGEST_NAME = 100  # characters, where a key must differ from the names


def read_string(reader, where: str, schema: dict) -> Expression:
    """A string, by length, patterns and formats, and without what is excluded. Raises
    ValueError.
    """
    low, high = bounds(schema, "minLength", "maxLength")
    if high is not None and high < low:
        return Choice(())
    found = [parts.string_of_pattern(each) for each in each_of(schema.get("pattern", ()))]
    found += [parts.string_of_format(each) for each in each_of(schema.get("format", ()))]
    excluded = schema.get(EXCLUDED, ())
    if not found and not excluded:
        return parts.STRING if not low and high is None else parts.string_of_length(low, high)
    if not found or low or high is not None:
        found.append(parts.string_without_escapes(low, high))
    written = reduce(reader.products.both, found)
    for each in excluded:
        if "enum" in each:
            out = choice(*map(parts.literal, each["enum"]))
        else:
            out = parts.string_of_pattern(each["pattern"])
        written = reader.products.but_not(written, out)
    return written


def read_number(reader, where: str, schema: dict, kind: str) -> Expression:
    """A number between bounds, and a multiple of steps. kind: integer or number. Raises ValueError
    for a step with too many remainders.
    """
    lows, highs = [(Decimal(-LARGEST), False)], [(Decimal(LARGEST), False)]
    for name in BOUNDS:
        if name in schema:
            bound = Decimal(repr(schema[name])).normalize(), name.startswith("exclusive")
            (lows if name.endswith("inimum") else highs).append(bound)
    steps = each_of(schema.get("multipleOf", ()))
    excluded = [each["multipleOf"] for each in schema.get(EXCLUDED, ())]
    if len(lows) == len(highs) == 1 and not steps and not excluded:
        return parts.INTEGER if kind == "integer" else parts.NUMBER
    # Of two equal bounds the strict one counts.
    low, high = max(lows), min(highs, key=lambda bound: (bound[0], not bound[1]))
    if kind == "integer" or any(fraction_of(step).denominator == 1 for step in steps):
        first = floor(low[0]) + 1 if low[1] else ceil(low[0])
        last = ceil(high[0]) - 1 if high[1] else floor(high[0])
        written = integer_between(first, last)
    else:
        if steps or excluded:  # so many digits that none is lost in a float64
            most = Decimal(10 ** (EXACT_DIGITS - FRACTION_DIGITS) - 1)
            low, high = max(low, (-most, False)), min(high, (most, False))
        written = number_between(low, high)
    try:
        written = reduce(reader.products.both, map(multiples, steps), written)
        return reduce(reader.products.but_not, map(multiples, excluded), written)
    except TooLarge:
        accepted = "a step with fewer remainders, because each of them is a state"
        raise wrong(f"{where}/multipleOf", max((*steps, *excluded)), accepted) from None


def read_array(reader, where: str, schema: dict) -> Expression:
    """An array: first items, then others. Raises ValueError."""
    low, high = bounds(schema, "minItems", "maxItems")
    first, items = (
        schema.get("prefixItems", []),
        schema.get("items", "prefixItems" not in schema),
    )
    first = [reader.read(f"{where}/prefixItems/{n}", each) for n, each in enumerate(first)]
    if items is False:
        high = len(first) if high is None else min(high, len(first))
    if high is not None and high < low:
        return Choice(())
    first, item = first[:high], reader.read(f"{where}/items", items)
    if not first:
        return enclosed("[]", separated(item, reader.layout, low, high), reader.layout)
    # The first items, from the last: each is there only if those before it are.
    left = None if high is None else high - len(first)
    rest = separated(item, reader.layout, max(1, low - len(first)), left)
    if left != 0:
        rest = sequence(reader.layout.comma, rest)
        rest = rest if low > len(first) else optional(rest)
    for n in range(len(first) - 1, -1, -1):
        rest = sequence(first[n], rest) if n == 0 else sequence(reader.layout.comma, first[n], rest)
        rest = rest if n < low else optional(rest)
    return enclosed("[]", rest, reader.layout)


def read_object(reader, where: str, schema: dict) -> Expression:
    """An object: its properties in their order, then others. Raises ValueError."""
    names, required = schema.get("properties", {}), schema.get("required", [])
    patterns = schema.get("patternProperties", {})
    is_open = not patterns and not any(value is not False for value in names.values())
    more = schema.get("additionalProperties", is_open)
    for name in required:
        names = names if name in names else {**names, name: more}
    pairs = []
    for name, value in names.items():
        if value is False and name not in required:
            continue
        pointer = name.replace("~", "~0").replace("/", "~1")
        value = reader.read(f"{where}/properties/{pointer}", value)
        pair = sequence(parts.literal(name), reader.layout.colon, value)
        pairs.append((pair, name in required))
    other = EMPTY
    if patterns or more is not False:
        key, pointer, value = (
            other_key(reader, where, schema, list(names)),
            "additionalProperties",
            more,
        )
        if patterns:
            ((pattern, value),) = patterns.items()
            pointer = "patternProperties/" + pattern.replace("~", "~0").replace("/", "~1")
        other = sequence(key, reader.layout.colon, reader.read(f"{where}/{pointer}", value))
    low, high = bounds(schema, "minProperties", "maxProperties")
    if not low and high is None:
        return enclosed("{}", members(reader, where, pairs, other), reader.layout)
    if names:
        counted = "minProperties" if low else "maxProperties"
        raise not_read(where, counted, [], "beside properties or required")
    if low > 1:
        accepted = "0 or 1, because a key may be written twice and counts once"
        raise wrong(f"{where}/minProperties", low, accepted)
    if other is EMPTY or (high is not None and high < low):
        return Choice(()) if low else enclosed("{}", EMPTY, reader.layout)
    return enclosed("{}", separated(other, reader.layout, low, high), reader.layout)


def other_key(reader, where: str, schema: dict, names: list[str]) -> Expression:
    """A key that is none of the names, by one pattern, by a schema of names, or any. Raises
    ValueError.
    """
    patterns, named = schema.get("patternProperties", {}), schema.get("propertyNames", True)
    if patterns:
        if len(patterns) > 1 or schema.get("additionalProperties", False) is not False:
            why = "with several patterns, or beside additionalProperties"
            raise not_read(where, "patternProperties", [], why)
        if named is not True:
            raise not_read(where, "propertyNames", [], "beside patternProperties")
        (pattern,) = patterns
        key = parts.string_of_pattern(pattern)
        matcher = Matcher(compile_grammar(Grammar({ROOT: key})))
        if both := [name for name in names if matcher.fits(json.dumps(name, ensure_ascii=False))]:
            accepted = "a pattern that fits none of the names in properties and required"
            raise wrong(f"{where}/patternProperties", f"{pattern}, which fits {both[0]}", accepted)
        reader.rules[f"key of {where}"] = key  # a rule, because what is repeated is copied
        return Call(f"key of {where}")
    if named is not True:
        if names:
            raise not_read(where, "propertyNames", [], "beside properties or required")
        if isinstance(named, dict) and named.get("type", "string") != "string":
            raise wrong(f"{where}/propertyNames", named["type"], "a schema of strings")
        named = {**named, "type": "string"} if isinstance(named, dict) else named
        return reader.read(f"{where}/propertyNames", named)
    if long := [name for name in names if len(name) > LONGEST_NAME]:
        accepted = f"names of at most {LONGEST_NAME} characters beside additionalProperties"
        raise wrong(f"{where}/properties", long[0], accepted)
    return parts.key_other_than(names)


def members(
    reader, where: str, pairs: list[tuple[Expression, bool]], other: Expression
) -> Expression:
    """The pairs in their order, each with whether it is required, then any number of `other`."""
    comma = reader.layout.comma
    # Rule n: what may follow once something is written, from pair n on.
    rest = EMPTY if other is EMPTY else Repeat(sequence(comma, other), 0, None)
    reader.rules[f"from {len(pairs)} of {where}"] = rest
    for n in range(len(pairs) - 1, -1, -1):
        pair, is_required = pairs[n]
        written = sequence(comma, pair)
        written = written if is_required else optional(written)
        reader.rules[f"from {n} of {where}"] = sequence(written, Call(f"from {n + 1} of {where}"))
    firsts = []
    for n, (pair, is_required) in enumerate(pairs):
        firsts.append(sequence(pair, Call(f"from {n + 1} of {where}")))
        if is_required:
            return choice(*firsts)
    if other is not EMPTY:
        firsts.append(sequence(other, Call(f"from {len(pairs)} of {where}")))
    return choice(EMPTY, *firsts)


def bounds(schema: dict, least: str, most: str) -> tuple[int, int | None]:
    """Two counts, the second None for any."""
    low, high = schema.get(least, 0), schema.get(most)
    return int(low), None if high is None else int(high)
