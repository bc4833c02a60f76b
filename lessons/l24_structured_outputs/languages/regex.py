"""Regular expressions in Python's notation, as far as they are regular.

    read_regex("(red|green)-\\d{2,3}")

Read: literals, escapes, `.`, classes with ranges and negation, `\\d \\w \\s` and their opposites,
groups, alternatives, `* + ? {m} {m,} {m,n}`, and the lazy forms, which fit the same texts. `\\d`,
`\\w` and `\\s` are those of re.ASCII, and a dot is any character but a newline. The whole text has
to fit, so `^` and `$` are accepted at the ends of an alternative and change nothing.

What no automaton of bounded size can do (backreferences), or what would need the intersection of
automata (look-around, word boundaries), is refused by name.
"""

from typing import NamedTuple

from lessons.l24_structured_outputs.languages.syntax import (
    DEEPEST,
    EMPTY,
    MOST_REPEATS,
    Chars,
    Choice,
    Expression,
    Ranges,
    Repeat,
    char_in,
    choice,
    complement,
    merged,
    sequence,
    wrong,
)

LONGEST = 20_000  # characters of an expression
DIGIT = char_in("09").ranges
WORD = char_in("az", "AZ", "09", "_").ranges
SPACE = char_in(" ", "\t\r").ranges
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CLASSES |= {name.upper(): complement(ranges) for name, ranges in CLASSES.items()}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
DOT = Chars(complement(((10, 10),)))
SPECIAL = "^$*+?{}[]\\|()."


class Anchored(NamedTuple):
    """An alternative of the whole expression, and whether it had ^ and $ at its ends."""

    expression: Expression
    at_start: bool
    at_end: bool


def read_regex(pattern: str, argument: str = "regex") -> Expression:
    """The expression that a whole text has to fit. Raises ValueError, which names `argument`."""
    return choice(*(part.expression for part in read_alternatives(pattern, argument)))


def read_alternatives(pattern: str, argument: str = "regex") -> list[Anchored]:
    """The alternatives at the top of a pattern, with what they say about their ends."""
    if not isinstance(pattern, str) or not pattern or len(pattern) > LONGEST:
        got = f"{len(pattern)} characters" if isinstance(pattern, str) else repr(pattern)[:80]
        raise ValueError(f"{argument}: got {got}; accepted: a pattern of 1 to {LONGEST}")
    return Reader(pattern, argument).whole()


