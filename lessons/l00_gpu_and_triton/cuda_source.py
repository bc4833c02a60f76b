"""CUDA C++ in a Python string, launched like a kernel of a .cu file.

NVRTC compiles it, for the GPU that is there. Without one its compiled code runs on the CPU, where
every access is watched (`lessons.toolbox.gpu`).
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from torch import Tensor

from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.nvrtc import CompileError
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

FOLDER = Path(__file__).parents[2] / "build" / "cuda_sources"


def run_cuda(source: str, name: str, grid: int, block: int, *arguments: Tensor | int) -> None:
    """Launch the `extern "C" __global__` function `name` of `source` with `grid` blocks of `block`
    threads. A tensor arrives as the address of its first element, an int as `long long`.

    Raises CompileError, also where no compiler is, and Fault for what the kernel does wrong.
    """
    try:
        _kernel(source, name)[grid, block](*arguments)
    except (CompileError, Fault) as error:
        raise type(error)(_with_lines(str(error), source)) from None


def _with_lines(message: str, source: str) -> str:
    """The message, and below it the lines of the source that it names."""
    lines = source.split("\n")
    named = dict.fromkeys(int(number) for number in re.findall(r"\.cu[:(](\d+)", message))
    shown = [f"  line {n}: {lines[n - 1].strip()}" for n in named if 0 < n <= len(lines)]
    return "\n".join([message, *shown])


@cache
def _kernel(source: str, name: str) -> CudaKernel:
    # its own folder for each source, because messages name the file, and it shall keep its name
    folder = FOLDER / hashlib.sha256(source.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.cu"
    if not file.exists():
        file.write_text(source, encoding="utf-8")
    return CudaKernel(file, name)
