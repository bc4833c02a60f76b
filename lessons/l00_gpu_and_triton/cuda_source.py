"""CUDA C++ that stands in a Python string, launched like a kernel of a .cu file.

On a GPU it is compiled by NVRTC; on a CPU by this machine's C++ compiler, and the emulator watches
every access (`lessons.toolbox.cuda_cpu`).
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from torch import Tensor

from lessons.toolbox.cuda_cpu.compiling import CompileError
from lessons.toolbox.cuda_cpu.emulator import CudaError
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

FOLDER = Path(__file__).parents[2] / "build" / "cuda_sources"


def run_cuda(source: str, name: str, grid: int, block: int, *arguments: Tensor | int) -> None:
    """Launch the `extern "C" __global__` function `name` of `source` with `grid` blocks of `block`
    threads. A tensor arrives as the address of its first element, an int as `long long`.

    Raises RuntimeError where no compiler is, CompileError, CudaError for what the kernel does
    wrong.
    """
    try:
        _kernel(source, name)[grid, block](*arguments)
    except (CompileError, CudaError) as error:
        raise type(error)(_with_lines(str(error), source)) from None


def _with_lines(message: str, source: str) -> str:
    """The message, and below it the lines of the source that it names."""
    lines = source.split("\n")
    named = dict.fromkeys(int(number) for number in re.findall(r"\.cu:(\d+)", message))
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
