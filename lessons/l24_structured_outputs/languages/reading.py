"""What a request asks for, as an automaton: the one place where all notations meet.

compile_structure("regex", "(red|green)")     "choice", ["red", "green"]     "json", {...}
compile_structure("json_object", True)         "grammar", 'root ::= "red" | "green"'
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lessons.l24_structured_outputs.automata.automaton import Automaton, compile_grammar
from lessons.l24_structured_outputs.automata.minimize import merge_equal
from lessons.l24_structured_outputs.automata.nfa import MOST_STATES, TooLarge
from lessons.l24_structured_outputs.languages.ebnf import read_grammar
from lessons.l24_structured_outputs.languages.json_schema import read_any_object, read_schema
from lessons.l24_structured_outputs.languages.json_text import Layout
from lessons.l24_structured_outputs.languages.regex import read_regex
from lessons.l24_structured_outputs.languages.syntax import ROOT, Choice, Grammar, text
from lessons.toolbox.model.arguments import shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")


def compile_structure(kind: str, value, layout: Layout | None = None) -> Automaton:
    """The automaton of the texts that fit. kind: one of KINDS. layout: of JSON, None for
    Layout.free(). Raises ValueError, one line that names the kind.
    """
    with named(kind):
        automaton = compile_grammar(read_structure(kind, value, layout))
        merge_equal(automaton)
        return automaton


@contextmanager
def named(kind: str) -> Iterator[None]:
    """Errors inside it say what was read."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{kind}: {TooLarge()}") from None
    except ValueError as error:
        if str(error).startswith((kind, "pattern")):
            raise
        raise ValueError(f"{kind}: {error}") from None


def read_structure(kind: str, value, layout: Layout | None = None) -> Grammar:
    """The grammar of the texts that fit. Arguments and errors as in compile_structure."""
    if kind == "json":
        return read_schema(value, layout)
    if kind == "json_object":
        return read_any_object(layout)
    if kind == "regex":
        return Grammar({ROOT: read_regex(value)})
    if kind == "grammar":
        return read_grammar(value)
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"choice: got {shown(value)}; accepted: a list of texts, none empty")
    if sum(map(len, value)) > MOST_STATES:  # each character is one at least, so say it at once
        raise TooLarge
    return Grammar({ROOT: Choice(tuple(text(each) for each in value))})
