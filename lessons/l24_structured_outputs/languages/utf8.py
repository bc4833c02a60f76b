"""Ranges of characters as sequences of byte ranges, because automata read bytes.

A token may end in the middle of a character: byte-level vocabularies cut where they like. So an
automaton that reads characters could not say what may follow such a token, and one that reads bytes
can.

Source: the algorithm is that of Ken Thompson's grep and of RE2, after Russ Cox 2010, *Regular
Expression Matching in the Wild*, section "UTF-8".
"""

from collections.abc import Iterator

from lessons.l24_structured_outputs.languages.syntax import Ranges

SURROGATES = (0xD800, 0xDFFF)  # halves of UTF-16 characters, which UTF-8 does not encode
LARGEST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # of 1, 2, 3 and 4 bytes

ByteRanges = tuple[tuple[int, int], ...]  # one range for each byte of a character


def byte_sequences(ranges: Ranges) -> Iterator[ByteRanges]:
    """Sequences that fit exactly the UTF-8 of these characters: all bytes of a sequence vary on
    their own.
    """
    for low, high in ranges:
        for first, last in (
            (low, min(high, SURROGATES[0] - 1)),
            (max(low, SURROGATES[1] + 1), high),
        ):
            start = first
            for largest in LARGEST_OF_LENGTH:
                if start <= min(last, largest):
                    yield from _of_one_length(start, min(last, largest))
                    start = largest + 1


def _of_one_length(low: int, high: int) -> Iterator[ByteRanges]:
    """For characters of equally many bytes."""
    for kept_bits in (6, 12, 18):  # of the last one, two and three bytes
        rest = (1 << kept_bits) - 1
        if low <= rest and high <= 0x7F:
            break  # one byte has no continuation
        if low & ~rest != high & ~rest:
            # Split so that below the first difference all continuation bytes are free.
            if low & rest:
                yield from _of_one_length(low, low | rest)
                yield from _of_one_length((low | rest) + 1, high)
                return
            if high & rest != rest:
                yield from _of_one_length(low, (high & ~rest) - 1)
                yield from _of_one_length(high & ~rest, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode()))
