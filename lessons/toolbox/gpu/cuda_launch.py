"""CUDA C++ on the machine: NVRTC compiles a file to PTX for a chip, without a driver, and the machine
runs it on tensors of the CPU.
"""

from functools import cache

import numpy as np
import torch

from lessons.toolbox.gpu.machine import Launch, launch
from lessons.toolbox.gpu.ptx import Kernel, parse
from lessons.toolbox.gpu.triton_driver import ORDER, WATCHERS, as_bytes, bind


class CompileError(RuntimeError):
    """NVRTC refuses a file, or is not there."""


@cache
def compiled(source: str, file: str, chip: int) -> dict[str, Kernel]:
    """{name: Kernel} of a file. Raises CompileError, one line."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise CompileError("NVRTC is not installed: pip install cuda-bindings") from None
    suffix = "a" if chip >= 90 else ""
    options = [f"--gpu-architecture=sm_{chip}{suffix}", "--std=c++17", "--generate-line-info"]

    def done(answer):
        status, *values = answer
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{file}: {first_error(nvrtc, program) or status.name}")
        return values[0] if values else None

    program = None
    try:
        program = done(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    except RuntimeError as error:  # the library itself is not there
        if isinstance(error, CompileError):
            raise
        raise CompileError(f"NVRTC cannot be loaded: {error}") from None
    done(nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]))
    text = b" " * done(nvrtc.nvrtcGetPTXSize(program))
    done(nvrtc.nvrtcGetPTX(program, text))
    return parse(text.rstrip(b"\0 ").decode())


def first_error(nvrtc, program) -> str:
    """What the compiler complains of first."""
    if program is None:
        return ""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    lines = [line for line in log.decode().splitlines() if "error" in line]
    return lines[0].strip() if lines else ""


def run(
    source: str, file: str, name: str, chip: int, grid, block, shared_bytes: int, given: list
) -> Launch:
    """Launch kernel `name`. given: tensors and NumPy scalars, one for each parameter. Raises
    CompileError, ValueError for arguments that do not fit, Fault.
    """
    kernels = compiled(source, file, chip)
    if name not in kernels:
        raise ValueError(f"name: got {name!r}; accepted: {', '.join(kernels)}")
    kernel = kernels[name]
    if len(given) != len(kernel.parameters):
        raise ValueError(f"{name}: got {len(given)} arguments; accepted: {len(kernel.parameters)}")
    buffers, values, _ = bind(kernel, [(f"argument {i}", value) for i, value in enumerate(given)])
    parameters = {}
    for index, ((parameter, type_, size), value, x) in enumerate(
        zip(kernel.parameters, values, given)
    ):
        check_kind(name, index, type_, size, x)
        parameters[parameter] = as_bytes(value, type_, size)
    done = launch(
        kernel,
        three(grid),
        three(block),
        buffers,
        parameters,
        kernel.shared_bytes + shared_bytes,
        seed=int(torch.randint(2**31, (), generator=ORDER)),
    )
    for told in WATCHERS:
        told(done)
    return done


def three(size) -> tuple[int, int, int]:
    size = size if isinstance(size, tuple) else (size,)
    return (*map(int, size), 1, 1)[:3]


def check_kind(name: str, index: int, type_: str, size: int, value) -> None:
    """Raises ValueError for a number of another width or kind than the parameter."""
    if isinstance(value, torch.Tensor):
        if size != 8 or type_.startswith("f"):
            raise ValueError(f"{name}: argument {index} is a tensor; accepted: .{type_}")
        return
    is_float = np.dtype(type(value)).kind == "f"
    if np.dtype(type(value)).itemsize != size or is_float != type_.startswith("f"):
        raise ValueError(
            f"{name}: argument {index} is {type(value).__name__}; accepted: .{type_}, {size} bytes"
        )
