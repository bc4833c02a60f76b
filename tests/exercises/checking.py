"""What the checks of an exercise are made of. tests/exercises/test_l02.py is the example to copy.

    @check("2.1", cases={"square": "as many queries as keys", "one_query": "decoding"})
    def test_values(impl, case, seed):
        inputs = ...
        compare(impl, inputs, want=oracle(**inputs), atol=1e-5)

A check is a plain function of `impl` (the learner's function), `seed` (a number for its random
inputs) and, if it has cases, `case`. It raises AssertionError with a message for the learner. It
uses no fixture, because the kill matrix calls it too.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lessons.toolbox.proof.traps import Allocations, poisoned

TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class Check:
    """One check of an exercise, on one of its cases."""

    exercise_id: str
    function: Callable
    seconds: float  # its time limit
    case: str | None  # None: a check without cases
    why: str  # the case exists

    @property
    def name(self) -> str:
        case = f"[{self.case}]" if self.case else ""
        return self.function.__name__.removeprefix("test_") + case

    @property
    def label(self) -> str:
        return f"{self.name}, {self.why}" if self.why else self.name

    def __call__(self, impl: Callable, seed: int) -> None:
        case = {"case": self.case} if self.case else {}
        self.function(impl, seed=seed, **case)


def check(
    exercise_id: str, cases: dict[str, str] | None = None, seconds: float = TIME_LIMIT_S
) -> Callable:
    """Make a function one of an exercise's checks, once per case: {name: why it exists}. seconds:
    its time limit.
    """

    def mark(function: Callable) -> Callable:
        function.checks = {
            case: Check(exercise_id, function, seconds, case, why)
            for case, why in (cases or {None: ""}).items()
        }
        getattr(pytest.mark, "ex" + exercise_id.replace(".", "_"))(function)
        return pytest.mark.parametrize("case", list(cases))(function) if cases else function

    return mark


# ---------------------------------------------------------------- what a check saw

# What the implementation returned and what was compared, since the check began: by this a known
# wrong answer is recognised.
seen: list[Any] = []


# What is being compared right now, the outermost first: pairs (yours, expected). Of a comparison
# that failed they stay, for the hints of hints.py.
comparing: list[tuple[Any, Any]] = []


def note(result: Any) -> Any:
    """Remember a result, tensors as copies; an object of a class by its type alone."""
    seen.append(tree_map(_snapshot, _plain(result)))
    return result


def _plain(x: Any) -> Any:
    """Named tuples as tuples, because each file of exercises or answers has classes of its own."""
    if isinstance(x, (tuple, list)):
        kind = tuple if isinstance(x, tuple) else list
        return kind(map(_plain, x))
    return {key: _plain(value) for key, value in x.items()} if type(x) is dict else x


def _snapshot(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, float):
        return float(x)  # NumPy's, too
    return x if isinstance(x, (int, float, str, type(None))) else "an object"


def alike(a: Any, b: Any) -> bool:
    """Whether two results are the same up to rounding; NaN equals NaN, integers are exact."""
    (leaves_a, tree_a), (leaves_b, tree_b) = tree_flatten(a), tree_flatten(b)
    return tree_a == tree_b and all(map(_alike_leaves, leaves_a, leaves_b))


def _alike_leaves(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        if a.is_floating_point() and a.itemsize == 1:  # float8 can only be converted
            a, b = a.float(), b.float()
        exact = not a.is_floating_point()
        return torch.equal(a, b) if exact else torch.allclose(a, b, 1e-4, 1e-6, equal_nan=True)
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-9) or (a != a and b != b)
    return a == b


# ---------------------------------------------------------------- calling and comparing


@contextmanager
def unspoiled(inputs: dict[str, Any]) -> Iterator[None]:
    """Afterwards the tensors in `inputs` hold what they held, because checks share their inputs:
    an answer that writes into one must not spoil the next check.
    """
    leaves = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]
    before = [x.clone() for x in leaves]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, old in zip(leaves, before):
                if x.shape == old.shape and x.dtype == old.dtype and 0 not in x.stride():
                    x.copy_(old)


def call(impl: Callable, inputs: dict[str, Any]) -> Any:
    """impl(**inputs), and a failure if it changed one of its arguments, which get their values
    back.
    """
    with unspoiled(inputs):
        return _call(impl, inputs)


def _call(impl: Callable, inputs: dict[str, Any]) -> Any:
    before = tree_map(_kept, inputs)
    got = impl(**inputs)
    for name, value in inputs.items():
        changed = f"your function changed its argument `{name}` in place"
        (olds, tree), (news, new_tree) = tree_flatten(before[name]), tree_flatten(value)
        was = f"{changed}: it was {_brief(before[name])}, is {_brief(value)}"
        assert tree == new_tree, was
        for old, new in zip(olds, news):
            if not isinstance(old, Tensor):
                assert old is new or old == new, was
                continue
            for what in ("shape", "dtype"):
                a, b = getattr(old, what), getattr(new, what)
                assert a == b, f"{changed}: its {what} was {_name(a)}, is {_name(b)}"
            # NaN is unequal to itself
            count = int(((old != new) & ~((old != old) & (new != new))).sum())
            assert not count, (
                f"{changed}: {count} of {old.numel()} elements; the caller still needs it"
            )
    return got


def _kept(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone()
    return copy.copy(x) if isinstance(x, (set, bytearray)) else x


def compare(
    impl: Callable,
    inputs: dict[str, Any],
    want: Any,
    *,
    atol: float = 1e-5,
    rtol: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Call and hold the result against `want`, which may be wider (float64). dtype: of the result,
    default that of `want`.
    """
    assert_equal(call(impl, inputs), want, atol=atol, rtol=rtol, dtype=dtype)


