"""Hints for results that are numbers, lists, dictionaries or sets: see hints.py."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

NEAR = 1e-4  # relative: two values that are the same up to float32's rounding
ROUNDED = 2e-2  # relative: two values that differ as 8 or more bits of mantissa do

UNITS = (
    (1.024, "1000 and 1024"),
    (1.024**2, "MB and MiB"),
    (1.024**3, "GB and GiB"),
    (8.0, "bits and bytes"),
    (1e3, "thousands (ms and s, µs and ms)"),
    (1e6, "millions (µs and s)"),
    (1e9, "10^9 (GB and bytes)"),
)


def hint_of_number(got: float, want: float, numbers: dict[str, float]) -> str | None:
    """A clean factor, one too many, nearly right; None for what only is another number."""
    if not math.isfinite(got) or not math.isfinite(want):
        return "0 / 0, inf - inf or a division by 0" if math.isfinite(want) else None
    if got == want:
        return "the value is right, and its type is not" if type(got) is not type(want) else None
    if got == -want:
        return "your result has the other sign"
    if not want:
        return "0 is expected here: what should not count at all?"
    if isinstance(want, int) and abs(got - want) == 1:
        which = "more" if got > want else "less"
        return (
            f"yours is one {which}: where does the count begin and end, and is a quotient rounded "
            "the right way?"
        )
    if not got:
        return "yours is 0: is anything counted?"
    ratio = got / want
    if name := _named_factor(ratio, numbers):
        return f"yours is {name} the expected value"
    for size, name in UNITS:
        for factor in (size, 1 / size):
            if math.isclose(ratio, factor, rel_tol=1e-4):
                return f"yours is {factor_in_words(ratio, {})} the expected value: {name}?"
    if 0 < want <= 1:
        if math.isclose(got, 1 - want, rel_tol=NEAR):
            return "yours is 1 minus the expected value"
        if not 0 <= got <= 1 and want < 1:
            return "a number between 0 and 1 is expected here"
    if math.isclose(got * want, 1, rel_tol=NEAR):
        return "yours is 1 divided by the expected value"
    if abs(want) >= 16 or not float(want).is_integer():
        if math.isclose(ratio, 1, rel_tol=ROUNDED):
            return "yours is nearly right: a rounding, or a small term that is missing or too many"
        clean = ratio if ratio > 1 else 1 / ratio
        if ratio > 0 and clean <= 1024 and math.isclose(clean, round(clean), rel_tol=1e-6):
            return f"yours is {factor_in_words(ratio, {})} the expected value"
    if not isinstance(want, int):
        return None
    for name, value in numbers.items():
        if (
            abs(value) >= 3
            and list(numbers.values()).count(value) == 1
            and math.isclose(abs(got - want), abs(value), rel_tol=1e-9)
        ):
            return f"yours is {value:g} too {'large' if got > want else 'small'}: {name}?"
    return None


def factor_in_words(ratio: float, numbers: dict[str, float]) -> str:
    if name := _named_factor(ratio, numbers):
        return name
    if 0 < ratio < 1 and math.isclose(1 / ratio, round(1 / ratio), rel_tol=1e-3):
        return f"1/{round(1 / ratio)} of"
    return f"{ratio:.4g} times"


def _named_factor(ratio: float, numbers: dict[str, float]) -> str | None:
    """A factor that is one of the numbers given, or its root: `1/8 of (q.shape[2])`; None if it is
    two of them, because nobody knows which.
    """
    values = list(numbers.values())
    for name, value in numbers.items():
        if value < 3 or values.count(value) > 1:
            continue  # 2 is everywhere
        for size, said in ((value, name), (value**0.5, f"the root of {name}")):
            if size < 3:
                continue
            if math.isclose(ratio, size, rel_tol=1e-5):
                return f"{size:.4g} times ({said}?)"
            if math.isclose(ratio, 1 / size, rel_tol=1e-5):
                return f"1/{size:.4g} of ({said}?)"
    return None


def hint_of_entries(got: Sequence, want: Sequence, numbers: dict[str, float]) -> str | None:
    """Lists and tuples: their length, order, and which of the entries are wrong."""
    if any(isinstance(x, Tensor) for x in (*got, *want)):
        return None
    if isinstance(got, tuple) != isinstance(want, tuple):
        return None  # the entries may be right
    are_ids = all(type(x) is int for x in want)
    got, want = list(got), list(want)
    right = 0
    while right < min(len(got), len(want)) and got[right] == want[right]:
        right += 1
    if len(got) != len(want):
        if not got:
            return "yours is empty"
        if not want:
            return "nothing is expected here: what should not be in yours?"
        if right == len(want):
            return f"yours goes on after the {right} that are asked for, and these are right"
        if right == len(got):
            return f"yours ends too early: {right} of {len(want)}, and these are right"
        return f"the first {right} entries are right" if right else None
    if len(want) > 1 and _same_entries(got, want):
        if got == want[::-1]:
            return "the right entries in another order: reversed"
        return f"the right entries in another order, from entry {right} on"
    integers = len(want) > 1 and all(type(x) is int for x in (*got, *want))
    if integers and len(set(map(int.__sub__, got, want))) == 1:
        return f"each entry is {abs(got[0] - want[0])} too {'large' if got > want else 'small'}"
    wrong = [i for i, (a, b) in enumerate(zip(got, want)) if not _same(a, b)]
    if len(want) > 1 and len(wrong) == 1:
        detail = None if are_ids else _hint_of_entry(got[wrong[0]], want[wrong[0]], numbers)
        if detail and detail.startswith("only entry"):  # which one of it, the message names
            detail = detail.partition(": ")[2]
        where = f"only entry {wrong[0]} is wrong"
        return f"{where}: {detail}" if detail else where
    return None


def _hint_of_entry(got: Any, want: Any, numbers: dict[str, float]) -> str | None:
    if type(got) in (int, float) and type(want) in (int, float):
        return hint_of_number(got, want, numbers)
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)):
        return hint_of_entries(got, want, numbers)
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=NEAR) or (a != a and b != b)
    return a == b


def _same_entries(got: list, want: list) -> bool:
    left = list(want)
    for entry in got:
        if entry not in left:
            return False
        left.remove(entry)
    return True


def hint_of_keys(got: Any, want: Any) -> str | None:
    """Dictionaries and sets: what is missing, what is too many, which value differs."""
    missing, extra = ([k for k in a if k not in b] for a, b in ((want, got), (got, want)))
    said = []
    if missing:
        said.append(f"yours lacks {_few(missing)}")
    if extra:
        said.append(f"yours has {_few(extra)} too many")
    if not said and isinstance(want, dict):
        wrong = [key for key in want if not _same(got[key], want[key])]
        if len(wrong) < len(want):
            said.append(f"only the values of {_few(wrong)} are wrong")
    return "; ".join(said) or None


def _few(keys: list) -> str:
    text = ", ".join(map(repr, keys[:4]))
    return text + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
