"""Proves regular expressions: against Python's re, and that hostile ones are refused in one line
and after little work.
"""

import random
import re

import pytest

from lessons.l24_structured_outputs.lab.testing import (
    ATOMS,
    LETTERS,
    assert_refused,
    matcher_of,
    patterns,
    random_text,
)
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.languages.utf8 import byte_sequences

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import HealthCheck, given, settings


def test_byte_ranges_are_the_utf8_of_the_characters(seed):
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    for _ in range(100):
        low = min(random.choice(edges) + random.randint(0, 99), 0x10FFFF)
        high = random.choice([low, min(low + random.randint(0, 9000), 0x10FFFF), 0x10FFFF])
        sequences = list(byte_sequences(((low, high),)))
        for code in [low - 1, low, high, high + 1, *random.choices(range(low, high + 1), k=20)]:
            if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                continue
            data = chr(code).encode()
            fitting = [
                one
                for one in sequences
                if len(one) == len(data) and all(a <= b <= c for b, (a, c) in zip(data, one))
            ]
            assert len(fitting) == (low <= code <= high), (low, high, code)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=patterns())
def test_regular_expressions_fit_the_texts_that_re_fits(pattern):
    matcher = matcher_of("regex", pattern)
    python = re.compile(pattern, re.ASCII)
    texts = ["".join(random.choices(LETTERS, k=random.randint(0, 5))) for _ in range(30)]
    walked = [random_text(matcher) for _ in range(3)]
    texts += [data.decode() for data in walked if data is not None]
    texts += [text[:-1] + random.choice(LETTERS) for text in texts[-3:]]
    for text in texts:
        assert matcher.fits(text) == (python.fullmatch(text) is not None), text


def test_single_characters_fit_as_in_re():
    """Each atom with each letter, and with the characters around its edges."""
    letters = {*LETTERS, *map(chr, range(128)), "\x85", "\xa0", "ê", "è", "本", "月", "٣", "K"}
    for atom in ATOMS:
        matcher, python = matcher_of("regex", atom), re.compile(atom, re.ASCII)
        for letter in letters:
            assert matcher.fits(letter) == (python.fullmatch(letter) is not None), (atom, letter)


def test_anchors_at_the_ends_change_nothing():
    matcher = matcher_of("regex", "^ab$|^c|d$")
    assert [text for text in ("ab", "c", "d", "abc", "") if matcher.fits(text)] == ["ab", "c", "d"]


REFUSED_PATTERNS = [
    ("", "1 to 20000"),
    (3, "accepted: a pattern"),
    ("(a", r"a \) for each"),
    ("a)", r"as many \( as \)"),
    ("[a", "a ] for each"),
    ("a\\", "does not end here"),
    ("*a", "in front of a repetition"),
    ("a**", "one repetition"),
    ("a*+", "possessive"),
    ("a{3,2}", "m <= n"),
    ("a{6000}", "at most 5000"),
    ("a{99999999999999}", "at most 5000"),
    (r"(a)\1", "backreferences"),
    (r"\bword", "no \\\\b"),
    (r"\p{L}", "properties"),
    ("(?=a)b", "no look-around"),
    ("(?<!a)b", "no look-around"),
    ("(?i)a", "flags"),
    ("a^b", "ends of an alternative"),
    ("a$b", "ends of an alternative"),
    ("(^a)", "ends of an alternative"),
    (r"[\d-z]", "a range from a character"),
    ("[z-a]", "a range from a character"),
    ("[[:alpha:]]", "POSIX"),
    (r"\xg1", "2 hexadecimal"),
    (r"\U00110000", "8 hexadecimal"),
    (r"[^\s\S]", "no text fits"),
    ("\ud800", "no text fits"),
]
HOSTILE_PATTERNS = [
    "(a|b)*a(a|b){30}",
    "((a{100}){100}){100}",
    "((((a{1,50}){1,50}){1,50}){1,50})b",
    ".*x.{5000}",
    "(.*.*.*=){900}",
    "(" * 5000 + ")" * 5000,
    "(a?){5000}" * 20,
    "[" + "".join(map(chr, range(256, 4000, 2))) + "]{90}",
]


@pytest.mark.parametrize("pattern, said", REFUSED_PATTERNS)
def test_patterns_that_are_refused(pattern, said):
    assert_refused(said, "regex", pattern)


@pytest.mark.sample(3)
@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS, ids=range(len(HOSTILE_PATTERNS)))
def test_hostile_patterns_are_refused_soon(pattern):
    assert_refused("too large|in one another|1 to 20000", "regex", pattern)


def test_patterns_that_make_engines_backtrack_are_read_in_one_pass():
    """Each step of a text costs one look-up, whatever the pattern."""
    for pattern in ("(a+)+b", "(a|a)*b", "(a*)*b", "(a|aa)+b", "(x+x+)+y"):
        matcher = matcher_of("regex", pattern)
        letter = pattern.strip("(")[0]
        assert not matcher.fits(letter * 3000)
        assert matcher.fits(letter * 3000 + pattern[-1])
        assert matcher.steps <= 6010


@pytest.mark.parametrize(
    "pattern, count",
    [
        ("[0-9]+(,[0-9]+)*", 2),
        ("(ab|cb)*", 2),
        ("abc|xbc|xyc", 5),
        ("a{1500}", 1501),
        ("(a|b)?", 2),
    ],
)
def test_positions_that_no_text_tells_apart_are_one(pattern, count):
    """The last but one is a long chain, which is left as it is."""
    assert len(compile_structure("regex", pattern).edges) == count
