"""What the tests of grammars share: random walks along a grammar, random grammars with their
languages, random regular expressions.
"""

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import pytest

from lessons.l24_structured_outputs import naive
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.languages.syntax import (
    ROOT,
    Call,
    Expression,
    Grammar,
    Repeat,
    choice,
    sequence,
    text,
)
from lessons.l24_structured_outputs.matcher import Matcher, State
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.l24_structured_outputs.vocabulary import Vocabulary, bytes_of_tokens
from lessons.toolbox.model.checkpoint import load_tokenizer


@lru_cache
def embedded_vocabulary() -> Vocabulary:
    """The bytes of the embedded model's tokens."""
    tokenizer = load_tokenizer("models/tiny")
    return Vocabulary(bytes_of_tokens(tokenizer, len(tokenizer)))


# ---------------------------------------------------------------- walks


def next_bytes(matcher: Matcher, state: State) -> list[int]:
    """Bytes that may follow, one of each class: the automaton does not tell the others apart."""
    class_of = matcher.automaton.class_of
    bytes_of: dict[int, list[int]] = {}
    for byte in range(256):
        bytes_of.setdefault(class_of[byte], []).append(byte)
    found = {c for position, _ in state.items for c in matcher.automaton.edges[position]}
    return [random.choice(bytes_of[byte_class]) for byte_class in sorted(found)]


def random_text(matcher: Matcher, most: int = 30, closing: bytes = b"") -> bytes | None:
    """A text that fits, byte by byte at random; None: after `most` bytes it has not ended. The
    longer it is, the rather it goes on with one of `closing`.
    """
    state, found = matcher.start, b""
    for n in range(most):
        following = next_bytes(matcher, state)
        if state.may_end and (not following or random.random() < 0.2 + n / most):
            return found
        ends = [byte for byte in following if byte in closing]
        narrow = ends if ends and random.random() < 0.1 + n / most else following
        found += bytes([random.choice(narrow)])
        state = matcher.step(state, found[-1])
    return found if state.may_end else None


def is_stuck(matcher: Matcher, state: State, letters: str, most: int = 3) -> bool:
    """Whether some text of at most `most` more letters can neither go on nor end."""
    following = [matcher.step(state, byte) for byte in letters.encode()]
    following = [each for each in following if each is not None]
    if not following:
        return not state.may_end
    return most > 0 and any(is_stuck(matcher, each, letters, most - 1) for each in following)


def random_tokens(masks: TokenMasks, allowed_tokens, most: int = 40) -> Iterator[tuple[State, int]]:
    """States along a random text of at most `most` tokens, each with the token that follows it; -1:
    the text ends. allowed_tokens(state): their ids. The longer the text, the sooner it closes what
    is open.
    """
    state = masks.start
    for n in range(most):
        tokens = allowed_tokens(state)
        if state.may_end and (not tokens or random.random() < 0.2):
            yield state, -1
            return
        closing = [t for t in tokens if masks.vocabulary.tokens[t][:1] in b'"}]']
        token = random.choice(closing if closing and random.random() < n / most else tokens)
        yield state, token
        state = masks.advance(state, token)


def allowed_by(masks: TokenMasks):
    """The ids of the tokens that may follow a state, as `random_tokens` asks for them."""
    size = len(masks.vocabulary)
    return lambda state: naive.unpacked(masks.mask(state), size).nonzero().view(-1).tolist()


# ---------------------------------------------------------------- grammars

NAMES = (ROOT, "a", "b")


def random_grammar() -> Grammar:
    """Three rules that call each other in any way: first, last, for nothing, several times."""

    def part(depth: int = 0) -> Expression:
        kind = random.random()
        if kind < 0.35 or depth > 2:
            return text(random.choice("xy"))
        if kind < 0.65:
            return Call(random.choice(NAMES))
        if kind < 0.8:
            return Repeat(part(depth + 1), random.randint(0, 1), random.choice([1, 2, None]))
        return choice(part(depth + 1), part(depth + 1))

    def series() -> Expression:
        return sequence(*(part() for _ in range(random.randint(0, 3))))

    return Grammar({name: choice(*(series() for _ in range(2))) for name in NAMES})


