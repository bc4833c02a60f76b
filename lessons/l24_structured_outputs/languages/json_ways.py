"""A schema that combines others as a choice of plain ones: the ways to fit it.

    {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^a"}]}
    has two ways:  {"type": ["string"], "maxLength": 2}  {"type": ["string"], "pattern": "^a"}

Conditions are such choices, too. "If A then B else C" has the ways of A and B, and those of "not A"
and C. "Not" turns every keyword around: not {"minimum": 3} is a number below 3, and not
{"required": ["a"]} an object in which a is forbidden. A negation has to be exact, because one that
left something out would let it in when it is negated again; so what cannot be turned around is
refused.
"""

from collections.abc import Iterator

from lessons.l24_structured_outputs.languages.json_holds import equal
from lessons.l24_structured_outputs.languages.json_keywords import (
    ANNOTATIONS,
    EXCLUDED,
    INTERNAL,
    KEYWORDS,
    PATTERNS,
    check_values,
    is_of_type,
    not_read,
    types_of,
    wrong,
)
from lessons.l24_structured_outputs.languages.json_merge import both, by_pattern, merged
from lessons.l24_structured_outputs.languages.syntax import DEEPEST

COMBINING = {
    "$ref", "const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
MOST_WAYS = 64  # of one schema: each is followed until the text tells it apart from the others
MOST_MERGES = 2000  # of a whole schema
Ways = list[dict]


class TooMany(ValueError):
    """Too many ways to combine schemas."""


class WaysReader:
    """Finds the ways of schemas. reader: json_schema.py's SchemaReader, which follows $ref."""

    def __init__(self, reader):
        self.reader = reader
        self.depth = 0
        self.merges = 0
        self.negations = 0

    def ways(self, where: str, schema) -> Ways:
        """The plain schemas of which one has to fit. Raises ValueError."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, dict):
            raise wrong(where, schema, "a schema: an object, true or false")
        check_values(where, schema)
        negations = self.negations
        self.enter(where)
        found = [plain_part(self.reader, where, schema)]
        for name, options in self.conditions(where, schema):
            found = self.each_with_each(f"{where}/{name}", found, options)
        self.depth -= 1
        for name, own in UNEVALUATED.items():
            if name in schema:
                if self.negations != negations or any("enum" in way for way in found):
                    raise not_read(where, name, [], "beside not, if, enum or const")
                # What the way names has been evaluated, and with `own` all the rest.
                found = [way if own in way else {**way, own: schema[name]} for way in found]
        return found

    def conditions(self, where: str, schema: dict) -> Iterator[tuple[str, Ways]]:
        """What has to hold beside the plain part: of each, one way."""
        for name, schemas in self.choices(where, schema):
            yield name, [way for each in schemas for way in self.ways(f"{where}/{name}", each)]
        if "not" in schema:
            yield "not", self.opposite(f"{where}/not", schema["not"])

    def choices(self, where: str, schema: dict) -> Iterator[tuple[str, list]]:
        """The keywords that combine schemas, `not` left out: for each, schemas of which one has to
        fit.
        """
        if "$ref" in schema:
            yield "$ref", [self.reader.resolved(where, schema["$ref"])[1]]
        for each in schema.get("allOf", []):
            yield "allOf", [each]
        if "anyOf" in schema:
            yield "anyOf", schema["anyOf"]
        if "oneOf" in schema:
            yield "oneOf", self.one_of(where, schema["oneOf"])
        if "if" in schema and {"then", "else"} & set(schema):
            first = {"allOf": [schema["if"], schema.get("then", True)]}
            yield "if", [first, {"allOf": [{"not": schema["if"]}, schema.get("else", True)]}]
        for name, names in schema.get("dependentRequired", {}).items():
            yield "dependentRequired", [without(name), {"required": [name, *names]}]
        for name, inner in schema.get("dependentSchemas", {}).items():
            with_it = {"allOf": [{"required": [name]}, inner]}
            yield "dependentSchemas", [without(name), with_it]

    def one_of(self, where: str, schemas: list) -> list:
        """The schemas, each without what fits another, if they are not apart anyway."""
        try:
            self.reader.check_apart(where, schemas)
            return schemas
        except ValueError as error:
            if len(schemas) > MOST_WAYS:
                raise
            alone = [
                {"allOf": [each, *({"not": other} for m, other in enumerate(schemas) if m != n)]}
                for n, each in enumerate(schemas)
            ]
            try:
                for each in alone:
                    self.ways(where, each)
            except TooMany:
                raise
            except ValueError:
                raise error from None
            return alone

    def enter(self, where: str) -> None:
        """Count a schema in another. Raises ValueError for references in a circle."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise wrong(where, "references in a circle", "references that end")

    def each_with_each(self, where: str, some: Ways, others: Ways) -> Ways:
        """All ways to fit one of `some` and one of `others`. Raises ValueError if they are many."""
        self.merges += len(some) * len(others)
        if self.merges > MOST_MERGES:
            accepted = f"at most {MOST_MERGES} in a schema"
            raise TooMany(wrong(where, f"more than {MOST_MERGES} combinations", accepted))
        found: Ways = []
        for one in some:
            for other in others:
                way = merged(self.reader, where, one, other)
                if way is not None and not any(equal(way, known) for known in found):
                    found.append(way)
                if len(found) > MOST_WAYS:
                    accepted = f"at most {MOST_WAYS} in one place"
                    raise TooMany(wrong(where, f"more than {MOST_WAYS} combinations", accepted))
        return found

    # ------------------------------------------------------------ not

    def opposite(self, where: str, schema) -> Ways:
        """The plain schemas of which one fits whatever does not fit the schema. Raises
        ValueError.
        """
        self.negations += 1
        if isinstance(schema, bool):
            return [] if schema else [{}]
        if not isinstance(schema, dict):
            raise wrong(where, schema, "a schema: an object, true or false")
        check_values(where, schema)
        for name in UNEVALUATED:
            if name in schema:
                raise not_read(where, name, [], "inside not, if or oneOf")
        self.enter(where)
        found = []
        for name, schemas in self.choices(where, schema):
            ways = [{}]
            for each in schemas:  # none of them fits
                ways = self.each_with_each(where, ways, self.opposite(f"{where}/{name}", each))
            found += ways
        if "not" in schema:
            found += self.ways(f"{where}/not", schema["not"])
        for name, value in plain_part(self.reader, where, schema).items():
            found += opposite_of(where, schema, name, value)
        self.depth -= 1
        return found


def plain_part(reader, where: str, schema: dict) -> dict:
    """The keywords that combine no schemas: a constant as an enum, types as a list, what patterns
    say of the properties as a part of these.
    """
    for name in INTERNAL & set(schema):
        raise not_read(where, name, [], "in a schema")
    found = {n: v for n, v in schema.items() if n not in COMBINING and n not in ANNOTATIONS}
    if "patternProperties" in schema:
        patterns = found.pop("patternProperties")
        names = schema.get("properties", {})
        found[PATTERNS] = patterns
        found["properties"] = {
            n: both(v, *by_pattern(reader, patterns, n)) for n, v in names.items()
        }
    if "contains" in schema:
        found.setdefault("minContains", 1)
    else:  # they say nothing alone
        found = {n: v for n, v in found.items() if n not in ("minContains", "maxContains")}
    if "type" in found:
        found["type"] = types_of(schema)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        found["enum"] = [v for v in values if equal(v, schema.get("const", v))]
    return found


def without(name: str) -> dict:
    """An object in which a key is forbidden."""
    return {"properties": {name: False}}


# ---------------------------------------------------------------- not, keyword by keyword

LARGEST_LIST = 20  # numbers around which those that are none of them are divided
FLIPPED = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
KIND_OF_COUNT = {"Length": "string", "Items": "array", "Properties": "object"}


def opposite_of(where: str, schema: dict, name: str, value) -> Ways:
    """The plain schemas of which one fits whatever a keyword does not allow. Raises ValueError."""
    if name in FLIPPED:
        return [{"type": ["number"], FLIPPED[name]: value}]
    if name[3:] in KIND_OF_COUNT:
        kind = [KIND_OF_COUNT[name[3:]]]
        if name.startswith("max"):
            return [{"type": kind, "min" + name[3:]: value + 1}]
        return [{"type": kind, "max" + name[3:]: value - 1}] if value else []
    match name:
        case "type":
            return other_types(value)
        case "enum":
            return other_values(where, value)
        case "required":
            return [{"type": ["object"], **without(key)} for key in value]
        case "properties":
            return [
                {"type": ["object"], "required": [key], "properties": {key: {"not": inner}}}
                for key, inner in value.items()
            ]
        case "pattern" | "multipleOf":
            kind = "string" if name == "pattern" else "number"
            return [{"type": [kind], EXCLUDED: ({name: value},)}]
        case "prefixItems":
            return [
                {"type": ["array"], "prefixItems": [*[True] * n, {"not": inner}], "items": True}
                | {"minItems": n + 1}
                for n, inner in enumerate(value)
            ]
        case "items" if "prefixItems" not in schema:
            return [{"type": ["array"], "contains": {"not": value}}]
        case "minContains" if value:
            fewer = {"minContains": 0, "maxContains": value - 1}
            return [{"type": ["array"], "contains": schema["contains"], **fewer}]
        case "maxContains":
            more = {"minContains": value + 1}
            return [{"type": ["array"], "contains": schema["contains"], **more}]
        case "contains" | "minContains":
            return []  # minContains is there, too, and says it all
    name = "patternProperties" if name == PATTERNS else name
    raise not_read(where, name, [], "inside not, if or oneOf")


def other_types(types: list[str]) -> Ways:
    """Values of none of the types."""
    others = [kind for kind in KEYWORDS if kind not in (*types, "integer", "number")]
    found = [{"type": others}] if others else []
    if "number" in types:
        return found
    if "integer" not in types:
        return [{"type": [*others, "number"]}]
    return [*found, {"type": ["number"], EXCLUDED: ({"multipleOf": 1},)}]


def other_values(where: str, values: list) -> Ways:
    """Values that equal none of these. Raises ValueError for objects and arrays."""
    by_type = {kind: [v for v in values if is_of_type(v, kind)] for kind in KEYWORDS}
    numbers = sorted(by_type["number"])
    if by_type["object"] or by_type["array"] or len(numbers) > LARGEST_LIST:
        accepted = f"strings, true, false, null and at most {LARGEST_LIST} numbers inside not or if"
        raise wrong(f"{where}/enum", "objects, arrays or many numbers", accepted)
    free = [
        kind for kind, some in by_type.items() if not some and kind not in ("integer", "boolean")
    ]
    found: Ways = [{"type": free}] if free else []
    if by_type["string"]:
        found.append({"type": ["string"], EXCLUDED: ({"enum": by_type["string"]},)})
    if numbers:
        edges = [{}, *({"exclusiveMinimum": number} for number in numbers)]
        ends = [*({"exclusiveMaximum": number} for number in numbers), {}]
        found += [{"type": ["number"], **low, **high} for low, high in zip(edges, ends)]
    flags = [flag for flag in (True, False) if flag not in by_type["boolean"]]
    return [*found, {"enum": flags}] if flags else found
