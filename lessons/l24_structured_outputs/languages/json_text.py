"""How JSON writes strings, numbers and any value: the expressions of which json_schema.py is
made.
"""

import json
from dataclasses import dataclass

from lessons.l24_structured_outputs.languages.regex import read_alternatives, read_regex
from lessons.l24_structured_outputs.languages.syntax import (
    ANY_CHAR,
    EMPTY,
    Call,
    Chars,
    Expression,
    Repeat,
    char_in,
    choice,
    complement,
    optional,
    sequence,
    text,
    without,
)

MOST_DIGITS = 16  # before a point and after it; a float64 tells no more apart
ESCAPED = ((0, 31), (34, 34), (92, 92))  # control characters, the quote, the backslash
DIGIT, HEX = char_in("09"), char_in("09", "af", "AF")
# Without halves of surrogate pairs, which are no characters.
UNICODE_ESCAPE = choice(
    sequence(char_in("09", "ac", "ef", "AC", "EF"), Repeat(HEX, 3, 3)),
    sequence(char_in("d", "D"), char_in("07"), Repeat(HEX, 2, 2)),
)
ESCAPE = sequence(text("\\"), choice(char_in(*'"\\/bfnrt'), sequence(text("u"), UNICODE_ESCAPE)))
PLAIN_CHAR = Chars(complement(ESCAPED))
CHAR = choice(PLAIN_CHAR, ESCAPE)
STRING = sequence(text('"'), Repeat(CHAR, 0, None), text('"'))
WHOLE = choice(text("0"), sequence(char_in("19"), Repeat(DIGIT, 0, MOST_DIGITS - 1)))
FRACTION = sequence(text("."), Repeat(DIGIT, 1, MOST_DIGITS))
EXPONENT = sequence(char_in("e", "E"), optional(char_in("+", "-")), Repeat(DIGIT, 1, 2))
INTEGER = sequence(optional(text("-")), WHOLE)
NUMBER = sequence(INTEGER, optional(FRACTION), optional(EXPONENT))
BOOLEAN = choice(text("true"), text("false"))
NULL = text("null")

YEAR = r"([1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
DAY_OF_30 = r"(0[469]|11)-(0[1-9]|[12]\d|30)"
DAY = rf"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|{DAY_OF_30}|02-(0[1-9]|1\d|2[0-8]))"
DATE = f"{YEAR}-{DAY}"
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
HEXA = "[0-9a-fA-F]"
# Each fits a part of what the format allows; the 29th of February, for example, is left out.
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": f"{HEXA}{{8}}-{HEXA}{{4}}-{HEXA}{{4}}-{HEXA}{{4}}-{HEXA}{{12}}",
    "ipv4": rf"({BYTE}\.){{3}}{BYTE}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
    r"(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+",
}


@dataclass(frozen=True)
class Layout:
    """What is written between the parts of a JSON text. blank: what may be at any place. rules:
    that the three call.
    """

    blank: Expression
    comma: Expression
    colon: Expression
    rules: dict[str, Expression]

    @staticmethod
    def compact() -> "Layout":
        """One way to write each value: that of Python's json.dumps."""
        return Layout(EMPTY, text(", "), text(": "), {})

    @staticmethod
    def free(blank: Expression | None = None) -> "Layout":
        """blank: None for nothing, a space, or a new line with up to 20 blanks. JSON allows any
        number, and a model that has nothing to say writes them for ever.
        """
        if blank is None:
            indent = sequence(text("\n"), Repeat(char_in(" ", "\t"), 0, 20))
            blank = optional(choice(text(" "), indent))
        call = Call("blank")
        around = [sequence(call, text(sign), call) for sign in ",:"]
        return Layout(call, *around, {"blank": blank})


def separated(
    part: Expression, layout: Layout, low: int = 0, high: int | None = None
) -> Expression:
    """`low` to `high` parts with commas between them."""
    if high == 0:
        return EMPTY
    more = Repeat(sequence(layout.comma, part), max(0, low - 1), None if high is None else high - 1)
    found = sequence(part, more)
    return found if low else optional(found)


def enclosed(signs: str, inner: Expression, layout: Layout) -> Expression:
    """Between two brackets."""
    opens, closes = signs
    return sequence(text(opens), layout.blank, inner, layout.blank, text(closes))


