"""Whether a value fits a schema, by the standard: for values that a schema names itself, in enum
and const, beside other keywords.
"""

import json

from lessons.l24_structured_outputs.automata.product import is_read
from lessons.l24_structured_outputs.languages import json_text as parts
from lessons.l24_structured_outputs.languages.json_keywords import (
    ANNOTATIONS,
    EXCLUDED,
    PATTERNS,
    check_values,
    each_of,
    fraction_of,
    is_of_type,
    not_read,
    wrong,
)

MOST_CHECKS = 50_000  # of keywords, for all constants of a schema: about a tenth of a second


def holds(reader, where: str, schema, value) -> bool:
    """Whether the value fits. reader.resolved(where, reference) finds what $ref names. Raises
    ValueError for a keyword that is not known here.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise wrong(where, schema, "a schema: an object, true or false")
    check_values(where, schema)

    def fits(inner, part=value) -> bool:
        return holds(reader, where, inner, part)

    for name, wanted in schema.items():
        if name in ANNOTATIONS:
            continue
        reader.checks += len(wanted) if isinstance(wanted, (list, dict)) else 1
        if name in ("pattern", "format") and isinstance(value, str):
            reader.checks += len(value)
        if name == "uniqueItems" and isinstance(value, list):
            reader.checks += len(value) ** 2
        if reader.checks > MOST_CHECKS:
            accepted = f"at most {MOST_CHECKS} checks of the constants of a schema"
            raise wrong(f"{where}/{name}", "more constants", accepted)
        if name == "$ref":
            known = fits(reader.resolved(where, wanted)[1])
        else:
            known = any_type(name, wanted, schema, value, fits)
        if known is None and isinstance(value, str):
            known = of_string(reader, name, wanted, value)
        if known is None and is_of_type(value, "number"):
            known = of_number(name, wanted, value)
        if known is None and isinstance(value, list):
            known = of_array(name, wanted, schema, value, fits)
        if known is None and isinstance(value, dict):
            known = of_object(reader, name, wanted, schema, value, fits)
        if known is None and name not in OF_A_TYPE:
            raise not_read(where, name, [], "beside enum or const")
        if known is False:
            return False
    return True


def equal(one, other) -> bool:
    """As JSON values, or schemas: 1 is 1.0, and true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def fits_text(reader, keyword: str, wanted: str, value: str) -> bool:
    """Whether a string fits a pattern or a format."""
    if (keyword, wanted) not in reader.machines:
        of = parts.string_of_pattern if keyword == "pattern" else parts.string_of_format
        reader.machines[keyword, wanted] = reader.products.machine_of(of(wanted))
    data = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    return is_read(reader.machines[keyword, wanted], data)


# ------------------------------------------------ each: None for a keyword that is not of this kind


def any_type(name: str, wanted, schema: dict, value, fits) -> bool | None:
    """Keywords about all values."""
    match name:
        case "type":
            return any(is_of_type(value, kind) for kind in each_of(wanted))
        case "const":
            return equal(wanted, value)
        case "enum":
            return any(equal(each, value) for each in wanted)
        case "allOf":
            return all(map(fits, wanted))
        case "anyOf":
            return any(map(fits, wanted))
        case "oneOf":
            return sum(map(fits, wanted)) == 1
        case "not":
            return not fits(wanted)
        case "if":
            return fits(schema.get("then" if fits(wanted) else "else", True))
        case "then" | "else":
            return True  # "if" asks for them
        case _ if name == EXCLUDED:
            return not any(map(fits, wanted))
    return None


def of_string(reader, name: str, wanted, value: str) -> bool | None:
    """Keywords about strings."""
    match name:
        case "minLength":
            return len(value) >= wanted
        case "maxLength":
            return len(value) <= wanted
        case "pattern" | "format":
            return all(fits_text(reader, name, each, value) for each in each_of(wanted))
    return None


def of_number(name: str, wanted, value) -> bool | None:
    """Keywords about numbers."""
    match name:
        case "minimum":
            return value >= wanted
        case "maximum":
            return value <= wanted
        case "exclusiveMinimum":
            return value > wanted
        case "exclusiveMaximum":
            return value < wanted
        case "multipleOf":
            return all(fraction_of(value) % fraction_of(each) == 0 for each in each_of(wanted))
    return None


def of_array(name: str, wanted, schema: dict, value: list, fits) -> bool | None:
    """Keywords about arrays."""
    match name:
        case "minItems":
            return len(value) >= wanted
        case "maxItems":
            return len(value) <= wanted
        case "prefixItems":
            return all(map(fits, wanted, value))
        case "items":
            return all(fits(wanted, each) for each in value[len(schema.get("prefixItems", [])) :])
        case "contains":
            count = sum(fits(wanted, each) for each in value)
            return schema.get("minContains", 1) <= count <= schema.get("maxContains", len(value))
        case "minContains" | "maxContains":
            return True  # "contains" asks for them
        case "uniqueItems":
            pairs = ((value[n], each) for n in range(len(value)) for each in value[:n])
            return not wanted or not any(equal(one, other) for one, other in pairs)
    return None


def of_object(reader, name: str, wanted, schema: dict, value: dict, fits) -> bool | None:
    """Keywords about objects."""
    match name:
        case "minProperties":
            return len(value) >= wanted
        case "maxProperties":
            return len(value) <= wanted
        case "required":
            return set(wanted) <= set(value)
        case "properties":
            return all(fits(wanted[key], each) for key, each in value.items() if key in wanted)
        case "patternProperties":
            return all(
                fits(inner, each)
                for pattern, inner in wanted.items()
                for key, each in value.items()
                if fits_text(reader, "pattern", pattern, key)
            )
        case _ if name == PATTERNS:
            others = {
                key: each for key, each in value.items() if key not in schema.get("properties", {})
            }
            return of_object(reader, "patternProperties", wanted, schema, others, fits)
        case "additionalProperties":
            others = (each for key, each in value.items() if is_other(reader, schema, key))
            return all(fits(wanted, each) for each in others)
        case "propertyNames":
            return all(fits(wanted, key) for key in value)
        case "dependentRequired":
            return all(set(names) <= set(value) for key, names in wanted.items() if key in value)
        case "dependentSchemas":
            return all(fits(inner) for key, inner in wanted.items() if key in value)
    return None


def is_other(reader, schema: dict, key: str) -> bool:
    """Whether a key is none of the properties, and no pattern is found in it."""
    patterns = {**schema.get("patternProperties", {}), **schema.get(PATTERNS, {})}
    found = (fits_text(reader, "pattern", pattern, key) for pattern in patterns)
    return key not in schema.get("properties", {}) and not any(found)


OF_A_TYPE = {
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "prefixItems", "items", "contains",
    "minContains", "maxContains", "uniqueItems", "minProperties", "maxProperties", "required",
    "properties", "patternProperties", "additionalProperties", "propertyNames",
    "dependentRequired", "dependentSchemas",
}  # fmt: skip
