"""Schemas of objects as expressions.

A key that is not among the properties may fit several patterns, and its value has to fit the schema
of each. So such keys are divided by the patterns that they fit, with products of automata.
"""

from itertools import product

from lessons.l24_structured_outputs.automata.nfa import TooLarge
from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_holds import holds
from lessons.l24_structured_outputs.languages.json_keywords import PATTERNS, not_read, wrong
from lessons.l24_structured_outputs.languages.json_merge import both, schema_of_key
from lessons.l24_structured_outputs.languages.json_text import enclosed, separated
from lessons.l24_structured_outputs.languages.json_types import bounds, string_in_one_way
from lessons.l24_structured_outputs.languages.syntax import (
    EMPTY,
    Call,
    Choice,
    Expression,
    Repeat,
    choice,
    optional,
    sequence,
)

LONGEST_NAME = 100  # characters, where a key must differ from the names
MOST_PATTERNS = 3  # of keys: they divide the keys in 8
MOST_COUNTS = 1000  # pairs of a property and a number of those that were written
Pair = tuple[Expression, bool]  # a key with its value, and whether it is required


def read_object(reader, where: str, schema: dict) -> Expression:
    """An object: its properties in their order, then others. Raises ValueError."""
    names, required = schema.get("properties", {}), schema.get("required", [])
    is_open = not any(value is not False for value in names.values())
    is_open &= not schema.get(PATTERNS)
    more = schema.get("additionalProperties", is_open)
    pairs: list[Pair] = []
    for name in dict.fromkeys((*names, *required)):
        value = schema_of_key(reader, schema, name, more)
        if not holds(reader, where, schema.get("propertyNames", True), name):
            value = False
        if value is False and name not in required:
            continue
        pointer = name.replace("~", "~0").replace("/", "~1")
        value = reader.read(f"{where}/properties/{pointer}", value)
        pair = sequence(parts.literal(name), reader.layout.colon, value)
        pairs.append((pair, name in required))
    names = list(dict.fromkeys((*names, *required)))
    other = choice(*other_pairs(reader, where, schema, names, more))
    other = EMPTY if other == Choice(()) else other
    low, high = bounds(schema, "minProperties", "maxProperties")
    if not low and high is None:
        return enclosed("{}", members(reader, where, pairs, other), reader.layout)
    if low > 1 and other is not EMPTY:
        accepted = "0 or 1 beside other keys, because one may be written twice and counts once"
        raise wrong(f"{where}/minProperties", low, accepted)
    return enclosed("{}", counted_members(reader, where, pairs, other, low, high), reader.layout)


def other_pairs(reader, where: str, schema: dict, names: list[str], more) -> list[Expression]:
    """Keys that are none of the names with their values, by the patterns that the keys fit. Raises
    ValueError.
    """
    patterns, named = schema.get(PATTERNS, {}), schema.get("propertyNames", True)
    pairs = []
    if not patterns and named is True:
        if long := [name for name in names if len(name) > LONGEST_NAME and more is not False]:
            accepted = f"names of at most {LONGEST_NAME} characters beside additionalProperties"
            raise wrong(f"{where}/properties", long[0], accepted)
        pairs = [(parts.key_other_than(names), "additionalProperties", more)]
    elif len(patterns) > MOST_PATTERNS:
        raise not_read(where, "patternProperties", [], f"with more than {MOST_PATTERNS} patterns")
    else:
        try:
            pairs = divided_keys(reader, where, patterns, names, more, named)
        except TooLarge:
            name = "patternProperties" if patterns else "propertyNames"
            accepted = "fewer or shorter patterns: their automata are multiplied"
            raise wrong(where, name, accepted) from None
    found = []
    for key, pointer, value in pairs:
        if value is not False:
            name = f"key of {where}/{pointer}"  # a rule, because what is repeated is copied
            reader.rules[name] = key
            value = reader.read(f"{where}/{pointer}", value)
            found.append(sequence(Call(name), reader.layout.colon, value))
    return found


def divided_keys(
    reader, where: str, patterns: dict, names: list[str], more, named
) -> list[tuple[Expression, str, object]]:
    """Keys that are none of the names, divided by the patterns that they fit: for each part an
    automaton, a pointer and a schema of the value. named: a schema of all keys.
    """
    whole = Choice(tuple(all_keys(reader, f"{where}/propertyNames", named)))
    whole = reader.products.but_not(whole, choice(*map(parts.literal, names)))
    pairs = []
    for fits in product((True, False), repeat=len(patterns)):
        key, values = whole, []
        for (pattern, value), does_fit in zip(patterns.items(), fits):
            divide = reader.products.both if does_fit else reader.products.but_not
            key = divide(key, parts.string_of_pattern(pattern))
            values += [value] if does_fit else []
        sides = [
            pattern.replace("~", "~0").replace("/", "~1")
            for pattern, does_fit in zip(patterns, fits)
            if does_fit
        ]
        pointer = "patternProperties/" + ", ".join(sides) if sides else "additionalProperties"
        pairs.append((key, pointer, both(*values) if values else more))
    return pairs


def all_keys(reader, where: str, named) -> list[Expression]:
    """The strings that a schema of keys accepts, without calls."""
    found = []
    for way in reader.combined.ways(where, both(named, {"type": "string"})):
        reader.check_known(where, way)
        if "enum" in way:
            found += map(parts.literal, reader.constants(where, way))
        else:
            found.append(string_in_one_way(reader, where, way))
    return found


def members(reader, where: str, pairs: list[Pair], other: Expression) -> Expression:
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


def counted_members(
    reader, where: str, pairs: list[Pair], other: Expression, low: int, high: int | None
) -> Expression:
    """As `members`, `low` to `high` of them. Where there are others, low is 0 or 1."""
    comma, last = reader.layout.comma, len(pairs)
    full = min(last, low if high is None else high)  # from which on numbers are not told apart
    if (last + 1) * (full + 1) > MOST_COUNTS:
        counted = "minProperties" if low else "maxProperties"
        accepted = f"at most {MOST_COUNTS} pairs of a property and a number of properties"
        raise wrong(f"{where}/{counted}", low if low else high, accepted)
    for n, written in product(range(last + 1), range(full + 1)):
        ways = []
        if n == last:
            room = None if high is None else high - written
            least = max(0, low - written)
            if other is EMPTY:
                ways += [EMPTY] if not least else []
            elif room is None or room >= least:
                more = Repeat(sequence(comma, other), least, room)
                ways.append(more if written else separated(other, reader.layout, least, room))
        else:
            pair, is_required = pairs[n]
            if high is None or written < high:
                then = Call(f"from {n + 1}, {min(written + 1, full)} of {where}")
                ways.append(sequence(comma if written else EMPTY, pair, then))
            if not is_required:
                ways.append(Call(f"from {n + 1}, {written} of {where}"))
        reader.rules[f"from {n}, {written} of {where}"] = choice(*ways)
    return Call(f"from 0, 0 of {where}")
