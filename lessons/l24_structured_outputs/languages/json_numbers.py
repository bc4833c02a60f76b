"""Numbers between bounds, digit by digit.

Where a bound is strict or has a fraction, a text must not round to the other side of it: a float64
tells all numbers of 15 digits apart, so a bounded number has no more than that near its bounds.
"""

from decimal import Decimal

from lessons.l24_structured_outputs.languages.json_text import DIGIT, MOST_DIGITS
from lessons.l24_structured_outputs.languages.syntax import (
    EMPTY,
    Choice,
    Expression,
    Repeat,
    Sequence,
    char_in,
    choice,
    sequence,
    text,
)

LARGEST = 10**MOST_DIGITS - 1
EXACT_DIGITS = 15  # that a float64 always keeps
Bound = tuple[Decimal, bool]  # a number, and whether it is left out itself
# The digits of a bound after the point, and whether the bound itself is left out. None: no bound.
Tail = tuple[str, bool] | None


def integer_between(low: int, high: int) -> Expression:
    """The whole numbers from low to high; no text fits if low > high."""
    parts = []
    if low < 0 and low <= high:
        parts.append(sequence(text("-"), digits_between(max(1, -high), -low)))
    if high >= 0 and low <= high:
        parts.append(digits_between(max(0, low), high))
    return choice(*parts)


def number_between(low: Bound, high: Bound) -> Expression:
    """Numbers without an exponent."""
    parts, zero = [], (Decimal(0), False)
    if low[0] < 0:
        positive = decimal_between(max((-high[0], high[1]), zero), (-low[0], low[1]))
        parts.append(sequence(text("-"), positive))
    if high[0] >= 0:
        parts.append(decimal_between(max(low, zero), high))
    return choice(*parts)


def decimal_between(low: Bound, high: Bound) -> Expression:
    """From 0 on. Only beside the whole numbers of the bounds do their fractions matter."""
    first, last = int(low[0]), int(high[0])
    if low[0] > high[0]:
        return Choice(())
    room = max(0, EXACT_DIGITS - len(str(last if last < LARGEST else first)))
    low_tail, high_tail = tail_of(low), tail_of(high)
    if first == last:
        return sequence(text(str(first)), fraction(low_tail, high_tail, room))
    parts = [
        sequence(text(str(first)), fraction(low_tail, None, room)),
        sequence(text(str(last)), fraction(None, high_tail, room)),
    ]
    if last - first > 1:
        parts.append(sequence(digits_between(first + 1, last - 1), fraction(None, None, room)))
    return choice(*parts)


def tail_of(bound: Bound) -> Tail:
    """What a bound asks of the digits after the point."""
    return f"{bound[0] % 1:f}"[2:].rstrip("0"), bound[1]


def fraction(low: Tail, high: Tail, room: int) -> Expression:
    """A point and at most `room` digits between two bounds, or nothing if that is between them."""
    some = sequence(text("."), digits_after(low, high, room)) if room else Choice(())
    return choice(EMPTY, some) if may_end(low, high) else some


def may_end(low: Tail, high: Tail) -> bool:
    """Whether zeros for all digits that are left are between the bounds."""
    return low in (None, ("", False)) and high != ("", True)


def digits_after(low: Tail, high: Tail, room: int) -> Expression:
    """One to `room` digits between two bounds."""
    if low is None and high is None:
        return Repeat(DIGIT, 1, room)
    parts, free = [], []
    for digit in "0123456789":
        least, most = first_digit(low), first_digit(high)
        if (low and digit < least) or (high and digit > most):
            continue
        # A digit that is not the bound's decides, so the bound no longer counts.
        next_low = (low[0][1:], low[1]) if low and digit == least else None
        next_high = (high[0][1:], high[1]) if high and digit == most else None
        if next_low is None and next_high is None:
            free.append(digit)
            continue
        rest = digits_after(next_low, next_high, room - 1) if room > 1 else Choice(())
        if may_end(next_low, next_high):
            rest = choice(EMPTY, rest)
        parts.append(sequence(text(digit), rest))
    if free:
        parts.append(sequence(char_in(*free), Repeat(DIGIT, 0, room - 1)))
    return choice(*parts)


def first_digit(tail: Tail) -> str:
    """Of a bound."""
    return tail[0][:1] or "0" if tail else ""


def digits_between(low: int, high: int) -> Expression:
    """The whole numbers from low to high, 0 <= low <= high, without leading zeros."""
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        parts.append(_same_length(str(first), str(min(high, 10**length - 1))))
    return choice(*parts)


def _same_length(low: str, high: str) -> Expression:
    """Digits from low to high, both of one length."""
    rest = len(low) - 1
    if not rest or (not low[1:].strip("0") and not high[1:].strip("9")):
        return Sequence((char_in(low[0] + high[0]), Repeat(DIGIT, rest, rest)))
    if low[0] == high[0]:
        return sequence(text(low[0]), _same_length(low[1:], high[1:]))
    parts = [
        sequence(text(low[0]), _same_length(low[1:], "9" * rest)),
        sequence(text(high[0]), _same_length("0" * rest, high[1:])),
    ]
    if int(high[0]) - int(low[0]) > 1:
        middle = char_in(str(int(low[0]) + 1) + str(int(high[0]) - 1))
        parts.append(Sequence((middle, Repeat(DIGIT, rest, rest))))
    return choice(*parts)
