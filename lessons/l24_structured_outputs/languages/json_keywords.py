"""The keywords of JSON Schema that are read: the type that each is about, what its value may be,
and how others are refused.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_numbers import EXACT_DIGITS, LARGEST
from lessons.l24_structured_outputs.languages.syntax import MOST_REPEATS
from lessons.toolbox.model.arguments import is_number, is_whole, shown

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Of plain schemas, see json_ways.py; no schema may have them.
EXCLUDED = "none of"  # schemas that do not fit
PATTERNS = "patterns of other keys"  # patternProperties, for keys that are not in properties
INTERNAL = {EXCLUDED, PATTERNS}
KEYWORDS = {
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", PATTERNS,
    },
    "array": {
        "items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains",
        "uniqueItems",
    },
    "string": {"minLength", "maxLength", "pattern", "format", EXCLUDED},
    "integer": {*BOUNDS, "multipleOf", EXCLUDED},
    "number": {*BOUNDS, "multipleOf", EXCLUDED},
    "boolean": set(),
    "null": set(),
}  # fmt: skip
ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "$comment", "$schema", "$defs", "definitions", "discriminator", "$anchor",
    "contentEncoding", "contentMediaType",
}  # fmt: skip
COUNTS = {
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minContains", "maxContains",
}  # fmt: skip


def wrong(where: str, got, accepted: str) -> ValueError:
    """The error of a value that cannot be in a schema."""
    return ValueError(f"json: got {shown(got)} at {shown(where)}; accepted: {accepted}")


def not_read(where: str, name: str, types: list[str], why: str = "") -> ValueError:
    """The error of a keyword that is refused by name."""
    known = sorted(set().union(*(KEYWORDS[kind] for kind in types)) - INTERNAL)
    beside = f" {why}" if why else f" with type {' or '.join(types)}"
    accepted = ", ".join(known) if known else "a schema without it"
    return ValueError(f"json: got {shown(name)} at {shown(where)}{beside}; accepted: {accepted}")


def check_values(where: str, schema: dict) -> None:
    """Raise ValueError for a keyword whose value cannot be its value."""
    for name, value in schema.items():
        if name in COUNTS:
            if not is_whole(parts.without_points(value), 0, MOST_REPEATS):
                raise wrong(f"{where}/{name}", value, f"a whole number, 0 to {MOST_REPEATS}")
        elif name in VALUES:
            is_value, accepted = VALUES[name]
            if not is_value(value):
                raise wrong(f"{where}/{name}", value, accepted)


def is_exact(value) -> bool:
    """Whether a float64 tells a number from all others of so many digits."""
    if not is_number(value, -LARGEST, LARGEST):
        return False
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return exponent >= 0 or max(len(digits), -exponent) <= EXACT_DIGITS


def fraction_of(value) -> Fraction:
    """A number as it is written in decimal digits."""
    return Fraction(Decimal(repr(value)))


def each_of(value) -> tuple:
    """One value of a keyword, or those of several schemas that were merged."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def is_list_of_names(value) -> bool:
    """Whether it is a list of texts."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_list(value) -> bool:
    """Whether it is a list with something in it."""
    return isinstance(value, list) and len(value) > 0


def is_type(value) -> bool:
    """Whether it names a type, or several."""
    types = [value] if isinstance(value, str) else value
    return is_list(types) and all(str(kind) in KEYWORDS for kind in types)


def is_object(value) -> bool:
    """Whether it is an object."""
    return isinstance(value, dict)


NUMBER = f"a number, whole of at most {parts.MOST_DIGITS} digits, others of {EXACT_DIGITS}"
NAMES, LIST, OBJECT = "a list of names", "a list, not empty", "an object of schemas"
VALUES: dict[str, tuple[Callable, str]] = {
    **dict.fromkeys(BOUNDS, (is_exact, NUMBER)),
    **dict.fromkeys(("enum", "allOf", "anyOf", "oneOf"), (is_list, LIST)),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), (is_object, OBJECT)),
    "dependentRequired": (
        lambda value: is_object(value) and all(map(is_list_of_names, value.values())),
        "an object of lists of names",
    ),
    "multipleOf": (
        lambda value: all(is_exact(each) and each > 0 for each in each_of(value)),
        f"above 0, {NUMBER}",
    ),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "type": (is_type, ", ".join(KEYWORDS)),
    "required": (is_list_of_names, NAMES),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    "items": (
        lambda value: not isinstance(value, list),
        "a schema; prefixItems for the first items",
    ),
    "pattern": (lambda value: isinstance(value, (str, tuple)), "a regular expression"),
    "format": (
        lambda value: all(str(each) in parts.FORMATS for each in each_of(value)),
        ", ".join(parts.FORMATS),
    ),
}


def types_of(schema: dict) -> list[str]:
    """The types that a schema names, or the one whose keywords it has."""
    types = schema.get("type")
    if types is None:
        has = [kind for kind, names in KEYWORDS.items() if names & set(schema)]
        if not has:
            return [kind for kind in KEYWORDS if kind != "integer"]
        return ["number"] if has[0] == "integer" else has[:1]  # whose bounds an integer shares
    types = [types] if isinstance(types, str) else types
    # An integer is a number, and each text should be read in one way.
    return [t for t in dict.fromkeys(types) if t != "integer" or "number" not in types]


def is_of_type(value, kind: str) -> bool:
    """Whether a JSON value is of a type."""
    if kind in ("integer", "number"):
        is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_real and (kind == "number" or isinstance(value, int) or value.is_integer())
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[kind])
