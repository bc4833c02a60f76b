"""Gluon beside the interpreter: a Gluon kernel is compiled and runs on the machine, in a process
whose Triton kernels are interpreted.

    on_the_machine(90)
    kernel[grid](*arguments)        # kernel: of @gluon.jit
"""

import importlib.util
from functools import cache

from lessons.toolbox.measure.device import compiled_chip, has_gpu, interpreting


@cache
def on_the_machine(chip: int) -> None:
    """From now on Gluon's kernels of this process compile for the chip and run on tensors of the
    CPU. Raises ValueError where Triton has another GPU to compile for.
    """
    if compiled_chip() == chip:
        return
    if compiled_chip() or has_gpu():
        there = f"LADDER_CHIP={compiled_chip()}" if compiled_chip() else "a GPU"
        raise ValueError(
            f"device: got cpu and {there}; accepted: a process without, or one with LADDER_CHIP={chip}"
        )
    from lessons.toolbox.gpu.triton_driver import install

    install(chip)
    if interpreting():
        compile_what_gluon_borrows()


def compile_what_gluon_borrows() -> None:
    """gl.sum, gl.max, … are Triton's, and those were made for the interpreter when Triton was
    imported. Gluon gets them from a second copy of the module, made for the compiler.
    """
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import _standard as borrowed
    from triton.language import standard

    spec = importlib.util.spec_from_file_location(standard.__name__, standard.__file__)
    copy = importlib.util.module_from_spec(spec)
    triton.knobs.runtime.interpret = False
    try:
        spec.loader.exec_module(copy)
    finally:
        triton.knobs.runtime.interpret = True
    for name, function in vars(borrowed).items():
        of_triton = getattr(standard, name, None)
        if of_triton is not None and getattr(function, "fn", None) is getattr(of_triton, "fn", 0):
            setattr(gl, name, gluon.jit(getattr(copy, name).fn))
