"""Whether one document may fit two JSON schemas, as far as it can be seen from their types and
constants.

oneOf accepts a document that fits exactly one schema. A grammar accepts what fits any of them. The
two mean the same where no document fits two.
"""

from collections.abc import Callable

DEEP = 3  # properties in properties that are compared


def may_overlap(one, other, followed: Callable, depth: int = 0) -> bool:
    """False if surely no document fits both. followed(schema): the schema that its references lead
    to.
    """
    one, other = followed(one), followed(other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is not False and other is not False
    values = values_of(one), values_of(other)
    if values[0] is not None and values[1] is not None:
        return any(same(a, b) for a in values[0] for b in values[1])
    types = types_of(one), types_of(other)
    if not types[0] & types[1]:
        return False
    if types[0] & types[1] != {"object"} or depth >= DEEP:
        return True
    both = [schema.get("properties", {}) for schema in (one, other)]
    required = set(one.get("required", [])) & set(other.get("required", []))
    return all(
        may_overlap(both[0][name], both[1][name], followed, depth + 1)
        for name in required
        if name in both[0] and name in both[1]
    )


def values_of(schema: dict) -> list | None:
    """The constants that a schema allows; None: it names none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def types_of(schema: dict) -> set[str]:
    """The types that a schema allows, integers as numbers."""
    values, types = values_of(schema), schema.get("type")
    if types is None and values is not None:
        return {type_of(value) for value in values}
    if types is None:
        return {"object", "array", "string", "number", "boolean", "null"}
    types = types if isinstance(types, list) else [types]
    return {"number" if kind == "integer" else str(kind) for kind in types}


def type_of(value) -> str:
    """The JSON type of a value, an integer as a number."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def same(one, other) -> bool:
    """Equal as JSON values: 1 is 1.0, and True is not 1."""
    return type_of(one) == type_of(other) and one == other