def assert_equal(
    got: Any,
    want: Any,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    dtype: torch.dtype | None = None,
    label: str = "your result",
) -> None:
    """Kind first, then shape, dtype, values. A list, a tuple or a number must be equal (floats:
    within the tolerance).
    """
    if isinstance(want, Tensor):
        return assert_close(got, want, atol=atol, rtol=rtol, dtype=dtype, label=label)
    comparing.append((got, want))
    _assert_same(got, want, atol=atol, rtol=rtol, dtype=dtype, label=label)
    comparing.pop()


def assert_entries(
    got: Sequence, want: Sequence, labels: Sequence[str], *, atol: float = 0.0, rtol: float = 0.0
) -> None:
    """Each entry of a result against its own of `want`, by its label; a hint may see the whole, as
    where the entries are right and in another order.
    """
    comparing.append((got, want))
    for label, mine, right in zip(labels, got, want):
        assert_equal(mine, right, atol=atol, rtol=rtol, label=label)
    comparing.pop()


def _assert_same(got: Any, want: Any, *, atol, rtol, dtype, label) -> None:
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        kind, right = ("tuple" if isinstance(x, tuple) else "list" for x in (got, want))
        assert kind == right, f"{label} is a {kind} of {len(got)} ({kind}, expected {right})"
        for at, (a, b) in enumerate(zip(got, want)):
            assert_equal(a, b, atol=atol, rtol=rtol, dtype=dtype, label=f"{label}[{at}]")
        both = f"{_brief(got)}, not {_brief(want)}"
        assert len(got) == len(want), (
            f"{label} has {len(got)} entries, expected {len(want)}: {both}"
        )
        return
    note(got)
    if isinstance(want, float) and isinstance(got, (int, float)):
        tolerance = atol + rtol * abs(want) if math.isfinite(want) else 0.0
        assert got == want or abs(got - want) <= _factor * tolerance, (
            f"{label} is {got:.8g}, expected {want:.8g} (tolerance {tolerance:.3g})"
        )
        return
    kind = ""
    if got is None and want is not None:
        kind = " (is a `return` missing?)"
    elif type(got) is not type(want):
        kind = f" ({type(got).__name__}, expected {type(want).__name__})"
    assert not kind and got == want, f"{label} is {_brief(got)}, expected {_brief(want)}{kind}"


