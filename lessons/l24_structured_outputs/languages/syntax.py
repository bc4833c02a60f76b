"""What a grammar is before it becomes an automaton: a few kinds of expressions, and rules that call
each other by name.

    Grammar({"root": sequence(text("["), Repeat(Call("root"), 0, None), text("]"))})

Regular expressions, JSON schemas and EBNF grammars are all read into these. A text fits the grammar
if it fits the rule "root", from its first byte to its last.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included, sorted and apart
LAST_CODE_POINT = 0x10FFFF
ROOT = "root"
MOST_REPEATS = 5000  # of {m,n}: each repetition is a copy
DEEPEST = 100  # parentheses in parentheses, or schemas in schemas


@dataclass(frozen=True)
class Chars:
    """One character out of some ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """One part after the other. Without parts: the empty text."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Choice:
    """Any of some parts. Without parts: no text fits."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Repeat:
    """A part, `low` to `high` times. high: None for any number."""

    part: "Expression"
    low: int
    high: int | None


@dataclass(frozen=True)
class Call:
    """Whatever fits another rule."""

    rule: str


@dataclass(frozen=True)
class Machine:
    """The texts that a deterministic automaton reads from state 0 to a final state. edges[state]:
    (first byte, last byte, target), sorted.
    """

    edges: tuple[tuple[tuple[int, int, int], ...], ...]
    is_final: tuple[bool, ...]


Expression = Chars | Sequence | Choice | Repeat | Call | Machine
EMPTY = Sequence(())


@dataclass
class Grammar:
    """Rules by name, one of them ROOT. Whatever they call is there."""

    rules: dict[str, Expression]


def sequence(*parts: Expression) -> Expression:
    """One part after the other."""
    return parts[0] if len(parts) == 1 else Sequence(parts)


def choice(*parts: Expression) -> Expression:
    """Any of the parts."""
    return parts[0] if len(parts) == 1 else Choice(parts)


def optional(part: Expression) -> Expression:
    """The part, or nothing."""
    return Repeat(part, 0, 1)


def text(value: str) -> Expression:
    """These characters and no others."""
    return sequence(*(Chars(((ord(char), ord(char)),)) for char in value))


def char_in(*ranges: str) -> Chars:
    """One character, by ranges like "az" or single characters like "_"."""
    return Chars(merged((ord(pair[0]), ord(pair[-1])) for pair in ranges))


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, and those that touch made one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Every code point that is not in them."""
    found, start = [], 0
    for low, high in merged(ranges):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= LAST_CODE_POINT:
        found.append((start, LAST_CODE_POINT))
    return tuple(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The code points of `ranges` that are not in `others`."""
    return complement(merged((*complement(ranges), *others)))


ANY_CHAR = Chars(((0, LAST_CODE_POINT),))


def wrong(argument: str, got: str, at: int, accepted: str) -> ValueError:
    """The error of a text that cannot be read, one line. at: characters in front of what is
    wrong.
    """
    near = got[max(0, at - 10) : at + 20]
    return ValueError(f"{argument}: got {near!r} at character {at}; accepted: {accepted}")
