"""Which source a recorded result belongs to: the same hash on every machine, with or without
Triton.
"""

import functools
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
import types
from collections.abc import Iterable

from lessons.toolbox.kernels.compile_report import KernelSpec


def kernel_hash(kernel) -> str:
    """16 hex digits for a kernel's source, that of the jit functions it calls and the constants it
    reads. Functions that it takes as constexprs count: its defaults, and those that a spec names.

    kernel: a jit function, a KernelSpec or "package.module:function". Comments, docstrings and
    layout do not count, nor does the line where the kernel stands, nor the Python version.
    """
    given = kernel.constexprs.values() if isinstance(kernel, KernelSpec) else ()
    digest, seen, waiting = hashlib.sha256(), set(), [python_function(resolve(kernel))]
    waiting += [function for value in given if (function := python_function(value))]
    while waiting:
        function = waiting.pop(0)
        if function in seen:
            continue
        seen.add(function)
        digest.update(_source(function).encode())
        defaults = map(python_function, function.__defaults__ or ())
        waiting += [default for default in defaults if default is not None]
        for name, value in _globals_read(function):
            called = python_function(value)
            if called is not None:
                waiting.append(called)
            elif isinstance(value := getattr(value, "value", value), (bool, int, float, str)):
                # tl.constexpr holds a value
                digest.update(f"{name}={value!r}\n".encode())
            elif hasattr(value, "_fields"):  # a named tuple: what it is made of, in this order
                digest.update(f"{name}={value._fields}\n".encode())
    return digest.hexdigest()[:16]


def resolve(kernel):
    """The object behind a spec or a "package.module:function"; anything else as it is."""
    # `or`, because a compiled jit function has an attribute `kernel` too, and it is None
    path = getattr(kernel, "kernel", None) or kernel
    if not isinstance(path, str):
        return path
    module_name, _, name = path.partition(":")
    found = getattr(importlib.import_module(module_name), name, None) if name else None
    if python_function(found) is None:
        raise ValueError(
            f"kernel {path!r}: expected 'package.module:function' that names a @triton.jit function"
        )
    return found


def python_function(kernel) -> types.FunctionType | None:
    """The function inside @triton.jit, also under @triton.autotune; None for anything else, and for
    Triton's own library.
    """
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
        if isinstance(kernel, types.FunctionType):
            return None if kernel.__module__.startswith("triton.") else kernel
    return None


def _globals_read(function: types.FunctionType) -> Iterable[tuple[str, object]]:
    names = function.__code__.co_names  # of globals and of attributes, in order of appearance
    for name in names:
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, types.ModuleType) and not value.__name__.startswith("triton"):
            yield from (
                (f"{name}.{attribute}", getattr(value, attribute))
                for attribute in names
                if hasattr(value, attribute)
            )


@functools.cache
def _source(function: types.FunctionType) -> str:
    """The function's tokens without comments, blank lines, docstrings and decorators' layout."""
    text = textwrap.dedent(inspect.getsource(function))
    line, lines = [], []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        line.append(
            {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ""}.get(
                token.type, token.string
            )
        )
        if token.type == tokenize.NEWLINE:
            # else: nothing but a string
            if line[-2][-1] not in "\"'" or any(part not in "{}" for part in line[:-2]):
                lines.append(" ".join(line))
            line = []
    return "\n".join(lines)