def language(grammar: Grammar, longest: int) -> set[str]:
    """All texts of at most `longest` characters x and y that fit, from the definition alone: sets
    that grow until nothing is new.
    """
    known: dict[str, frozenset[str]] = dict.fromkeys(grammar.rules, frozenset())

    def joined(some: set[str], more: set[str]) -> set[str]:
        return {a + b for a in some for b in more if len(a) + len(b) <= longest}

    def texts(part: Expression) -> set[str]:
        if isinstance(part, Call):
            return set(known[part.rule])
        if isinstance(part, Repeat):
            one, found = texts(part.part), {""}
            for _ in range(part.low):
                found = joined(found, one)
            for _ in range(longest if part.high is None else part.high - part.low):
                found |= joined(found, one)
            return found
        if hasattr(part, "ranges"):
            return {chr(low) for low, _ in part.ranges}
        each = [texts(one) for one in part.parts]
        if type(part).__name__ == "Choice":
            return set().union(*each)
        found = {""}
        for one in each:
            found = joined(found, one)
        return found

    while True:
        new = {name: frozenset(texts(rule)) for name, rule in grammar.rules.items()}
        if new == known:
            return set(known[ROOT])
        known = new


def all_texts(letters: str, longest: int) -> list[str]:
    """Every text of these letters, up to `longest` of them."""
    return ["".join(t) for n in range(longest + 1) for t in itertools.product(letters, repeat=n)]


# ---------------------------------------------------------------- regular expressions

LETTERS = "ab7_é日\n-]🙂"
ATOMS: Sequence[str] = (
    *"ab7_é日",
    *(r"\n", r"\-", r"\]", r"\.", r"\x61", r"\u00e9", "🙂"),
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "."),
    *("[ab]", "[^a]", "[a-c7]", r"[\w-]", r"[^\d\n]", "[]a]", "[^]é]", "[é-日]", r"[\s\S]"),
)
QUANTIFIERS = ("*", "+", "?", "{2}", "{1,}", "{,2}", "{1,3}", "*?", "+?", "{0}")


def patterns():
    """Regular expressions of the subset, as texts: a strategy of hypothesis."""
    from hypothesis import strategies

    def larger(inner):
        return strategies.one_of(
            strategies.tuples(inner, inner).map("".join),
            strategies.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
            strategies.tuples(inner, strategies.sampled_from(QUANTIFIERS)).map(
                lambda two: f"(?:{two[0]}){two[1]}"
            ),
            inner.map(lambda one: f"({one}|)"),
        )

    return strategies.recursive(strategies.sampled_from(ATOMS), larger, max_leaves=6)


# ---------------------------------------------------------------- refusals

MOST_CALLS = 2_000_000  # about half a second of an idle core without the counting


def matcher_of(kind: str, value, layout=None) -> Matcher:
    """What lessons.l24_structured_outputs.languages.reading compiles."""
    return Matcher(compile_structure(kind, value, layout))


@contextmanager
def at_most_calls(most: int = MOST_CALLS) -> Iterator[None]:
    """A block whose code makes `most` calls of functions at most; it is stopped at the next one.
    A count is the same on a busy machine, seconds are not.
    """
    made, before = 0, sys.getprofile()

    def count(frame, event: str, argument) -> None:
        nonlocal made
        made += event in ("call", "c_call")
        assert made <= most, f"made more than {most} calls before it was refused"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def assert_refused(said: str, kind: str, value) -> None:
    """In one line, and after little work."""
    with at_most_calls(), pytest.raises(ValueError, match=said) as caught:
        matcher_of(kind, value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert str(caught.value).startswith((kind, "pattern"))