def any_value(layout: Layout) -> dict[str, Expression]:
    """Rules for any JSON value: "value", "object", "array", and those of the layout."""
    pair = sequence(STRING, layout.colon, Call("value"))
    return layout.rules | {
        "value": choice(STRING, NUMBER, BOOLEAN, NULL, Call("object"), Call("array")),
        "object": enclosed("{}", separated(pair, layout), layout),
        "array": enclosed("[]", separated(Call("value"), layout), layout),
    }


def literal(value) -> Expression:
    """One JSON value, written as in Layout.compact, whole numbers without a point. Raises
    ValueError for what JSON cannot write.
    """
    value = without_points(value)
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs
        written = json.dumps(value, allow_nan=False)
    return text(written)


def without_points(value):
    """The value with 2 for 2.0: models write whole numbers so, and the two are equal."""
    if isinstance(value, list):
        return [without_points(each) for each in value]
    if isinstance(value, dict):
        return {key: without_points(each) for key, each in value.items()}
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 10**MOST_DIGITS
    return int(value) if is_whole else value


# ---------------------------------------------------------------- strings


def string_of_length(low: int, high: int | None) -> Expression:
    """A string of so many characters. It calls the rule "char"."""
    return sequence(text('"'), Repeat(Call("char"), low, high), text('"'))


def string_of_pattern(pattern: str) -> Expression:
    """A string in which the pattern is found: JSON Schema's patterns have no implied ends."""
    anything = Repeat(in_string(ANY_CHAR), 0, None)
    found = []
    for part in read_alternatives(pattern, "pattern"):
        front = [] if part.at_start else [anything]
        back = [] if part.at_end else [anything]
        found.append(sequence(*front, in_string(part.expression), *back))
    return sequence(text('"'), choice(*found), text('"'))


def string_of_format(name: str) -> Expression:
    """A string of a format in FORMATS."""
    return sequence(text('"'), read_regex(FORMATS[name]), text('"'))


def string_without_escapes(low: int = 0, high: int | None = None) -> Expression:
    """A string of so many characters, each written in one way: escapes only where JSON needs them.
    Strings of patterns and formats are written so, and texts in one way can be told apart.
    """
    return sequence(text('"'), Repeat(in_string(ANY_CHAR), low, high), text('"'))


def in_string(part: Expression) -> Expression:
    """The same characters as JSON writes them inside a string."""
    if isinstance(part, Chars):
        escapes = [
            json.dumps(chr(code))[1:-1]
            for low, high in ESCAPED
            for code in range(low, high + 1)
            if any(first <= code <= last for first, last in part.ranges)
        ]
        return choice(Chars(without(part.ranges, ESCAPED)), *shared_starts(escapes))
    if isinstance(part, Repeat):
        return Repeat(in_string(part.part), part.low, part.high)
    return type(part)(tuple(in_string(each) for each in part.parts))


def shared_starts(texts: list[str]) -> list[Expression]:
    """The texts, none of which begins another, as a tree: those that begin alike share it, so that
    an automaton follows one of them and not each.
    """
    found, ends = [], ""
    for first in sorted({each[0] for each in texts}):
        rest = [each[1:] for each in texts if each[0] == first]
        if rest == [""]:
            ends += first
        else:
            found.append(sequence(text(first), choice(*shared_starts(rest))))
    return [*found, char_in(*ends)] if ends else found


def key_other_than(names: list[str]) -> Expression:
    """A key that is none of these names, written without escapes, so that none can hide in them."""
    return sequence(text('"'), _other_than(sorted(set(names))), text('"'))


def _other_than(names: list[str]) -> Expression:
    if not names:
        return Repeat(PLAIN_CHAR, 0, None)
    firsts = sorted({name[0] for name in names if name})
    taken = tuple((ord(first), ord(first)) for first in firsts)
    other = sequence(Chars(without(PLAIN_CHAR.ranges, taken)), Repeat(PLAIN_CHAR, 0, None))
    longer = [
        sequence(text(first), _other_than([name[1:] for name in names if name[:1] == first]))
        for first in firsts
        if ord(first) > 31 and first not in '"\\'  # others need an escape, so no key is this one
    ]
    return choice(*([] if "" in names else [EMPTY]), other, *longer)
