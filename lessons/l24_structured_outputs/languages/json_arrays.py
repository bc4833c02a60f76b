"""Schemas of arrays as expressions."""

from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_holds import equal, holds
from lessons.l24_structured_outputs.languages.json_keywords import not_read, types_of, wrong
from lessons.l24_structured_outputs.languages.json_merge import both, schema_of_item
from lessons.l24_structured_outputs.languages.json_text import enclosed, separated
from lessons.l24_structured_outputs.languages.json_types import bounds
from lessons.l24_structured_outputs.languages.syntax import (
    EMPTY,
    Call,
    Choice,
    Expression,
    choice,
    optional,
    sequence,
)

MOST_COUNTS = 1000  # pairs of a number of items and a number of those that contains counts
MOST_CONSTANTS = 8  # of unique items: each set of them is a rule


def read_array(reader, where: str, schema: dict) -> Expression:
    """An array: first items, then others. Raises ValueError."""
    first = schema.get("prefixItems", [])
    items = schema.get("items", "prefixItems" not in schema)
    low, high = bounds(schema, "minItems", "maxItems")
    if items is False:
        high = len(first) if high is None else min(high, len(first))
    if high is not None and high < low:
        return Choice(())
    exact = {**schema, "items": items} | ({} if high is None else {"maxItems": high})
    if schema.get("uniqueItems") and (high is None or high > 1):
        return read_unique(reader, where, exact)
    if "contains" in schema:
        return read_counted(reader, where, exact)
    first = [reader.read(f"{where}/prefixItems/{n}", each) for n, each in enumerate(first)]
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


def read_counted(reader, where: str, schema: dict) -> Expression:
    """An array with `contains`: a rule for each number of items so far, and of those among them
    that fit. Raises ValueError.
    """
    low, high = bounds(schema, "minItems", "maxItems")
    least, most = bounds({"minContains": 1, **schema}, "minContains", "maxContains")
    # Numbers from which on nothing changes.
    last = max(1, low, len(schema.get("prefixItems", []))) if high is None else high
    full = least if most is None else most
    if (last + 1) * (full + 1) > MOST_COUNTS:
        accepted = f"at most {MOST_COUNTS} pairs of a number of items and one of those that fit"
        raise wrong(f"{where}/contains", "large counts", accepted)
    for n in range(last + 1):
        item, wanted = schema_of_item(schema, n), schema["contains"]
        fitting = item_rule(reader, f"({where}/contains, item {n})", both(item, wanted))
        # Without a largest count, an item that fits need not be counted.
        other = both(item, {"not": wanted}) if most is not None else item
        other = item_rule(reader, f"({where}/contains, other item {n})", other)
        for fits in range(full + 1):
            ways = [EMPTY] if n >= low and fits >= least else []
            comma = reader.layout.comma if n else EMPTY
            then = min(n + 1, last)
            if high is None or n < high:
                ways.append(sequence(comma, other, Call(f"items {then}, {fits} of {where}")))
                more = min(fits + 1, full) if most is None else fits + 1
                if more <= full:
                    ways.append(sequence(comma, fitting, Call(f"items {then}, {more} of {where}")))
            reader.rules[f"items {n}, {fits} of {where}"] = choice(*ways)
    return enclosed("[]", Call(f"items 0, 0 of {where}"), reader.layout)


def item_rule(reader, where: str, schema) -> Expression:
    """A rule for an item, because what is used often is copied."""
    reader.rules[f"item {where}"] = reader.read(where, schema)
    return Call(f"item {where}")


def read_unique(reader, where: str, schema: dict) -> Expression:
    """An array of constants, none of them twice: a rule for each set of those used so far. Raises
    ValueError for other items.
    """
    low, high = bounds(schema, "minItems", "maxItems")
    values: list = []
    allowed: list[set[int]] = []  # by place, as indices of values
    for n in range(MOST_CONSTANTS + 1):
        found = constants(reader, where, schema_of_item(schema, n))
        for value in found:
            if not any(equal(value, known) for known in values):
                values.append(value)
        allowed.append({m for m, v in enumerate(values) if any(equal(v, each) for each in found)})
    if len(values) > MOST_CONSTANTS:
        raise not_read(where, "uniqueItems", [], f"with more than {MOST_CONSTANTS} constants")
    least, most = bounds({"minContains": 1, **schema}, "minContains", "maxContains")
    wanted = schema.get("contains")
    fits = [wanted is not None and holds(reader, where, wanted, value) for value in values]
    for used in range(2 ** len(values)):
        members = [m for m in range(len(values)) if used >> m & 1]
        number, counted = len(members), sum(fits[m] for m in members)
        is_counted = wanted is None or (least <= counted and (most is None or counted <= most))
        ways = [EMPTY] if number >= low and is_counted else []
        comma = reader.layout.comma if number else EMPTY
        for m in allowed[number] - set(members) if high is None or number < high else ():
            after = Call(f"used {used | 1 << m} of {where}")
            ways.append(sequence(comma, parts.literal(values[m]), after))
        reader.rules[f"used {used} of {where}"] = choice(*ways)
    return enclosed("[]", Call(f"used 0 of {where}"), reader.layout)


def constants(reader, where: str, schema) -> list:
    """The values of a schema that names them all. Raises ValueError for others."""
    found = []
    for way in reader.combined.ways(where, schema):
        reader.check_known(where, way)
        kinds = set(types_of(way))
        if "enum" in way:
            found += reader.constants(where, way)
        elif kinds <= {"boolean", "null"}:
            found += [True, False] if "boolean" in kinds else []
            found += [None] if "null" in kinds else []
        else:
            raise not_read(where, "uniqueItems", [], "with items that are not constants")
    return found