def assert_close(
    got: Tensor,
    want: Tensor,
    *,
    atol: float,
    rtol: float = 0.0,
    dtype: torch.dtype | None = None,
    label: str = "your result",
) -> None:
    """|got - want| <= atol + rtol |want| everywhere; where `want` is infinite, the same infinity;
    NaN never passes. The message names the worst element, both values, the count.
    """
    comparing.append((note(got), want))
    missing = " (is a `return` missing?)" if got is None else ""
    assert isinstance(got, Tensor), (
        f"{label} is {type(got).__name__}, expected a tensor of shape {list(want.shape)}{missing}"
    )
    assert got.shape == want.shape, (
        f"{label} has shape {_name(got.shape)}, expected {_name(want.shape)}"
    )
    dtype = dtype or want.dtype
    assert got.dtype == dtype, f"{label} is {_name(got.dtype)}, expected {_name(dtype)}"
    mine, exact = got.double(), want.double()
    tolerance = torch.where(exact.isfinite(), atol + rtol * exact.abs(), 0.0)
    error = (mine - exact).abs()
    wrong = ~((mine == exact) | (error <= tolerance * _factor))  # comparing NaN gives false
    if wrong.any():
        # NaN counts as the largest
        worst = torch.where(wrong, error / tolerance.clamp(min=1e-300), -1.0).argmax()
        # NumPy's: torch.unravel_index imports SymPy first, which takes seconds of the time limit
        at = tuple(int(i) for i in np.unravel_index(int(worst), error.shape))
        raise AssertionError(
            f"{label}: worst element {list(at)}: yours {got[at].item():.6g}, expected "
            f"{want[at].item():.6g} (tolerance {tolerance[at].item():.2g}); {int(wrong.sum())} of "
            f"{wrong.numel()} wrong"
        )
    comparing.pop()


def assert_largest_tensor(elements: int, because: str, function: Callable, *args, **kwargs) -> Any:
    """Call; fail if a new tensor of `elements` or more was created on the way (kernels' own scratch
    memory is not seen).
    """
    with Allocations() as allocations:
        result = function(*args, **kwargs)
    largest = allocations.largest_elements
    assert largest < elements, (
        f"your function created a tensor of {largest} elements, {list(allocations.largest_shape)}; "
        f"fewer than {elements} are enough: {because}"
    )
    return result


def assert_same_work(because: str, few: Callable[[], Any], many: Callable[[], Any]) -> None:
    """Fail if `many` takes more torch operations than `few`: a Python loop over the elements."""
    counts = []
    for function in (few, many):
        with Operations() as operations:
            function()
        counts.append(operations.count)
    assert counts[1] <= counts[0], (
        f"your function runs {counts[0]} torch operations, and {counts[1]} {because}: is there a "
        "Python loop?"
    )


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def in_wider_memory(x: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor, NaN (or 2^30) around it; a vector is a
    column.
    """
    if x.dim() == 1:
        return poisoned((len(x), 3), x.dtype, x.device)[:, 1].copy_(x)
    *outer, rows, columns = x.shape
    wide = poisoned((*outer, rows + 3, columns + 3), x.dtype, x.device)
    return wide[..., 1:-2, 1:-2].copy_(x)


@contextmanager
def tolerances_times(factor: float) -> Iterator[None]:
    """Within it every tolerance counts `factor` times: below 1 shows that a right answer passes
    with slack.
    """
    global _factor
    before, _factor = _factor, factor
    try:
        yield
    finally:
        _factor = before


_factor = 1.0


def _name(x: torch.dtype | torch.Size) -> str:
    return str(list(x)) if isinstance(x, torch.Size) else str(x).removeprefix("torch.")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def compare_ranks(got: Any, want: Sequence[Tensor], atol: float = 1e-5) -> None:
    """A list with what each rank should have: a tensor for each of want."""
    note(got)
    assert isinstance(got, list) and len(got) == len(want), (
        f"your result is a {type(got).__name__}, expected a list with a tensor for each of "
        f"{len(want)} ranks"
    )
    for rank, (mine, right) in enumerate(zip(got, want)):
        label = f"the result of rank {rank}"
        assert_close(mine, right, atol=atol, dtype=torch.float32, label=label)
