"""Proves grammars against their definition, in both notations, with rules that call each other in
any way.
"""

import pytest

from lessons.l24_structured_outputs import matcher as matcher_module
from lessons.l24_structured_outputs.automata.automaton import compile_grammar
from lessons.l24_structured_outputs.automata.minimize import merge_equal
from lessons.l24_structured_outputs.lab.testing import (
    all_texts,
    assert_refused,
    is_stuck,
    language,
    matcher_of,
    random_grammar,
)
from lessons.l24_structured_outputs.languages.ebnf import read_grammar
from lessons.l24_structured_outputs.languages.json_schema import read_schema
from lessons.l24_structured_outputs.matcher import Matcher, TooAmbiguous


def test_grammars_fit_their_language(seed, request):
    """Left and right recursion, rules that fit the empty text, ambiguity: against sets of texts
    from the definition. And no text is stuck.
    """
    texts = all_texts("xy", 5)
    for _ in range(400 if request.config.getoption("--all") else 40):
        grammar = random_grammar()
        wanted = language(grammar, 5)
        try:
            automaton = compile_grammar(grammar)
            merge_equal(automaton)
            matcher = Matcher(automaton)
        except ValueError as error:
            assert "no text fits" in str(error) and not wanted, grammar
            continue
        assert {text for text in texts if matcher.fits(text)} == wanted, grammar
        beginnings = {text[:n] for text in wanted for n in range(len(text))}
        for text in texts[:15]:
            state = matcher.read(text.encode())
            assert state is not None or text not in beginnings, grammar
            assert state is None or not is_stuck(matcher, state, "xy"), grammar


def test_equal_states_are_one_object_and_right_recursion_does_not_grow():
    matcher = matcher_of("grammar", 'root ::= item "," root | item\nitem ::= [0-9] | "(" root ")"')
    once, later = matcher.read(b"(1,"), matcher.read(b"(1,(2,(3)),4,5,")
    assert once is later
    assert matcher.read(b"((1,") is not once
    assert max(len(state.items) for state in matcher.known.values()) < 8


def test_an_ambiguous_grammar_ends_in_one_line(monkeypatch):
    """Its readings grow with the text, polynomially; beyond a bound the text is given up."""
    monkeypatch.setattr(matcher_module, "MOST_STEPS", 2000)
    matcher = matcher_of("grammar", 'root ::= root root root | "a" | ""')
    state = matcher.start
    with pytest.raises(TooAmbiguous, match="too ambiguous"):
        for _ in range(100):
            before, state = matcher.steps, matcher.step(state, ord("a"))
            assert state.may_end and matcher.steps - before < 5000
    assert not matcher_of("grammar", 'root ::= "a" root root | "b"').fits("aab")


GBNF = r"""
# a comment
root  ::= "[" ws item ("," ws item)* "]"   # with a comment
item  ::= number | "\x41" | "\u00e9\n" |
          "(" root ")" | [^a-z\]",]{2,3} | [;]
number ::= "-"? [0-9]+
ws ::= [ \t]*
"""
LARK = r"""
// a comment
?start: "[" item ("," item)* "]" -> list
item: NUMBER | "A" | "(" start ")" | [ "b" ] "c" | "d" ~ 2..3
NUMBER: /-?[0-9]+\/?/
"""
TEXTS = {
    GBNF: (["[1]", "[ 1,A,-12]", "[é\n]", "[([1])]", "[ABC]", "[;]"], ["", "[]", "[abc]", "[1,]"]),
    LARK: (
        ["[1]", "[1,A,-12/]", "[([1])]", "[c,bc]", "[dd,ddd]"],
        ["[b]", "[d]", "[dddd]", "[1/2]"],
    ),
}


@pytest.mark.parametrize("source", TEXTS, ids=("gbnf", "lark"))
def test_both_notations_of_grammars(source):
    matcher = matcher_of("grammar", source)
    fitting, others = TEXTS[source]
    assert [text for text in fitting + others if matcher.fits(text)] == fitting


REFUSED_GRAMMARS = [
    ("", "1 to 100000"),
    (None, "1 to 100000"),
    ("hello", "a rule, name :"),
    ('a ::= "x"', "no rule 'root'"),
    ('a: "x"', "no rule 'start'"),
    ('root ::= "x" b', "rules that are defined"),
    ('root ::= root "x"', "no text fits"),
    ('root ::= "x"\nroot ::= "y"', "each rule once"),
    ('root ::= ("x"', r"a \) for each"),
    ('root ::= "x', 'a " for each'),
    ("root ::= <x>", "a literal"),
    ('start: "x"i', "without flags"),
    ('start: X\n%ignore " "', "no %ignore"),
    ('start: "x" ~ 3..2', "m <= n"),
    ("start: /(?=x)/", "look-around"),
    ("root ::= " + "(" * 5000, "in one another"),
    ('root ::= "a"{5000}{5000}', "too large"),
    (
        "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} |" for n in range(1500)),
        "rules that are defined",
    ),
    ("root ::= [a]\nunused ::= b", "rules that are defined"),
]


@pytest.mark.parametrize("source, said", REFUSED_GRAMMARS, ids=range(len(REFUSED_GRAMMARS)))
def test_grammars_that_are_refused(source, said):
    assert_refused(said, "grammar", source)


def test_a_choice_is_one_of_its_texts():
    matcher = matcher_of("choice", ["ja", "jawohl", "nein", "日本"])
    fitting = [text for text in ("ja", "jawohl", "日本", "j", "jaw", "日") if matcher.fits(text)]
    assert fitting == ["ja", "jawohl", "日本"]
    for value in ([], ["a", ""], "abc", [1], None):
        assert_refused("accepted: a list of texts", "choice", value)


def test_a_way_without_an_end_is_closed():
    more = 'more ::= "c" more | "d" more "e"'
    matcher = matcher_of("grammar", f'root ::= "a" | "b" more\n{more}')
    assert matcher.fits("a") and matcher.read(b"b") is None
    matcher = matcher_of("grammar", f'root ::= "b" (more | "x")\n{more}')
    assert matcher.fits("bx") and matcher.read(b"bc") is None


def test_sizes_are_bounded_before_the_text_begins():
    """What the readers give is small; the automaton is bounded, too."""
    read_grammar("root ::= " + " | ".join(f'"{n}"' for n in range(2000)))
    read_schema({"enum": list(range(3000))})
