"""What a provider of a benchmark is made of: what it needs, and what became of it."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Unavailable(Exception):
    """Raised by a provider's make_fn where it cannot run; its one line is the recorded reason."""


def on_gpu(make: Callable) -> Callable:
    """A provider that is only timed on a GPU."""

    @functools.wraps(make)
    def checked(*inputs):
        if not any(isinstance(i, torch.Tensor) and i.is_cuda for i in inputs):
            raise Unavailable("needs a GPU: the interpreter's speed says nothing about a kernel")
        return make(*inputs)

    return checked


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Around a provider's import of a package that may not be installed."""
    try:
        yield
    except ImportError:
        raise Unavailable(f"needs {package}") from None


def compiled(function: Callable) -> Callable:
    """A provider: what torch.compile makes of a function, for one size at a time. It must not
    change its inputs, because it runs once before.
    """

    def make(*inputs):
        # else the ninth size falls back to eager PyTorch, and would be timed under this name
        torch.compiler.reset()
        fast = torch.compile(function, dynamic=False)
        try:
            fast(*inputs)
        except Exception as error:
            # any failure of the compiler's, which needs a C++ compiler on a CPU, means: not here
            first = str(error).splitlines()[0]
            raise Unavailable(f"torch.compile: {type(error).__name__}: {first}") from None
        return lambda: fast(*inputs)

    return make


def failure(error: Exception) -> dict:
    """How an exception is recorded. PyTorch's CPU allocator raises a plain RuntimeError, so the
    words decide.
    """
    status, reason = "failed", f"{type(error).__name__}: {error}"
    if isinstance(error, Unavailable):
        status, reason = "not run", str(error)
    elif re.search("out of memory|can't allocate memory|MemoryError", reason):
        status, reason = "out of memory", str(error)
    return {"status": status, "reason": reason.split("\n")[0][:300]}


def disagreement(output, truth, tolerance: float) -> str:
    """Why `output` is not `truth`, in one line; "" if it is. Tensors [...]: relative errors,
    computed on their device; anything else: equality.
    """
    if output is None or truth is None:
        return "a provider returned None; accepted: its output, so that it can be compared"
    if not isinstance(output, torch.Tensor):
        return "" if output == truth else "outputs differ"
    if output.shape != truth.shape:
        return f"shape {list(output.shape)}, not {list(truth.shape)}"
    # integers fit into float64, 16 bits into float32
    wide = torch.promote_types(truth.dtype, torch.float32)
    wide = wide if truth.is_floating_point() else torch.float64
    got, want = output.to(truth.device, wide), truth.to(wide)
    # Infinities are equal to themselves, and NaN is equal to nothing.
    difference, size = torch.where(got == want, 0, got - want), want.nan_to_num(0, 0, 0)
    tiny = torch.finfo(wide).tiny
    error = float(difference.norm() / size.norm().clamp_min(tiny))
    worst = float(difference.abs().max() / size.abs().max().clamp_min(tiny))
    # the second rule: one wrong row of many hardly moves the norm
    if error <= tolerance and worst <= 10 * tolerance:
        return ""
    return f"relative error {error:.1e}, worst element {worst:.1e}, tolerance {tolerance:.1e}"
