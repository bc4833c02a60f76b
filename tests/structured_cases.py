"""A vocabulary of bytes and words, and what its answers have to fit: for the tests of structured
outputs.
"""

from reference import StructuredOutputsParams
from tests.engine_histories import VOCAB

END = VOCAB - 1
WORDS = [
    "ab",
    "abc",
    "12",
    "123",
    "true",
    ", ",
    "[1",
    "]]",
    "((",
    "))",
    "d)",
    "c12",
    "é",
    "red",
    "🙂",
]
BYTES = b'abcdefghijklmnopqrstuvwxyz0123456789[](){}", :-.\n\xc3\xa9\xf0\x9f\x99\x82'
TOKENS = [*(bytes([byte]) for byte in BYTES), *(word.encode() for word in WORDS)]
TOKENS += [b"ab"] * (END - len(TOKENS)) + [None]
WISHES = [
    dict(regex=r"[a-d]+(, ?\d{1,3})*"),
    None,
    dict(grammar='root ::= "(" root ")" root | [a-d]{1,2}'),
    dict(choice=["red", "abc", "abcd 12", "é🙂"]),
    dict(json={"type": "array", "items": {"type": ["integer", "boolean"]}, "maxItems": 3}),
]


def wish(index: int) -> StructuredOutputsParams | None:
    wanted = WISHES[index % len(WISHES)]
    return wanted and StructuredOutputsParams(**wanted, disable_any_whitespace=True)
