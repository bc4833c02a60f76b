"""JSON schemas as grammars: every text of the grammar is a document that the schema accepts.

    read_schema({"type": "object", "properties": {"name": {"type": "string"}}, "required":
    ["name"]})

The grammar may have fewer texts than the schema: properties come in the schema's order, numbers
have at most 16 digits on either side of the point, whole ones no point, and an object with
`properties` has no others unless additionalProperties says so (that is XGrammar's strict mode,
which vLLM uses). A schema without a type has the type that its keywords are about. It never has
more. So whatever cannot be read is refused by name, and nothing is ignored but annotations.

Schemas that combine others ($ref with something beside it, allOf, anyOf, oneOf, not, if) become a
choice of plain ones in json_ways.py, which json_merge.py merges two by two. What a document has to
have in `properties` is asked after the merge, so allOf may spread them over several schemas.

Source: JSON Schema 2020-12, Core and Validation.
"""

import json
from urllib.parse import unquote

from lessons.l24_structured_outputs.automata.product import Products
from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_arrays import read_array
from lessons.l24_structured_outputs.languages.json_holds import holds
from lessons.l24_structured_outputs.languages.json_keywords import (
    ANNOTATIONS,
    KEYWORDS,
    check_values,
    not_read,
    types_of,
    wrong,
)
from lessons.l24_structured_outputs.languages.json_objects import read_object
from lessons.l24_structured_outputs.languages.json_overlap import may_overlap
from lessons.l24_structured_outputs.languages.json_text import Layout
from lessons.l24_structured_outputs.languages.json_types import read_number, read_string
from lessons.l24_structured_outputs.languages.json_ways import COMBINING, WaysReader, plain_part
from lessons.l24_structured_outputs.languages.syntax import (
    DEEPEST,
    EMPTY,
    ROOT,
    Call,
    Choice,
    Expression,
    Grammar,
    Machine,
    choice,
)
from lessons.toolbox.model.arguments import shown

LONGEST = 200_000  # characters of a schema


def read_schema(schema: dict | bool | str, layout: Layout | None = None) -> Grammar:
    """The grammar of a schema, as a value or as JSON. layout: None for Layout.free(). Raises
    ValueError in one line for a schema that is wrong, and for keywords that are not read.
    """
    try:
        return SchemaReader(loaded(schema), layout or Layout.free()).grammar()
    except RecursionError:
        raise ValueError(f"json: got a deeper schema; accepted: at most {DEEPEST} deep") from None


def read_any_object(layout: Layout | None = None) -> Grammar:
    """Any JSON object."""
    return Grammar({ROOT: Call("object"), **parts.any_value(layout or Layout.free())})


