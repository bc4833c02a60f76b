"""What a learner's kernel names: nothing that a compiler could not compile.

Triton's interpreter runs a kernel as Python, so np.sum, torch.exp, a tensor's `handle` and a number
of the file all work there, and the values are right. A GPU runs none of them.
"""

import dis
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULES = ("triton", "lessons", "math")  # of which a kernel may name something
# the compiler's CodeGenerator.builtin_namespace, and the name that the interpreter puts in
BUILTINS = {"len", "list", "range", "float", "int", "isinstance", "getattr", "hasattr"}
BUILTINS |= {"print", "min", "max", "interpreter_semantic"}
INSIDES = ("handle",)  # attributes of the interpreter's tensors that a compiled one lacks


def assert_compilable(function: Callable, arguments: list[Any]) -> None:
    """Fail if an interpreted kernel, or a kernel that it calls, names what a compiler refuses.
    function: the kernel; arguments: of its launch, because a kernel may be one.
    """
    waiting, known = [function, *map(_kernel_of, arguments)], set()
    while waiting:
        kernel = waiting.pop()
        if kernel is None or kernel in known:
            continue
        known.add(kernel)
        for name, value in _names(kernel):
            assert _is_known(name, value), (
                f"your kernel `{kernel.__name__}` uses `{name}`, which no compiler knows, so it "
                "runs on no GPU: a kernel has `tl`, numbers that are tl.constexpr, and other "
                "kernels"
            )
            waiting.append(_kernel_of(value))


def _names(function: Callable) -> Iterator[tuple[str, Any]]:
    """The names in a function that are not its own: (name, what it stands for, or None)."""
    outer = function.__globals__
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    for step in dis.get_instructions(function):
        name = step.argval
        if step.opname == "IMPORT_NAME" or (step.opname.endswith("_ATTR") and name in INSIDES):
            yield f"import {name}" if step.opname == "IMPORT_NAME" else f".{name}", None
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield name, outer.get(name)
        elif step.opname == "LOAD_DEREF" and name in cells:
            yield name, cells[name].cell_contents


def _is_known(name: str, value: Any) -> bool:
    if value is None:
        return name in BUILTINS
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in MODULES
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return True  # a named tuple
    return str(getattr(value, "__module__", "")).partition(".")[0] == "triton"


def _kernel_of(value: Any) -> Callable | None:
    """The Python function of an interpreted kernel, None for anything else."""
    is_kernel = type(value).__name__ == "InterpretedFunction"
    return value.fn if is_kernel else None
