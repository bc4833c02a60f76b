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
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lessons.toolbox.proof.traps import Allocations

TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class Check:
    exercise_id: str
    function: Callable
    cases: dict[str, str]  # name -> why it exists; empty: one run without `case`
    seconds: float

    @property
    def name(self) -> str:
        return self.function.__name__.removeprefix("test_")

    def runs(self) -> list[str | None]:
        return list(self.cases) or [None]


def check(
    exercise_id: str, cases: dict[str, str] | None = None, seconds: float = TIME_LIMIT_S
) -> Callable:
    """Make a function one of an exercise's checks, once per case. seconds: its time limit."""

    def mark(function: Callable) -> Callable:
        function.check = Check(exercise_id, function, dict(cases or {}), seconds)
        getattr(pytest.mark, "ex" + exercise_id.replace(".", "_"))(function)
        getattr(pytest.mark, f"lesson{int(exercise_id.split('.')[0]):02d}")(function)
        return pytest.mark.parametrize("case", list(cases))(function) if cases else function

    return mark


def checks_in(module: ModuleType) -> list[Check]:
    """The checks of a test module, in the order of the file."""
    return [
        value.check
        for value in vars(module).values()
        if inspect.isfunction(value) and hasattr(value, "check")
    ]


def require_cuda() -> None:
    """First line of a check that needs a GPU; elsewhere it is NOT RUN, which is never a pass."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


# ---------------------------------------------------------------- calling and comparing


def call(impl: Callable, inputs: dict[str, Any]) -> Any:
    """impl(**inputs), and a failure if it changed one of its arguments."""
    before = tree_map(_kept, inputs)
    got = impl(**inputs)
    for name in inputs:
        changed = f"your function changed its argument `{name}` in place"
        (olds, tree), (news, new_tree) = tree_flatten(before[name]), tree_flatten(inputs[name])
        assert tree == new_tree, (
            f"{changed}: it was {_brief(before[name])}, is {_brief(inputs[name])}"
        )
        for old, new in zip(olds, news):
            if isinstance(old, Tensor):
                assert old.shape == new.shape, (
                    f"{changed}: its shape was {list(old.shape)}, is {list(new.shape)}"
                )
                # NaN is unequal to itself
                count = int(((old != new) & ~((old != old) & (new != new))).sum())
                assert not count, (
                    f"{changed}: {count} of {old.numel()} elements; the caller still needs it"
                )
            else:
                assert old is new or old == new, (
                    f"{changed}: it was {_brief(old)}, is {_brief(new)}"
                )
    return got


def _kept(x: Any) -> Any:
    return (
        x.clone()
        if isinstance(x, Tensor)
        else copy.copy(x)
        if isinstance(x, (set, bytearray))
        else x
    )


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
    """Kind first, then shape, dtype, values. A list or a number must be equal (floats: within the
    tolerance).
    """
    if isinstance(want, Tensor):
        return assert_close(got, want, atol=atol, rtol=rtol, dtype=dtype, label=label)
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        for at, (a, b) in enumerate(zip(got, want)):
            assert_equal(a, b, atol=atol, rtol=rtol, dtype=dtype, label=f"{label}[{at}]")
        assert len(got) == len(want), (
            f"{label} has {len(got)} entries, expected {len(want)}: {_brief(got)}, not "
            f"{_brief(want)}"
        )
    elif isinstance(want, float) and isinstance(got, (int, float)):
        assert abs(got - want) <= _factor * (atol + rtol * abs(want)), (
            f"{label} is {got:.8g}, expected {want:.8g} (tolerance {atol + rtol * abs(want):.3g})"
        )
    else:
        kind = (
            ""
            if type(got) is type(want)
            else f" ({type(got).__name__}, expected {type(want).__name__})"
        )
        kind = " (is a `return` missing?)" if got is None and want is not None else kind
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
    """|got - want| <= atol + rtol |want| everywhere; NaN fails. The message names the worst
    element, both values, the count.
    """
    assert isinstance(got, Tensor), (
        f"{label} is {type(got).__name__}, expected a tensor of shape {list(want.shape)}"
        + (" (is a `return` missing?)" if got is None else "")
    )
    assert got.shape == want.shape, (
        f"{label} has shape {list(got.shape)}, expected {list(want.shape)}"
    )
    dtype = dtype or want.dtype
    assert got.dtype == dtype, f"{label} is {_name(got.dtype)}, expected {_name(dtype)}"
    exact, tolerance = want.double(), atol + rtol * want.double().abs()
    error = torch.where(got.double() == exact, 0.0, (got.double() - exact).abs()).nan_to_num(
        nan=torch.inf
    )
    wrong = error > tolerance * _factor
    if wrong.any():
        worst = (error / tolerance.clamp(min=1e-300)).argmax()
        at = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
        raise AssertionError(
            f"{label}: worst element {list(at)}: yours {got[at].item():.6g}, expected "
            f"{want[at].item():.6g} "
            f"(tolerance {tolerance[at].item():.2g}); {int(wrong.sum())} of {wrong.numel()} wrong"
        )


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


def alike(a: Any, b: Any) -> bool:
    """Whether two recorded results are the same up to rounding, NaN included: how a known wrong
    answer is recognised.
    """
    (leaves_a, tree_a), (leaves_b, tree_b) = tree_flatten(a), tree_flatten(b)
    return tree_a == tree_b and all(map(_alike_leaves, leaves_a, leaves_b))


def comparable(results: Any) -> bool:
    """Whether `alike` can judge them."""
    return all(
        isinstance(x, (Tensor, float, int, str, type(None))) for x in tree_flatten(results)[0]
    )


def _alike_leaves(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and torch.allclose(
            a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True
        )
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= 1e-9 * abs(b)
    return type(a) is type(b) and isinstance(a, (int, str, bool, type(None))) and a == b


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
