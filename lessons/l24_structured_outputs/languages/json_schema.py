"""JSON schemas as grammars: every text of the grammar is a document that the schema accepts.

    read_schema({"type": "object", "properties": {"name": {"type": "string"}}, "required":
    ["name"]})

The grammar may have fewer texts than the schema: properties come in the schema's order, numbers
have at most 16 digits on either side of the point, whole ones no point, and an object with
`properties` has no others unless additionalProperties says so (that is XGrammar's strict mode,
which vLLM uses). A schema without a type has the type that its keywords are about. It never has
more. So whatever cannot be read is refused by name, and nothing is ignored but annotations.

Source: JSON Schema 2020-12, Core and Validation.
"""

import json
from urllib.parse import unquote

from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_overlap import may_overlap
from lessons.l24_structured_outputs.languages.json_text import Layout
from lessons.l24_structured_outputs.languages.json_types import (
    KEYWORDS,
    not_read,
    read_array,
    read_number,
    read_object,
    read_string,
    wrong,
)
from lessons.l24_structured_outputs.languages.syntax import (
    DEEPEST,
    EMPTY,
    ROOT,
    Call,
    Choice,
    Expression,
    Grammar,
    choice,
)
from lessons.toolbox.model.arguments import shown

LONGEST = 200_000  # characters of a schema
ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "$comment", "$schema", "$defs", "definitions", "discriminator",
    "contentEncoding", "contentMediaType",
}  # fmt: skip
COMBINING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


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
        self.layout = layout
        self.rules: dict[str, Expression] = {"char": parts.CHAR}
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
        combining = [name for name in COMBINING if name in schema]
        if combining:
            found = self.combined(where, schema, combining[0])
        else:
            types = self.types_of(where, schema)
            for name in schema:
                known = name in ANNOTATIONS or name == "type" or (name == "$id" and where == "#")
                if not known and not any(name in KEYWORDS[kind] for kind in types):
                    raise not_read(where, name, types)
            found = choice(*(self.of_type(where, schema, t, is_rule) for t in types))
        self.depth -= 1
        return found

    def types_of(self, where: str, schema: dict) -> list[str]:
        """The types that a schema names, or the one whose keywords it has."""
        types = schema.get("type")
        if types is None:
            has = [kind for kind, names in KEYWORDS.items() if names & set(schema)]
            if not has:
                return [kind for kind in KEYWORDS if kind != "integer"]
            return ["number"] if has[0] == "integer" else has[:1]  # whose bounds an integer shares
        types = [types] if isinstance(types, str) else types
        if (
            not isinstance(types, list)
            or not types
            or not all(t in KEYWORDS for t in map(str, types))
        ):
            raise wrong(f"{where}/type", schema["type"], ", ".join(KEYWORDS))
        # An integer is a number, and each text should be read in one way.
        return [t for t in dict.fromkeys(types) if t != "integer" or "number" not in types]

    # ------------------------------------------------------------ combined

    def combined(self, where: str, schema: dict, name: str) -> Expression:
        """$ref, const, enum, anyOf, oneOf, allOf: one of them, and nothing beside it that
        restricts.
        """
        value, beside = schema[name], {"type"} if name in ("const", "enum") else set()
        for other in schema:
            if other not in {name} | ANNOTATIONS | beside:
                raise not_read(where, other, [], f"beside {name}")
        if name == "$ref":
            return self.rule(*self.resolved(where, value))
        if name == "const":
            return self.one_of(where, schema, [value])
        if not isinstance(value, list) or not value:
            raise wrong(f"{where}/{name}", value, "a list, not empty")
        if name == "enum":
            return self.one_of(where, schema, value)
        if name == "allOf" and len(value) > 1:
            raise not_read(where, name, [], "with several schemas")
        if name == "oneOf":
            self.check_apart(where, value)
        return choice(*(self.read(f"{where}/{name}/{n}", each) for n, each in enumerate(value)))

    def one_of(self, where: str, schema: dict, values: list) -> Expression:
        """Those of the values that are of the schema's type."""
        types = self.types_of(where, {"type": schema["type"]}) if "type" in schema else KEYWORDS
        try:
            fitting = [value for value in values if any(is_of_type(value, kind) for kind in types)]
            return Choice(tuple(parts.literal(value) for value in fitting))
        except (ValueError, OverflowError):
            raise wrong(where, "a number that JSON has not", "JSON values") from None

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
        accepted = "# or #/..., a place in this schema"
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise wrong(f"{where}/$ref", reference, accepted)
        schema = self.root
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
            return read_string(where, schema)
        if kind in ("integer", "number"):
            return read_number(where, schema, kind)
        read = read_object if kind == "object" else read_array
        if is_rule:
            return read(self, where, schema)
        # Not under its pointer alone, which is the name of all that the schema allows; and not
        # as an extension of it, which could be the pointer of a property.
        name = f"{kind} of {where}"
        self.rules[name] = read(self, where, schema)
        return Call(name)


def is_of_type(value, kind: str) -> bool:
    """Whether a JSON value is of a type."""
    if kind in ("integer", "number"):
        is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_real and (kind == "number" or float(value).is_integer())
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[kind])
