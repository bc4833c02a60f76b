"""Schemas of strings, numbers, arrays and objects as expressions.

A `reader` is json_schema.py's SchemaReader: it reads the schemas inside, has the layout, and keeps
rules.
"""

import json
from decimal import Decimal
from math import ceil, floor

from lessons.l24_structured_outputs.automata.automaton import compile_grammar
from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_numbers import (
    EXACT_DIGITS,
    LARGEST,
    Bound,
    integer_between,
    number_between,
)
from lessons.l24_structured_outputs.languages.json_text import enclosed, separated
from lessons.l24_structured_outputs.languages.syntax import (
    EMPTY,
    MOST_REPEATS,
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
from lessons.toolbox.model.arguments import is_number, is_whole, shown

LONGEST_NAME = 100  # characters, where a key must differ from the names
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
KEYWORDS = {
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(BOUNDS),
    "number": set(BOUNDS),
    "boolean": set(),
    "null": set(),
}  # fmt: skip


def wrong(where: str, got, accepted: str) -> ValueError:
    """The error of a value that cannot be in a schema."""
    return ValueError(f"json: got {shown(got)} at {shown(where)}; accepted: {accepted}")


def not_read(where: str, name: str, types: list[str], why: str = "") -> ValueError:
    """The error of a keyword that is refused by name."""
    known = sorted(set().union(*(KEYWORDS[kind] for kind in types)))
    beside = f" {why}" if why else f" with type {' or '.join(types)}"
    accepted = ", ".join(known) if known else "one keyword, and annotations such as title"
    return ValueError(f"json: got {shown(name)} at {shown(where)}{beside}; accepted: {accepted}")


def read_string(where: str, schema: dict) -> Expression:
    """A string, by length, pattern or format. Raises ValueError."""
    has = [name for name in ("pattern", "format") if name in schema]
    low, high = bounds(where, schema, "minLength", "maxLength")
    if has and (len(has) > 1 or low or high is not None):
        raise not_read(where, has[0], [], "beside minLength, maxLength, pattern or format")
    if "pattern" in schema:
        return parts.string_of_pattern(schema["pattern"])
    if "format" in schema:
        if schema["format"] not in parts.FORMATS:
            raise wrong(f"{where}/format", schema["format"], ", ".join(parts.FORMATS))
        return parts.string_of_format(schema["format"])
    return parts.STRING if not low and high is None else parts.string_of_length(low, high)


def read_number(where: str, schema: dict, kind: str) -> Expression:
    """A number, between bounds if there are some. kind: integer or number. Raises ValueError."""
    lows, highs = [(Decimal(-LARGEST), False)], [(Decimal(LARGEST), False)]
    for name in BOUNDS:
        if name in schema:
            (lows if name.endswith("inimum") else highs).append(bound_of(where, schema, name))
    if len(lows) == len(highs) == 1:
        return parts.INTEGER if kind == "integer" else parts.NUMBER
    # Of two equal bounds the strict one counts.
    low, high = max(lows), min(highs, key=lambda bound: (bound[0], not bound[1]))
    if kind == "number":
        return number_between(low, high)
    first = floor(low[0]) + 1 if low[1] else ceil(low[0])
    last = ceil(high[0]) - 1 if high[1] else floor(high[0])
    return integer_between(first, last)


def bound_of(where: str, schema: dict, name: str) -> Bound:
    """A bound of a number, and whether it is left out itself. Raises ValueError."""
    value = schema[name]
    if is_number(value, -LARGEST, LARGEST):
        bound = Decimal(repr(value)).normalize()
        _, digits, exponent = bound.as_tuple()
        if exponent >= 0 or max(len(digits), -exponent) <= EXACT_DIGITS:
            return bound, name.startswith("exclusive")
    accepted = f"a number, whole of at most {parts.MOST_DIGITS} digits, others of {EXACT_DIGITS}"
    raise wrong(f"{where}/{name}", value, accepted)


def read_array(reader, where: str, schema: dict) -> Expression:
    """An array: first items, then others. Raises ValueError."""
    low, high = bounds(where, schema, "minItems", "maxItems")
    first, items = (
        schema.get("prefixItems", []),
        schema.get("items", "prefixItems" not in schema),
    )
    if not isinstance(first, list):
        raise wrong(f"{where}/prefixItems", first, "a list of schemas")
    if isinstance(items, list):
        raise wrong(f"{where}/items", "a list", "a schema; prefixItems for the first items")
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
    if not isinstance(names, dict):
        raise wrong(f"{where}/properties", names, "an object of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong(f"{where}/required", required, "a list of names")
    patterns = schema.get("patternProperties", {})
    more = schema.get("additionalProperties", not {"properties", "patternProperties"} & set(schema))
    for name in required:
        names = names if name in names else {**names, name: more}
    pairs = []
    for name, value in names.items():
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
    low, high = bounds(where, schema, "minProperties", "maxProperties")
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
        if not isinstance(patterns, dict):
            raise wrong(f"{where}/patternProperties", patterns, "an object of schemas")
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


def bounds(where: str, schema: dict, least: str, most: str) -> tuple[int, int | None]:
    """Two counts, the second None for any. Raises ValueError for others."""
    for name in (least, most):
        if name in schema and not is_whole(parts.without_points(schema[name]), 0, MOST_REPEATS):
            raise wrong(f"{where}/{name}", schema[name], f"a whole number, 0 to {MOST_REPEATS}")
    low, high = schema.get(least, 0), schema.get(most)
    return int(low), None if high is None else int(high)
