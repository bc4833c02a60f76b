"""Work of Triton's interpreter that leaves no trace, spared.

Before a kernel runs, the interpreter replaces the functions of `triton.language` by its own, for
which it looks at every name there; and it does the same again for each call of a function inside
the kernel, where all are replaced already. For each sum, difference and product of integers it
computes whether it overflows, and then forgets the answer, because that is only asserted in its
debug mode, which is always off. For each operation it builds the same table of NumPy's types.

None of this changes what a kernel computes. `spare()` is called once, before any kernel runs.
"""

import dataclasses
import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

FUNCTIONS = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)


def spare() -> None:
    """Take out what is done in vain, once."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if not hasattr(interpreter._patch_builtin, "__wrapped__"):
        interpreter._patch_builtin = _without_search(interpreter._patch_builtin)
        interpreter._get_np_dtype = _from_a_table(interpreter._get_np_dtype)
        function = interpreter.InterpretedFunction
        function.__call__ = _within_a_kernel(function.__call__)


def _without_search(original):
    """_patch_builtin that knows which names of triton.language are functions of a kernel."""
    names = {
        place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
        for place in FUNCTIONS
    }

    @functools.wraps(original)
    def _patch_builtin(place, builder, scope):
        if place not in names:
            return original(place, builder, scope)
        for name in names[place]:
            member = getattr(place, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, builder, scope)

    return _patch_builtin


def _from_a_table(original):
    """_get_np_dtype that asks once for each type of numbers."""
    table = {}

    @functools.wraps(original)
    def _get_np_dtype(tt_dtype):
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if isinstance(scalar, tl.pointer_type):
            return original(scalar)
        if scalar.name not in table:
            table[scalar.name] = original(scalar)
        return table[scalar.name]

    return _get_np_dtype


def _within_a_kernel(original):
    """A call of a function inside a kernel replaces nothing that is replaced already."""

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        if not all(map(_is_replaced, _languages(self.fn))):
            return original(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    return call


@functools.cache
def _languages(function) -> tuple:
    """The modules that a function knows, of those whose functions are replaced."""
    known = [value for value in function.__globals__.values() if inspect.ismodule(value)]
    return tuple(module for module in (tl, tl.core) if module in known)


def _is_replaced(language) -> bool:
    """Whether a kernel runs, and the module's functions are the interpreter's."""
    return not (tl.core.is_builtin(language.load) or tl.core.is_builtin(tl.tensor.__add__))
