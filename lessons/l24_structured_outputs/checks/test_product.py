"""Proves products of automata against Python's re: both expressions, or one but not the other."""

import random
import re

import pytest

from lessons.l24_structured_outputs.automata.automaton import compile_grammar
from lessons.l24_structured_outputs.automata.nfa import TooLarge
from lessons.l24_structured_outputs.automata.product import Products
from lessons.l24_structured_outputs.lab.testing import ATOMS, LETTERS, QUANTIFIERS, at_most_calls
from lessons.l24_structured_outputs.languages.regex import read_regex
from lessons.l24_structured_outputs.languages.syntax import ROOT, Grammar
from lessons.l24_structured_outputs.matcher import Matcher

PAIRS = [("a*b*", "(ab)*"), ("[^a]*", ".{2}"), ("é|日|🙂", "[^é]"), ("(a|)b?", "a?(b|)")]


def pattern() -> str:
    """A short random one."""
    return "".join(
        f"(?:{random.choice(ATOMS)}|{random.choice(ATOMS)}){random.choice(('', *QUANTIFIERS))}"
        for _ in range(random.randint(1, 3))
    )


def fits(expression, text: str) -> bool:
    """Whether the text fits; an expression without texts fits none."""
    try:
        return Matcher(compile_grammar(Grammar({ROOT: expression}))).fits(text)
    except ValueError as error:
        assert "no text fits" in str(error)
        return False


def test_products_fit_the_texts_that_re_fits(seed):
    for one, other in [*PAIRS, *((pattern(), pattern()) for _ in range(12))]:
        left, right = (re.compile(each, re.ASCII) for each in (one, other))
        of = Products()
        shared, rest = (each(read_regex(one), read_regex(other)) for each in (of.both, of.but_not))
        texts = ["".join(random.choices(LETTERS, k=random.randint(0, 4))) for _ in range(30)]
        for text in [*texts, "", "ab", "abab"]:
            is_left, is_right = left.fullmatch(text) is not None, right.fullmatch(text) is not None
            assert fits(shared, text) == (is_left and is_right), (one, other, text)
            assert fits(rest, text) == (is_left and not is_right), (one, other, text)


def test_products_that_are_too_large_are_refused():
    one, other, third = (read_regex(f"(a{{{n}}}|b)*") for n in (97, 89, 83))
    of = Products()
    with at_most_calls(), pytest.raises(TooLarge):
        of.both(one, of.both(other, third))


def test_many_products_are_refused():
    of = Products()
    with at_most_calls(), pytest.raises(TooLarge):
        for n in range(1000):
            of.both(read_regex("(a|b){50}"), read_regex(f"(a{{20}}|b)*c{{{n}}}"))
