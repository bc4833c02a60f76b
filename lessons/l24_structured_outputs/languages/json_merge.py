"""Two plain schemas as one that accepts what both accept.

    {"type": "integer", "minimum": 3}  and  {"minimum": 5, "maximum": 9}
    are  {"type": ["integer"], "minimum": 5, "maximum": 9}

A schema is plain if it has no keywords that combine others ($ref, allOf, anyOf, not, if ...). Only
the top is merged: where both say something about one property or item, its schema becomes an allOf
of theirs, which is merged when it is read. So schemas that refer to themselves end.
"""

from lessons.l24_structured_outputs.languages.json_holds import equal, fits_text, holds
from lessons.l24_structured_outputs.languages.json_keywords import (
    EXCLUDED,
    KEYWORDS,
    PATTERNS,
    each_of,
    not_read,
)

LARGER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"}
SMALLER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"}
# A text has to fit them all, and no schema has a name for that: a tuple of their values.
TOGETHER = {"pattern", "format", "multipleOf", EXCLUDED}
BY_PARTS = {"properties", PATTERNS, "additionalProperties", "prefixItems", "items"}


def merged(reader, where: str, one: dict, other: dict) -> dict | None:
    """What fits both plain schemas; None: nothing does. Raises ValueError for what cannot be
    merged.
    """
    found = {}
    for name in {**one, **other}:
        if name in BY_PARTS or name == "enum":
            continue
        if name in one and name in other:
            found[name] = merged_value(where, name, one[name], other[name])
        else:
            found[name] = one[name] if name in one else other[name]
    if found.get("type") == []:
        return None
    merge_objects(reader, where, one, other, found)
    merge_arrays(one, other, found)
    if "enum" in one or "enum" in other:
        named, beside = (one, other) if "enum" in one else (other, one)
        sides = beside, {name: value for name, value in named.items() if name != "enum"}
        values = [v for v in named["enum"] if all(holds(reader, where, s, v) for s in sides)]
        return {"enum": values} if values else None
    if "type" in found:  # what is said of other types says nothing any more
        known, about = (
            set().union(*(KEYWORDS[kind] for kind in kinds)) for kinds in (KEYWORDS, found["type"])
        )
        found = {name: v for name, v in found.items() if name not in known or name in about}
    return found


def merged_value(where: str, name: str, one, other):
    """The value of a keyword that both schemas have."""
    if name == "type":
        return shared_types(one, other)
    if name in LARGER or name in SMALLER:
        return max(one, other) if name in LARGER else min(one, other)
    if name in TOGETHER:
        return each_of(one) + tuple(value for value in each_of(other) if value not in each_of(one))
    if name == "required":
        return list(dict.fromkeys((*one, *other)))
    if name == "propertyNames":
        return both(one, other)
    if name == "uniqueItems":
        return one or other
    if not equal(one, other):
        raise not_read(where, name, [], "with two values")
    return one


def shared_types(one: list[str], other: list[str]) -> list[str]:
    """The types in both lists; an integer is a number."""
    found = [kind for kind in one if kind in other or (kind == "integer" and "number" in other)]
    is_narrower = "integer" in other and "number" in one
    return [*found, "integer"] if is_narrower and "number" not in other else found


def both(*schemas):
    """A schema that accepts what all accept, not merged yet."""
    flat = []
    for schema in schemas:
        is_made = isinstance(schema, dict) and set(schema) == {"allOf"}
        for each in schema["allOf"] if is_made and isinstance(schema["allOf"], list) else [schema]:
            if each is False:
                return False
            if each is not True and each != {} and not any(equal(each, known) for known in flat):
                flat.append(each)
    return {"allOf": flat} if len(flat) > 1 else flat[0] if flat else True


# ---------------------------------------------------------------- objects and arrays


def merge_objects(reader, where: str, one: dict, other: dict, found: dict) -> None:
    """Their properties, patterns and other keys, into `found`."""
    names = {**one.get("properties", {}), **other.get("properties", {})}
    if names:
        found["properties"] = {
            name: both(schema_of_key(reader, one, name), schema_of_key(reader, other, name))
            for name in names
        }
    sides = one.get(PATTERNS, {}), other.get(PATTERNS, {})
    rest = one.get("additionalProperties", True), other.get("additionalProperties", True)
    if "additionalProperties" in one or "additionalProperties" in other:
        found["additionalProperties"] = both(*rest)
    if not any(sides):
        return
    is_known = [set(sides[0]) <= set(sides[1]), set(sides[1]) <= set(sides[0])]
    for n in range(2):
        # A key of a pattern that only the first has may fit another of the second, or none.
        if not is_known[n] and sides[1 - n] and rest[1 - n] is not True:
            raise not_read(where, "patternProperties", [], "twice, with additionalProperties")
    found[PATTERNS] = {
        key: both(sides[0].get(key, rest[0]), sides[1].get(key, rest[1]))
        for key in {**sides[0], **sides[1]}
    }


def merge_arrays(one: dict, other: dict, found: dict) -> None:
    """Their first items and others, into `found`."""
    length = max(len(side.get("prefixItems", [])) for side in (one, other))
    if length:
        found["prefixItems"] = [
            both(schema_of_item(one, n), schema_of_item(other, n)) for n in range(length)
        ]
    if "items" in one or "items" in other:
        found["items"] = both(one.get("items", True), other.get("items", True))


def schema_of_item(schema: dict, n: int):
    """What a plain schema says of item n."""
    first = schema.get("prefixItems", [])
    return first[n] if n < len(first) else schema.get("items", True)


def schema_of_key(reader, schema: dict, name: str, default=True):
    """What a plain schema says of the value of a key. default: what it says of other keys."""
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    found = by_pattern(reader, schema.get(PATTERNS, {}), name)
    return both(*found) if found else schema.get("additionalProperties", default)


def by_pattern(reader, patterns: dict, name: str) -> list:
    """The schemas whose patterns a key fits."""
    return [each for key, each in patterns.items() if fits_text(reader, "pattern", key, name)]