def loaded(schema: dict | bool | str) -> dict | bool:
    """A schema that may be written as JSON. Raises ValueError."""
    try:
        if isinstance(schema, str):
            if len(schema) > LONGEST:
                got = f"a schema of {len(schema)} characters"
                raise ValueError(f"json: got {got}; accepted: at most {LONGEST}")
            schema = json.loads(schema)
        elif len(json.dumps(schema)) > LONGEST:
            raise ValueError(f"json: got a larger schema; accepted: {LONGEST} characters of JSON")
    except RecursionError:
        raise ValueError(f"json: got a deeper schema; accepted: at most {DEEPEST} deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"json: got {shown(schema)}: {error}; accepted: a JSON schema") from None
    except TypeError as error:
        raise ValueError(f"json: {error}; accepted: a JSON schema") from None
    return schema


class SchemaReader:
    """Reads one schema. Schemas of objects and arrays, and those that $ref names, become rules
    under their JSON pointers.
    """

    def __init__(self, root: dict | bool, layout: Layout):
        self.root = root
        if isinstance(root, dict):  # its own address, to which nothing refers
            self.root = {name: value for name, value in root.items() if name != "$id"}
        self.layout = layout
        self.rules: dict[str, Expression] = {"char": parts.CHAR}
        self.combined = WaysReader(self)
        self.products = Products()
        self.machines: dict[tuple[str, str], Machine] = {}  # of patterns and formats
        self.checks = 0  # of constants
        self.anchors: dict[str, list] = {}
        find_anchors(self.root, self.anchors)
        self.depth = 0

    def grammar(self) -> Grammar:
        """Of the whole schema."""
        self.rules[ROOT] = self.rule("#", self.root)
        return Grammar(self.rules | parts.any_value(self.layout))

    def rule(self, where: str, schema: dict | bool) -> Expression:
        """A call of the rule for a schema, which is read the first time."""
        if where not in self.rules:
            self.rules[where] = EMPTY  # so that a schema that refers to itself ends here
            self.rules[where] = self.read(where, schema, is_rule=True)
        return Call(where)

    def read(self, where: str, schema, is_rule: bool = False) -> Expression:
        """The expression of a schema. where: its JSON pointer, for errors and as a name."""
        if schema is True or (isinstance(schema, dict) and set(schema) <= ANNOTATIONS):
            return Call("value")
        if schema is False:
            return Choice(())
        if not isinstance(schema, dict):
            raise wrong(where, schema, "a schema: an object, true or false")
        self.depth += 1
        if self.depth > DEEPEST:
            raise wrong(where, "a deeper schema", f"at most {DEEPEST} schemas in one another")
        check_values(where, schema)
        restricting = set(schema) - ANNOTATIONS
        if restricting & COMBINING <= {"enum", "const"}:
            found = self.plain(where, plain_part(self, where, schema), is_rule)
        elif restricting == {"$ref"}:
            found = self.rule(*self.resolved(where, schema["$ref"]))
        elif restricting in ({"anyOf"}, {"oneOf"}):
            found = self.any_of(where, *restricting, schema)
        else:
            found = self.any_way(where, schema)
        self.depth -= 1
        return found

    def plain(self, where: str, schema: dict, is_rule: bool) -> Expression:
        """A schema without keywords that combine others, but for an enum."""
        self.check_known(where, schema)
        if "enum" not in schema:
            return choice(*(self.of_type(where, schema, t, is_rule) for t in types_of(schema)))
        try:
            return Choice(tuple(map(parts.literal, self.constants(where, schema))))
        except (ValueError, OverflowError):
            raise wrong(where, "a number that JSON has not", "JSON values") from None

    def check_known(self, where: str, schema: dict) -> None:
        """Raise ValueError for a keyword that is not about a type of the schema."""
        types = list(KEYWORDS) if "enum" in schema else types_of(schema)
        for name in schema:
            known = name in ANNOTATIONS or name in ("type", "enum")
            if not known and not any(name in KEYWORDS[kind] for kind in types):
                raise not_read(where, name, types)

    def constants(self, where: str, schema: dict) -> list:
        """Those of the values in enum that fit all else that the schema says."""
        beside = {name: value for name, value in schema.items() if name != "enum"}
        return [each for each in schema["enum"] if holds(self, where, beside, each)]

    # ------------------------------------------------------------ combined

    def any_of(self, where: str, name: str, schema: dict) -> Expression:
        """anyOf or oneOf, with nothing beside it."""
        schemas = schema[name]
        if name == "oneOf":
            schemas = self.combined.one_of(where, schemas)
        return choice(*(self.read(f"{where}/{name}/{n}", each) for n, each in enumerate(schemas)))

    def any_way(self, where: str, schema: dict) -> Expression:
        """Schemas that are combined in any other way: a choice of plain ones. What they say decides
        the name of the rule, because properties of two schemas meet again and again in one that
        refers to itself.
        """
        name = "ways of " + json.dumps(schema)
        if name not in self.rules:
            self.rules[name] = EMPTY
            ways = self.combined.ways(where, schema)
            found = (self.plain(f"({where}, way {n})", way, False) for n, way in enumerate(ways))
            self.rules[name] = choice(*found)
        return Call(name)

    def check_apart(self, where: str, schemas: list) -> None:
        """Raise ValueError unless no document fits two of the schemas, because oneOf forbids it."""
        schemas = [self.followed(where, each) for each in schemas]
        for n, one in enumerate(schemas):
            for m in range(n):
                if may_overlap(one, schemas[m], lambda each: self.followed(where, each)):
                    raise wrong(
                        f"{where}/oneOf",
                        f"schemas {m} and {n}, which one document may fit",
                        "anyOf, or schemas of different types or with different required constants",
                    )

    def followed(self, where: str, schema):
        """The schema that references lead to. Raises ValueError if they go round in a circle."""
        for _ in range(DEEPEST):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.resolved(where, schema["$ref"])[1]
        raise wrong(where, "references in a circle", "references that end")

    def resolved(self, where: str, reference) -> tuple[str, dict | bool]:
        """The JSON pointer of a reference, and the schema there. Nothing is ever loaded from
        elsewhere.
        """
        accepted = "#, #/... or the #$anchor of a place in this schema"
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise wrong(f"{where}/$ref", reference, accepted)
        schema = self.root
        if reference[1:2] not in ("", "/"):
            found = self.anchors.get(reference[1:], [])
            if len(found) != 1:
                raise wrong(f"{where}/$ref", reference, accepted)
            return reference, found[0]
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and part in schema:
                schema = schema[part]
            elif isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
                schema = schema[int(part)]
            else:
                raise wrong(f"{where}/$ref", reference, accepted)
        return unquote(reference), schema

    # ------------------------------------------------------------ by type

    def of_type(self, where: str, schema: dict, kind: str, is_rule: bool) -> Expression:
        """The documents of one type. is_rule: whether what is read becomes a rule anyway."""
        if kind in ("boolean", "null"):
            return parts.BOOLEAN if kind == "boolean" else parts.NULL
        if kind == "string":
            return read_string(self, where, schema)
        if kind in ("integer", "number"):
            return read_number(self, where, schema, kind)
        read = read_object if kind == "object" else read_array
        if is_rule:
            return read(self, where, schema)
        # Not under its pointer alone, which is the name of all that the schema allows; and not
        # as an extension of it, which could be the pointer of a property.
        name = f"{kind} of {where}"
        self.rules[name] = read(self, where, schema)
        return Call(name)


def find_anchors(schema, found: dict[str, list]) -> None:
    """Collect the schemas inside one, itself included, by their $anchor."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$anchor"), str):
            found.setdefault(schema["$anchor"], []).append(schema)
        for name, inner in schema.items():
            if name not in ("enum", "const", "default", "examples", "example"):
                find_anchors(inner, found)
    elif isinstance(schema, list):
        for inner in schema:
            find_anchors(inner, found)
