"""Schemas of strings and numbers as expressions.

A `reader` is json_schema.py's SchemaReader: it reads the schemas inside, has the layout, and keeps
rules.
"""

from decimal import Decimal
from functools import reduce
from math import ceil, floor

from lessons.l24_structured_outputs.automata.nfa import TooLarge
from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_keywords import (
    BOUNDS,
    EXCLUDED,
    INTERNAL,
    KEYWORDS,
    each_of,
    fraction_of,
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
from lessons.l24_structured_outputs.languages.syntax import (
    Choice,
    Expression,
    choice,
)


def read_string(reader, where: str, schema: dict) -> Expression:
    """A string, by length, patterns and formats, and without what is excluded. Raises
    ValueError.
    """
    low, high = bounds(schema, "minLength", "maxLength")
    if {"pattern", "format", EXCLUDED} & set(schema) or (high is not None and high < low):
        return string_in_one_way(reader, where, schema)
    return parts.STRING if not low and high is None else parts.string_of_length(low, high)


def string_in_one_way(reader, where: str, schema: dict) -> Expression:
    """The strings of a schema, each written in one way and without calls, so that products can be
    made of it. Raises ValueError if these are too large.
    """
    low, high = bounds(schema, "minLength", "maxLength")
    if high is not None and high < low:
        return Choice(())
    found = [parts.string_of_pattern(each) for each in each_of(schema.get("pattern", ()))]
    found += [parts.string_of_format(each) for each in each_of(schema.get("format", ()))]
    if not found or low or high is not None:
        found.append(parts.string_without_escapes(low, high))
    try:
        written = reduce(reader.products.both, found)
        for each in schema.get(EXCLUDED, ()):
            if "enum" in each:
                out = choice(*map(parts.literal, each["enum"]))
            else:
                out = parts.string_of_pattern(each["pattern"])
            written = reader.products.but_not(written, out)
        return written
    except TooLarge:
        names = ", ".join(name for name in schema if name in KEYWORDS["string"] - INTERNAL)
        accepted = "fewer at once, or smaller lengths: their automata are multiplied"
        raise wrong(where, names or "not", accepted) from None


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


def bounds(schema: dict, least: str, most: str) -> tuple[int, int | None]:
    """Two counts, the second None for any."""
    low, high = schema.get(least, 0), schema.get(most)
    return int(low), None if high is None else int(high)
