"""Numbers between bounds, digit by digit.

Where a bound is strict or has a fraction, a text must not round to the other side of it: a float64
tells all numbers of 15 digits apart, so a bounded number has no more than that near its bounds.
"""

from decimal import Decimal

from lessons.l24_structured_outputs.automata.nfa import TooLarge
from lessons.l24_structured_outputs.languages.json_text import DIGIT, MOST_DIGITS
from lessons.l24_structured_outputs.languages.syntax import (
    EMPTY,
    Choice,
    Expression,
    Machine,
    Repeat,
    Sequence,
    char_in,
    choice,
    sequence,
    text,
)

LARGEST = 10**MOST_DIGITS - 1
EXACT_DIGITS = 15  # that a float64 always keeps
FRACTION_DIGITS = 7  # of multiples, which have no more than EXACT_DIGITS in all
MOST_REMAINDERS = 1000
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


def multiples(step: int | float) -> Machine:
    """Numbers without an exponent that are whole multiples of a step, in decimal digits: 0.07 is
    one of 0.01. Raises TooLarge.

    With a step of m / 10^k, the state is the remainder by m of the digits so far. After f digits
    of the fraction, a number is a multiple if the remainder would be 0 after k - f more zeros; from
    digit k on, only zeros may follow.
    """
    exact = Decimal(repr(step)).normalize()
    places = max(0, -exact.as_tuple().exponent)
    divisor = int(exact.scaleb(places))
    if divisor * (places + 1) > MOST_REMAINDERS or places > FRACTION_DIGITS:
        raise TooLarge

    def state_of(f: int, remainder: int) -> int:
        """f: -1 before the point. States 0 and 1 are before the first digit and after a minus."""
        return 2 + (f + 1) * divisor + remainder

    def digits(f: int, remainder: int) -> list[tuple[int, int, int]]:
        if f == places:
            return [(48, 48, state_of(f, remainder))]
        after = f if f < 0 else f + 1
        return [
            (48 + d, 48 + d, state_of(after, (10 * remainder + d) % divisor)) for d in range(10)
        ]

    edges = [((45, 45, 1), *digits(-1, 0)), tuple(digits(-1, 0))]
    is_final = [False, False]
    for f in range(-1, places + 1):
        for remainder in range(divisor):
            point = [(46, 46, state_of(0, remainder))] if f < 0 else []
            edges.append((*point, *digits(f, remainder)))
            is_final.append(remainder * 10 ** (places - max(f, 0)) % divisor == 0)
    return Machine(tuple(edges), tuple(is_final))
