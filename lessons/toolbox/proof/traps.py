"""Traps for a kernel that only looks right: poison, canaries, and a count of what it allocates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NotEquivalent(AssertionError):
    """An optimized function broke a rule. `rule` is its short name: "E0" … "E3", "exact", "shape",
    "dtype", "inputs", "deterministic" or "canary"."""

    def __init__(self, rule: str, message: str):
        super().__init__(f"{rule}: {message}")
        self.rule = rule


# ---------------------------------------------------------------- poison and canaries


def poison_(x: Tensor) -> Tensor:
    """Fill x: [...] with what no honest result contains: NaN, 2^30 (or the largest value of a
    smaller integer), True.
    """
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x.fill_(float("nan"))
    return x.fill_(True if x.dtype == torch.bool else min(2**30, torch.iinfo(x.dtype).max))


def poisoned(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tensor:
    """A tensor [*shape] in which an unwritten or wrongly read element shows. Read as an index, 2^30
    is out of every bound.
    """
    return poison_(torch.empty(tuple(shape), dtype=dtype, device=device))


class poisoned_empty(TorchDispatchMode):
    """Within it `torch.empty` and its family return poison, so that a kernel which leaves rows
    unwritten is caught.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        return poison_(out) if name.startswith(("aten::empty", "aten::new_empty")) else out


CANARY = 0xA5  # a byte pattern rather than NaN, because a kernel may well write NaN


class Canaries:
    """A poisoned tensor inside a larger buffer of canaries; `check()` finds what was written beside
    it.

    tensor: `shape`, with `row_padding` canary elements after every row and `guard` elements before
    and behind.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        guard: int = 256,
        row_padding: int = 0,
    ):
        shape, strides = tuple(shape), []
        span = 1
        for index, size in enumerate(reversed(shape)):
            strides.append(span)
            span = span * size + (row_padding if index == 0 else 0)
        self.guard, elements = guard, span + 2 * guard
        self._bytes = torch.full(
            (elements, dtype.itemsize), CANARY, dtype=torch.uint8, device=device
        )
        layout = shape, tuple(reversed(strides)), guard
        self.tensor = poison_(self._bytes.view(-1).view(dtype).as_strided(*layout))
        self._outside = torch.ones(elements, dtype=torch.bool, device=device)
        self._outside.as_strided(*layout).fill_(False)
        self.last = elements - guard - 1 - row_padding if shape else guard

    def check(self) -> None:
        """Raise NotEquivalent("canary") if an element outside the tensor was written."""
        hit = ((self._bytes != CANARY).any(-1) & self._outside).nonzero().view(-1)
        if len(hit):
            at = int(hit[0])
            where = (
                f"{self.guard - at} before its start"
                if at < self.guard
                else f"{at - self.last} behind its end"
                if at > self.last
                else "in the padding of a row"
            )
            raise NotEquivalent(
                "canary",
                f"{len(hit)} elements outside the tensor {list(self.tensor.shape)} were written; "
                f"first {where} (element {at - self.guard} counted from its start)",
            )


def with_canaries(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    guard: int = 256,
    row_padding: int = 0,
) -> tuple[Tensor, Callable[[], None]]:
    """A guarded, poisoned tensor [*shape] and the function that checks its surroundings: `out,
    check = with_canaries((3, 5))`.
    """
    canaries = Canaries(shape, dtype, device, guard, row_padding)
    return canaries.tensor, canaries.check


@contextmanager
def guarded_empty() -> Iterator[list[Callable[[], None]]]:
    """Within it `torch.empty` returns poison between canaries. Yields the list of their checks,
    one for each tensor, and makes all of them at its end.
    """
    checks = []

    def guarded(*shape, dtype, device):
        tensor, check = with_canaries(shape, dtype, device, guard=4096)
        checks.append(check)
        return tensor

    with mock.patch.object(torch, "empty", guarded):
        yield checks
    for check in checks:
        check()


# ---------------------------------------------------------------- counting


class Allocations(TorchDispatchMode):
    """Counts the tensors that the Python code inside it creates (views and in-place results create
    none).

    largest_elements, largest_shape: the biggest new tensor; bytes_allocated: the sum over all new
    tensors. Scratch memory inside a single torch operation is not seen.
    """

    def __init__(self):
        super().__init__()
        self.largest_elements, self.largest_shape, self.bytes_allocated = 0, (), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        for x in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            if (storage := x.untyped_storage())._cdata in seen:
                continue
            seen.add(storage._cdata)
            self.bytes_allocated += storage.nbytes()
            # not numel(), because an expanded view owns less than it shows
            elements = storage.nbytes() // x.itemsize
            if elements > self.largest_elements:
                self.largest_elements, self.largest_shape = elements, tuple(x.shape)
        return out
