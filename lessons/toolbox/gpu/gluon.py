"""Gluon beside the interpreter: a Gluon kernel is compiled and runs on the machine, in a process
whose Triton kernels are interpreted.

    with on_the_machine(90):
        kernel[grid](*arguments)        # kernel: of @gluon.jit
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from lessons.toolbox.measure.device import compiled_chip, has_gpu


@contextmanager
def on_the_machine(chip: int) -> Iterator[None]:
    """Within it Gluon's kernels compile for the chip and run on tensors of the CPU. Raises
    ValueError where Triton has another GPU to compile for.
    """
    if compiled_chip() == chip:
        yield
        return
    if compiled_chip() or has_gpu():
        there = f"LADDER_CHIP={compiled_chip()}" if compiled_chip() else "a GPU"
        raise ValueError(
            f"device: got cpu and {there}; accepted: a process without, or one with "
            f"LADDER_CHIP={chip}"
        )
    import triton
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.language import core

    from lessons.toolbox.gpu.triton_driver import install
    from lessons.toolbox.kernels.triton_ import COMPILED

    before = triton.runtime.driver._active, CUDABackend.make_cubin, triton.knobs.cache.dir
    interpreted = dict(vars(core))
    install(chip)
    vars(core).update(COMPILED)
    try:
        compile_what_gluon_borrows()
        yield
    finally:  # because other code of the process may compile for a GPU, and means a real one
        vars(core).update(interpreted)
        triton.runtime.driver._active, CUDABackend.make_cubin, triton.knobs.cache.dir = before


@cache
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
    before, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, False
    try:
        spec.loader.exec_module(copy)
    finally:
        triton.knobs.runtime.interpret = before
    for name, function in vars(borrowed).items():
        of_triton = getattr(standard, name, None)
        if of_triton is not None and getattr(function, "fn", None) is getattr(of_triton, "fn", 0):
            setattr(gl, name, gluon.jit(getattr(copy, name).fn))
