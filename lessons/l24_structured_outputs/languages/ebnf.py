"""Grammars in EBNF: GBNF, which llama.cpp, XGrammar and vLLM read, and the plain part of Lark's
notation.

    root ::= "[" item ("," item)* "]"          start: "[" item ("," item)* "]"
    item ::= [0-9]{1,3} | root                  item: /[0-9]{1,3}/ | start

A text with "::=" is GBNF: literals in double quotes, classes [a-z], `.`, groups, `|`, `* + ?
{m,n}`, comments after #; the first rule is "root". Any other text is Lark's: literals, /regex/,
groups, [optional], `* + ? ~ m..n`, comments after //; the first rule is "start". Lark splits a text
into terminals first, we read it byte by byte; so what Lark says of terminals, priorities, %ignore
and %import is refused by name.

Rules may call each other in any way, also first thing (left recursion).
"""

import re

from lessons.l24_structured_outputs.languages.regex import DOT, Reader, read_regex
from lessons.l24_structured_outputs.languages.syntax import (
    ANY_CHAR,
    DEEPEST,
    EMPTY,
    MOST_REPEATS,
    ROOT,
    Call,
    Expression,
    Grammar,
    Repeat,
    choice,
    optional,
    sequence,
    text,
)
from lessons.toolbox.model.arguments import shown

LONGEST = 100_000  # characters
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def read_grammar(source: str) -> Grammar:
    """The grammar of a text in one of the notations. Raises ValueError in one line."""
    if not isinstance(source, str) or not source.strip() or len(source) > LONGEST:
        got = f"{len(source)} characters" if isinstance(source, str) else shown(source)
        raise ValueError(f"grammar: got {got}; accepted: a grammar of 1 to {LONGEST} characters")
    reader = GbnfReader if "::=" in source else LarkReader
    return reader(source, "grammar").grammar()


class GbnfReader(Reader):
    """Rules of the form name ::= alternatives. A rule ends where the next one begins."""

    define, comment, first_rule = "::=", "#", ROOT
    marks = ""  # that may come before a rule's name
    any_char = ANY_CHAR

    def grammar(self) -> Grammar:
        rules: dict[str, Expression] = {}
        self.called: dict[str, int] = {}  # {rule: where}
        self.skip()
        while self.at < len(self.pattern):
            start, name = self.at, self.defined_name()
            if name is None:
                raise self.wrong(f"a rule, name {self.define} alternatives", start)
            if name in rules:
                raise self.wrong("each rule once", start)
            rules[name] = self.alternatives(depth=0)
        if self.first_rule not in rules:
            raise ValueError(
                f"grammar: got no rule {self.first_rule!r}; accepted: one, with which texts begin"
            )
        for name, start in self.called.items():
            if name not in rules:
                raise self.wrong("calls of rules that are defined", start)
        if self.first_rule != ROOT:
            rules[ROOT] = Call(self.first_rule)
        return Grammar(rules)

    def skip(self) -> None:
        """Blanks and comments."""
        while self.at < len(self.pattern):
            if self.sees(self.comment):
                end = self.pattern.find("\n", self.at)
                self.at = len(self.pattern) if end < 0 else end
            elif self.pattern[self.at].isspace():
                self.at += 1
            else:
                return

    def takes_token(self, token: str) -> bool:
        """As `takes`, with the blanks after it."""
        found = self.takes(token)
        if found:
            self.skip()
        return found

    def name(self) -> str | None:
        found = NAME.match(self.pattern, self.at)
        if found is None:
            return None
        self.at = found.end()
        self.skip()
        return found[0]

    def defined_name(self) -> str | None:
        """The name of a rule that begins here; None, with nothing read, if none does."""
        start = self.at
        if self.at < len(self.pattern) and self.pattern[self.at] in self.marks:
            self.at += 1
        name = self.name()
        if name is not None and self.takes_token(self.define):
            return name
        self.at = start
        return None

    def alternatives(self, depth: int) -> Expression:
        if depth > DEEPEST:
            raise self.wrong(f"at most {DEEPEST} groups in one another")
        parts = [self.series(depth)]
        while self.takes_token("|"):
            parts.append(self.series(depth))
        return choice(*parts)

    def series(self, depth: int) -> Expression:
        """Up to a |, a closing bracket, or the next rule."""
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)]":
            start = self.at
            if self.defined_name() is not None:
                self.at = start
                break
            parts.append(self.quantified(self.item(depth)))
        return sequence(*parts) if parts else EMPTY

    def quantified(self, part: Expression) -> Expression:
        while (found := self.bounds()) is not None:
            part = Repeat(part, *found)
            self.skip()
        return part

    def item(self, depth: int) -> Expression:
        """A call, a literal, a class or a group."""
        start, name = self.at, self.name()
        if name is not None:
            self.called.setdefault(name, start)
            return Call(name)
        char = self.next_char()
        if char == "(":
            self.skip()
            found = self.alternatives(depth + 1)
            if not self.takes(")"):
                raise self.wrong("a ) for each (", start)
        elif char == '"':
            found = self.literal(start)
        elif char == ".":
            found = self.any_char
        else:
            found = self.other(char, start, depth)
        self.skip()
        return found

    def other(self, char: str, start: int, depth: int) -> Expression:
        if char == "[":
            return self.char_class(start)
        accepted = 'a rule\'s name, "a literal", [a class], . or a group'
        raise self.wrong(accepted, start)

    def literal(self, start: int) -> Expression:
        """Behind a quote: up to the next."""
        found = []
        while not self.takes('"'):
            if self.at >= len(self.pattern) or self.sees("\n"):
                raise self.wrong('a " for each "', start)
            char = self.next_char()
            found.append(chr(self.escaped(self.at - 1)[0][0]) if char == "\\" else char)
        return text("".join(found))


class LarkReader(GbnfReader):
    """Rules of the form name: alternatives."""

    define, comment, first_rule = ":", "//", "start"
    marks = "?!"
    any_char = DOT

    def quantified(self, part: Expression) -> Expression:
        part = super().quantified(part)
        if self.takes_token("~"):
            start, low = self.at, self.number()
            high = self.number() if self.takes("..") else low
            if low is None or high is None or not low <= high <= MOST_REPEATS:
                raise self.wrong(f"~ m..n with m <= n, both at most {MOST_REPEATS}", start)
            self.skip()
            part = Repeat(part, low, high)
        # The name of a branch of the tree says nothing about texts.
        if self.takes_token("->") and self.name() is None:
            raise self.wrong("a name after ->")
        return part

    def other(self, char: str, start: int, depth: int) -> Expression:
        if char == "[":
            self.skip()
            found = self.alternatives(depth + 1)
            if not self.takes("]"):
                raise self.wrong("a ] for each [", start)
            return optional(found)
        if char == "/":
            return self.regex(start)
        raise self.wrong(
            'a rule\'s name, "a literal", /a regex/ or a group; no %ignore, %import or priorities',
            start,
        )

    def literal(self, start: int) -> Expression:
        found = super().literal(start)
        self.no_flags()
        return found

    def regex(self, start: int) -> Expression:
        """Behind a slash: up to the next that is not escaped."""
        first = self.at
        while not self.sees("/"):
            if self.next_char() == "\\":
                self.next_char()
        pattern = self.pattern[first : self.at]
        self.at += 1
        self.no_flags()
        if not pattern:
            raise self.wrong("/a regex/, not empty", start)
        return read_regex(pattern, "grammar")

    def no_flags(self) -> None:
        if self.at < len(self.pattern) and self.pattern[self.at] in "imsux":
            raise self.wrong("literals and expressions without flags")
