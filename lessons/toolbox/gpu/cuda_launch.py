"""CUDA C++ on the machine: NVRTC compiles a file to PTX for a chip, without a driver, and the
machine runs it on tensors of the CPU.
"""

import math
from functools import cache

import numpy as np
import torch

from lessons.toolbox.gpu.arguments import WATCHERS, as_bytes, bind, order_seed
from lessons.toolbox.gpu.machine import SHARED_LIMIT, Launch, launch
from lessons.toolbox.gpu.nvrtc import ptx_of
from lessons.toolbox.gpu.ptx import Kernel, parse

MAX_THREADS = 1024  # of a block, on every GPU


@cache
def compiled(source: str, file: str, chip: int) -> dict[str, Kernel]:
    """{name: Kernel} of a file, named by its path. Raises CompileError."""
    return parse(ptx_of(source, file, chip))


def run(
    source: str, file: str, name: str, chip: int, grid, block, shared_bytes: int, given: list
) -> Launch:
    """Launch kernel `name`. grid, block: three numbers each; given: tensors and NumPy scalars, one
    for each parameter. Raises CompileError, ValueError for arguments that do not fit or a launch
    that no GPU takes, Fault.
    """
    if not 0 < math.prod(block) <= MAX_THREADS or min(grid) < 1:
        raise ValueError(
            f"{name}: got grid {grid}, block {block}; accepted: 1 to {MAX_THREADS} threads a "
            f"block, 1 block or more"
        )
    if not 0 <= shared_bytes <= (most := SHARED_LIMIT[chip]):
        raise ValueError(
            f"{name}: got {shared_bytes} bytes of shared memory; accepted: 0 to {most}"
        )
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
        grid,
        block,
        buffers,
        parameters,
        kernel.shared_bytes + shared_bytes,
        seed=order_seed(),
    )
    for told in WATCHERS:
        told(done)
    return done


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
