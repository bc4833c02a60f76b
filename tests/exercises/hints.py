"""What a wrong result looks like, for answers that no registered slip explains.

A hint of this file says what is so: which part of the result is wrong, by which factor, in which
order. It is found by looking at the result and at what was expected, so it cannot be false; what
follows a colon is a question about the cause, for the learner to answer. None where nothing stands
out, because a sentence that fits everything helps nobody.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.exercises.hint_numbers import (
    NEAR,
    ROUNDED,
    factor_in_words,
    hint_of_entries,
    hint_of_keys,
    hint_of_number,
)
from tests.exercises.hint_rules import hint_of_dtype, hint_of_message

MOST_ROWS = 64  # of a dimension whose rows are compared with each other


def hint_of_failure(
    message: str, comparing: Sequence[tuple[Any, Any]], numbers: dict[str, float]
) -> str | None:
    """A hint for a failed check, by its message and by what it was comparing: the pairs (got,
    want), the outermost first; no pairs if it failed at a rule of its own. numbers: what the
    function was given, by name, because a factor too many is often one of them.
    """
    if hint := hint_of_dtype(message):
        return hint
    for got, want in comparing:
        if hint := _hint_of(got, want, numbers):
            return hint
        if isinstance(want, list) and all(type(x) is int for x in want):
            break  # ids or counts, so one more may be another one
    return hint_of_message(message)


def _hint_of(got: Any, want: Any, numbers: dict[str, float]) -> str | None:
    if isinstance(want, Tensor):
        return hint_of_tensor(got, want, numbers) if isinstance(got, Tensor) else None
    if isinstance(want, (dict, set, frozenset)) and type(got) is type(want):
        return hint_of_keys(got, want)
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        return hint_of_entries(got, want, numbers)
    if isinstance(want, bool) or isinstance(got, bool):
        return None
    if isinstance(want, (int, float)) and isinstance(got, (int, float)):
        return hint_of_number(got, want, numbers)
    return None


# ---------------------------------------------------------------- tensors


def hint_of_tensor(got: Tensor, want: Tensor, numbers: dict[str, float]) -> str | None:
    """got, want: [...], of any dtypes and shapes."""
    if got.shape != want.shape:
        return _hint_of_shape(list(got.shape), list(want.shape))
    if not want.numel():
        return None
    mine, exact = got.double(), want.double()
    wrong = ~_near(mine, exact)
    if not wrong.any():
        beside = (exact == 0) & (mine != 0)
        others = (mine - exact).abs() <= 1e-6 * exact.abs()  # float32's own roundings
        if beside.any() and bool((others | (mine == exact))[~beside].all()):
            return f"0 itself is expected {_where(beside) or 'there'}, and yours is only near it"
        return "the values are right up to a rounding: in which dtype is each step computed?"
    if want.dtype == torch.bool:
        return _hint_of_bools(got, want)
    looks = (_sums, _order, _place, _rounding, _direction)
    if not want.is_floating_point():  # ids and codes: one more is another one, not a larger one
        looks = _order, _place
    elif hint := _not_finite(mine, exact) or _constant(mine, exact, numbers):
        return hint
    for look in looks:
        if hint := look(mine, exact, wrong):
            return hint
    return None


def _near(a: Tensor, b: Tensor, relative: float = NEAR) -> Tensor:
    return (a == b) | b.isfinite() & ((a - b).abs() <= relative * (b.abs() + 1e-2 * _typical(b)))


def _typical(x: Tensor) -> float:
    """A size that values of x have, so that values near 0 are not compared to themselves."""
    finite = x[x.isfinite()].abs()
    return float(finite.mean()) if len(finite) else 0.0


def _hint_of_shape(got: list[int], want: list[int]) -> str | None:
    if sorted(got) == sorted(want):
        return "the right dimensions in another order: permute or transpose them"
    if [n for n in got if n != 1] == [n for n in want if n != 1]:
        what = "one dimension of size 1 too many" if len(got) > len(want) else "a size 1 is missing"
        return f"{what}: see keepdim=, squeeze and unsqueeze"
    if math.prod(got) == math.prod(want):
        return "the right number of elements in another shape: which dimensions belong together?"
    if len(got) != len(want):
        return f"it has {len(got)} dimensions where {len(want)} are asked for: what was summed up?"
    differ = [d for d, (a, b) in enumerate(zip(got, want)) if a != b]
    if len(differ) == 1:
        (d,) = differ
        return f"dimension {d} has {got[d]} entries and needs {want[d]}: what is counted there?"
    return None


def _not_finite(mine: Tensor, exact: Tensor) -> str | None:
    if (nan := mine.isnan()).any():
        return (
            f"NaN {_where(nan) or 'everywhere'}: it comes from 0 / 0, inf / inf, inf - inf, or "
            "from memory that was read although it holds no value"
        )
    if (missed := exact.isinf() & ~mine.isinf()).any():
        return f"yours is a number where an infinity is expected, {_where(missed) or 'everywhere'}"
    if (extra := mine.isinf() & ~exact.isinf()).any():
        return f"infinity {_where(extra) or 'everywhere'}: a division by 0, an overflow, or a mask"
    return None


def _constant(mine: Tensor, exact: Tensor, numbers: dict[str, float]) -> str | None:
    """One factor or one difference for all, or one value everywhere."""
    finite = exact.isfinite() & mine.isfinite()
    a, b = mine[finite], exact[finite]
    if len(a) < 3 or bool((b == b[0]).all()):
        return None
    if not a.any():
        return "your result is 0 everywhere: is what you computed stored, or added to it?"
    if bool((a == a[0]).all()):
        return f"your result is {a[0].item():.4g} everywhere"
    large = b.abs() > 1e-3 * b.abs().max()
    ratio = float((a[large] / b[large]).median())
    if ratio and bool(_near(a, ratio * b).all()) and abs(ratio - 1) > 1e-3:
        if abs(ratio + 1) < 1e-3:
            return "your result has the other sign everywhere"
        return f"your result is {factor_in_words(ratio, numbers)} the expected one, everywhere"
    apart = float((a - b).median())
    rounding = NEAR * float(b.abs().max().clamp(min=abs(apart)))
    if abs(apart) > 2 * rounding and bool(((a - b - apart).abs() <= rounding).all()):
        return f"your result is {abs(apart):.4g} too {'large' if apart > 0 else 'small'} everywhere"
    return None


def _order(mine: Tensor, exact: Tensor, wrong: Tensor) -> str | None:
    """The right values in wrong places."""
    dims = [d for d, size in enumerate(exact.shape) if 2 <= size <= MOST_ROWS]
    for i in dims:
        for j in range(i + 1, exact.dim()):
            if exact.shape[i] == exact.shape[j] and _near(mine.transpose(i, j), exact).all():
                return f"your result is right when dimensions {i} and {j} are swapped"
    for d in dims:
        a, b = (x.movedim(d, 0).reshape(exact.shape[d], -1) for x in (mine, exact))
        if a.numel() * len(b) > 10**7:
            continue
        same = torch.stack([_near(row, b).all(1) for row in a])  # [mine, expected]
        amiss = ~same.diagonal()
        if amiss.any() and bool(((same.sum(0) == 1) & (same.sum(1) == 1)).all()):
            i = int(amiss.nonzero()[0])
            j = int(same[i].nonzero()[0])
            return (
                f"right values at wrong places: index {i} of dimension {d} holds what belongs at "
                f"index {j}"
            )
    return None


def _sums(mine: Tensor, exact: Tensor, wrong: Tensor) -> str | None:
    """Rows of probabilities."""
    if exact.dim() and exact.shape[-1] > 1 and bool((exact >= 0).all()):
        sums, right = mine.sum(-1), exact.sum(-1)
        if bool(((right - 1).abs() < NEAR).all()) and not bool(((sums - 1).abs() < 1e-3).all()):
            worst = sums.flatten()[int((sums - 1).abs().argmax())]
            return f"each row should sum to 1, and one of yours sums to {worst.item():.4g}"
    return None


def _place(mine: Tensor, exact: Tensor, wrong: Tensor) -> str | None:
    where = _where(wrong)
    if where is None:
        return None
    zero = "yours is 0 there; " if not mine[wrong].any() else ""
    return f"wrong only {where}: {zero}what is different there?"


def _where(marked: Tensor) -> str | None:
    """In words, which part of a tensor is marked: by up to two dimensions; None if that is all or
    no pattern.
    """
    if marked.sum() == 1 and marked.numel() > 1:
        return f"at element {[int(i) for i in marked.nonzero()[0]]}"
    found = []
    for d, size in enumerate(marked.shape):
        others = [other for other in range(marked.dim()) if other != d]
        here = marked.any(dim=others) if others else marked
        at = here.nonzero().flatten().tolist()
        if len(at) < size and (words := _indices(at, size)):
            found.append((words, d))
    if len(found) > 1:
        (one, d), (other, e) = found[:2]
        return f"{one} of dimension {d} and {other} of dimension {e}"
    return f"{found[0][0]} of dimension {found[0][1]}" if found else None


def _indices(at: list[int], size: int) -> str | None:
    low, high = at[0], at[-1]
    if len(at) == 1:
        return "at the last index" if low == size - 1 else f"at index {low}"
    if len(at) == high - low + 1:
        return f"from index {low} on" if high == size - 1 else f"at indices {low} to {high}"
    return f"at indices {', '.join(map(str, at))}" if len(at) <= 4 else None


def _rounding(mine: Tensor, exact: Tensor, wrong: Tensor) -> str | None:
    if bool(_near(mine, exact, ROUNDED).all()):
        return (
            "every value is nearly right: a step that rounds (in which dtype?), or a small term "
            "that is missing"
        )
    return None


def _direction(mine: Tensor, exact: Tensor, wrong: Tensor) -> str | None:
    apart = (mine - exact)[wrong]
    if len(apart) >= 4:
        if bool((apart > 0).all()):
            return "each value that is wrong is too large, none is too small"
        if bool((apart < 0).all()):
            return "each value that is wrong is too small, none is too large"
    return None


def _hint_of_bools(got: Tensor, want: Tensor) -> str | None:
    more, fewer = int((got & ~want).sum()), int((want & ~got).sum())
    place = _where(got != want)
    at = f" ({place})" if place else ""
    if more and not fewer:
        return f"yours allows {more} too many, and forbids none too many{at}"
    if fewer and not more:
        return f"yours forbids {fewer} too many, and allows none too many{at}"
    return f"yours is the opposite of what is expected{at}" if (got ^ want).all() else None