class Reader:
    """Reads a pattern from left to right. at: characters read so far."""

    def __init__(self, pattern: str, argument: str):
        self.pattern = pattern
        self.argument = argument
        self.at = 0

    def wrong(self, accepted: str, at: int | None = None) -> ValueError:
        """An error at a place, by default here."""
        return wrong(self.argument, self.pattern, self.at if at is None else at, accepted)

    def sees(self, text: str) -> bool:
        """Whether `text` comes next."""
        return self.pattern.startswith(text, self.at)

    def takes(self, text: str) -> bool:
        """Whether `text` comes next; if so, it has been read."""
        if self.sees(text):
            self.at += len(text)
            return True
        return False

    def next_char(self) -> str:
        """Read one character."""
        if self.at >= len(self.pattern):
            raise self.wrong("a pattern that does not end here")
        self.at += 1
        return self.pattern[self.at - 1]

    # ------------------------------------------------------------ structure

    def whole(self) -> list[Anchored]:
        """The alternatives of the pattern."""
        found = []
        while True:
            at_start = self.takes("^")
            expression = self.branch(depth=0)
            found.append(Anchored(expression, at_start, self.takes("$")))
            if self.at == len(self.pattern):
                return found
            if not self.takes("|"):
                if self.sees(")"):
                    raise self.wrong("as many ( as )")
                raise self.wrong("^ and $ at the ends of an alternative only", self.at - 1)

    def group(self, depth: int) -> Expression:
        """Behind "(": up to its ")"."""
        if depth > DEEPEST:
            raise self.wrong(f"at most {DEEPEST} groups in one another")
        if self.takes("?"):
            if self.takes("P<") or (self.sees("<") and not (self.sees("<=") or self.sees("<!"))):
                self.at = self.pattern.find(">", self.at) + 1 or len(self.pattern)
            elif not self.takes(":"):
                accepted = "( or (?: or (?P<name>; no look-around, flags or conditions"
                raise self.wrong(accepted, self.at - 2)
        parts = [self.branch(depth)]
        while self.takes("|"):
            parts.append(self.branch(depth))
        if not self.takes(")"):
            raise self.wrong("a ) for each (; ^ and $ only at the ends of the whole pattern")
        return choice(*parts)

    def branch(self, depth: int) -> Expression:
        """Up to a |, a ), a $ or the end."""
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)$":
            parts.append(self.repeated(self.atom(depth)))
        return sequence(*parts) if parts else EMPTY

    def repeated(self, part: Expression) -> Expression:
        """A part, and how often it is repeated."""
        bounds = self.bounds()
        if bounds is None:
            return part
        if not self.takes("?") and self.sees("+"):
            raise self.wrong("no possessive repetition")
        if self.bounds() is not None:
            raise self.wrong("one repetition, or a group around the first", self.at - 1)
        low, high = bounds
        return part if (low, high) == (1, 1) else Repeat(part, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        """What a quantifier says; None: there is none."""
        for sign, meant in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.takes(sign):
                return meant
        start, low = self.at, None
        if self.takes("{"):
            low = self.number()
            high = self.number() if self.takes(",") else low
            if self.takes("}") and (low is not None or high is not None):
                low = low or 0
                if max(low, high or 0) > MOST_REPEATS or (high is not None and high < low):
                    accepted = f"{{m,n}} with m <= n, both at most {MOST_REPEATS}"
                    raise self.wrong(accepted, start)
                return low, high
            self.at = start  # Python reads such a brace as a character
        return None

    def number(self) -> int | None:
        """Digits, as far as they go; None: there are none."""
        start = self.at
        while self.at < len(self.pattern) and self.pattern[self.at] in "0123456789":
            self.at += 1
        digits = self.pattern[start : self.at]
        if len(digits) > 9:
            raise self.wrong(f"{{m,n}} with m <= n, both at most {MOST_REPEATS}", start)
        return int(digits) if digits else None

    # ------------------------------------------------------------ characters

    def atom(self, depth: int) -> Expression:
        """One character, class or group."""
        start, char = self.at, self.next_char()
        if char == "(":
            return self.group(depth + 1)
        if char == "[":
            return self.char_class(start)
        if char == ".":
            return DOT
        if char == "\\":
            return Chars(self.escaped(start))
        if char in "*+?":
            raise self.wrong("something in front of a repetition", start)
        if char == "^":
            raise self.wrong("^ and $ at the ends of an alternative only", start)
        return Chars(((ord(char), ord(char)),))

    def escaped(self, start: int, in_class: bool = False) -> Ranges:
        """Behind a backslash."""
        char = self.next_char()
        if char in CLASSES:
            return CLASSES[char]
        if char == "b" and in_class:
            code = 8
        elif char in CONTROLS:
            code = ord(CONTROLS[char])
            if char == "0" and self.pattern[self.at : self.at + 1].isdigit():
                raise self.wrong("\\x and two digits for a character by its number", start)
        elif char in HEX_DIGITS:
            code = self.hexadecimal(HEX_DIGITS[char], start)
        elif char.isascii() and char.isalnum():
            accepted = "escapes \\d \\w \\s \\D \\W \\S \\n \\r \\t \\f \\v \\a \\x \\u \\U; no \\"
            raise self.wrong(f"{accepted}b, backreferences or properties", start)
        else:
            code = ord(char)
        return ((code, code),)

    def hexadecimal(self, digits: int, start: int) -> int:
        """A code point in so many digits."""
        written = self.pattern[self.at : self.at + digits]
        self.at += digits
        is_hex = len(written) == digits and all(c in "0123456789abcdefABCDEF" for c in written)
        if not is_hex or int(written, 16) > 0x10FFFF:
            raise self.wrong(f"{digits} hexadecimal digits of a character", start)
        return int(written, 16)

    def char_class(self, start: int) -> Expression:
        """Behind "[": up to its "]"."""
        is_negated, found = self.takes("^"), []
        is_first = True
        while is_first or not self.takes("]"):
            if self.at >= len(self.pattern):
                raise self.wrong("a ] for each [", start)
            is_first = False
            at = self.at
            low = self.class_member()
            # "-" is a character at the end, and between two characters it makes a range
            if self.sees("-") and not self.sees("-]"):
                self.at += 1
                high = self.class_member()
                if low[0][0] != low[-1][1] or high[0][0] != high[-1][1] or high < low:
                    raise self.wrong("a range from a character to one not in front of it", at)
                low = ((low[0][0], high[0][1]),)
            found += low
        ranges = merged(found)
        ranges = complement(ranges) if is_negated else ranges
        return Chars(ranges) if ranges else Choice(())

    def class_member(self) -> Ranges:
        """A character or an escape of a class."""
        start, char = self.at, self.next_char()
        if char == "\\":
            return self.escaped(start, in_class=True)
        if char == "[" and self.sees(":"):
            raise self.wrong("\\d, \\w or \\s in place of a POSIX class", start)
        return ((ord(char), ord(char)),)
