"""How patches of Triton's interpreter are registered, installed and taken out again.

`make_faithful()` installs all of them. `without(rule)` takes one out: that is how the tests show
that every patch is needed. If a version of Triton moved a function that a patch replaces,
`make_faithful` raises InterpreterMoved, because an interpreter that is silently wrong proves
nothing.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.runtime import interpreter


class InterpreterMoved(RuntimeError):
    """Triton changed a function that a patch replaces. The message names both."""


@dataclass(frozen=True)
class Patch:
    """One function of the interpreter and its replacement."""

    rule: str  # its name
    meaning: str  # what a GPU does
    # class in triton.runtime.interpreter; "" for the module itself
    owner: str
    name: str  # the function that is replaced
    # its parameters, as this patch knows them; "" where Triton has no such function
    parameters: str
    replace: Callable[[Callable], Callable]  # original -> replacement

    def where(self) -> object | None:
        """The object whose attribute the patch replaces; None if Triton no longer has it."""
        return getattr(interpreter, self.owner, None) if self.owner else interpreter


PATCHES: list[Patch] = []
_originals: dict[str, Callable | None] = {}  # rule -> what Triton had there


def mends(owner: str, name: str, parameters: str):
    """Register a function `original -> replacement`: its name is the rule's, its docstring says
    what a GPU does.
    """

    def register(replace):
        PATCHES.append(Patch(replace.__name__, replace.__doc__, owner, name, parameters, replace))
        return replace

    return register


def make_faithful() -> None:
    """Install every patch, once. Raises InterpreterMoved if Triton does not fit, ImportError if it
    was imported too early.
    """
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        raise ImportError(
            "triton was imported before its interpreter was switched on: "
            "put `import lessons` first, or set TRITON_INTERPRET=1"
        )
    for patch in PATCHES:
        _check_fits(patch)
    for patch in PATCHES:
        _install(patch)


def _check_fits(patch: Patch) -> None:
    if patch.rule in _originals:
        return
    found = getattr(patch.where(), patch.name, None)
    actual = " ".join(inspect.signature(found).parameters) if found else ""
    if patch.where() is None or actual != patch.parameters:
        place = f"{patch.owner}.{patch.name}".lstrip(".")
        raise InterpreterMoved(
            f"Triton {triton.__version__} moved {place}: expected parameters ({patch.parameters}), "
            f"found ({actual}). Use triton 3.6 or 3.7, or adapt the patch {patch.rule!r}"
        )


def _install(patch: Patch) -> None:
    if patch.rule not in _originals:
        _originals[patch.rule] = getattr(patch.where(), patch.name, None)
        setattr(patch.where(), patch.name, patch.replace(_originals[patch.rule]))


@contextlib.contextmanager
def without(rule: str) -> Iterator[None]:
    """Run a block with one patch taken out. Raises KeyError for an unknown rule."""
    patch = next((patch for patch in PATCHES if patch.rule == rule), None)
    if patch is None:
        raise KeyError(f"rule {rule!r} is unknown; known: {[patch.rule for patch in PATCHES]}")
    original = _originals.pop(rule)
    if original is None:  # Triton has no such function
        delattr(patch.where(), patch.name)
    else:
        setattr(patch.where(), patch.name, original)
    try:
        yield
    finally:
        _install(patch)
