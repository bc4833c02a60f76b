"""CUDA C++ on a CPU: the kernel of a .cu file, compiled by this machine's C++ compiler, run thread
by thread and watched.

    with counting() as sites:
        CudaKernel(file, "softmax_fp32x4")[rows, 1024](scores, probs, lse, columns, stride)
    sites[0].sectors, sites[0].conflicts

A bug becomes a CudaError that names the thread and the line: an address out of bounds, a data race,
a barrier or a shuffle that some threads do not reach, shared memory read before it is written.
Threads run in an order drawn from a seed, which stands in the message; `seeded(seed)` repeats it.

What it cannot show: time, the GPU's approximate exp and log, tensor cores, more than one GPU, and a
loop that never ends without touching memory. Blocks run one after another.
"""

import ctypes
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from torch import Tensor

from lessons.toolbox.cuda_cpu import compiling
from lessons.toolbox.cuda_cpu.compiling import why_not_here

MAX_THREADS = 1024  # a block, on every GPU
MAX_SHARED_BYTES = 227 * 1024  # a block, on an H100
KINDS = ("global", "shared", "constant")  # Kind of emulator.h
ACCESSES = ("load", "store", "atomic")
TYPES = {"p": "a tensor", "f": "a float", "i": "an int"}


class CudaError(RuntimeError):
    """What a kernel did wrong: "optimized.cu:79: data race: block (0, 0, 0), thread (3, 0, 0)
    reads ..."."""


@dataclass(frozen=True)
class Site:
    """One load, store or atomic of the .cu file, and what all warps of a launch asked of memory.

    A request is one instruction of one warp. sectors: of 32 bytes, in all requests together.
    turns: of shared memory's banks; conflicts: those turns that another layout would save.
    """

    line: int
    access: str  # "load", "store" or "atomic"
    memory: str  # "global" or "shared"
    name: str  # "k_tile" or "argument 0"
    size_bytes: int  # a thread
    requests: int
    sectors: int
    turns: int
    conflicts: int


_sites: list[Site] | None = None
_seed: int | None = None


@contextmanager
def counting() -> Iterator[list[Site]]:
    """Within it every launch on a CPU appends its Sites to the list, in the order of lines."""
    global _sites
    before, _sites = _sites, []
    try:
        yield _sites
    finally:
        _sites = before


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it threads are resumed in the order that belongs to a seed; else in a fresh one."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


# ---------------------------------------------------------------- a launch


def launch(
    file: Path, name: str, grid: tuple, block: tuple, shared_bytes: int, arguments: list
) -> None:
    """Run a kernel over a grid. arguments: CPU tensors and NumPy scalars.

    Raises CudaError for what the kernel does wrong, CompileError, ValueError for a launch that no
    GPU takes, RuntimeError without a compiler.
    """
    if why := why_not_here():
        raise RuntimeError(why)
    grid, block = _three(grid), _three(block)
    if not 0 < np.prod(block) <= MAX_THREADS or min(grid) < 1:
        raise ValueError(
            f"{name}: got grid {grid}, block {block}; accepted: 1 to {MAX_THREADS} threads a "
            f"block, 1 block or more"
        )
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise ValueError(
            f"{name}: got {shared_bytes} bytes of shared memory; accepted: 0 to {MAX_SHARED_BYTES}"
        )
    library = Library(compiling.library(file.read_text(encoding="utf-8"), file.name, name))
    library.check(name, arguments)
    library.run(file.name, grid, block, shared_bytes, arguments)


def _three(size) -> tuple[int, int, int]:
    """A grid or a block as CUDA counts it: 4 -> (4, 1, 1)."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1)[:3]


@cache
def _loaded(path: Path) -> ctypes.PyDLL:
    """The library, which holds Python's lock while it runs, because its state is global."""
    found = ctypes.PyDLL(str(path))
    for function in ("cuda_cpu_launch", "cuda_cpu_counts", "cuda_cpu_parameters"):
        getattr(found, function).restype = ctypes.c_char_p
    found.cuda_cpu_dynamic_shared.restype = ctypes.c_size_t
    return found


_symbols = cache(compiling.symbols)


class Library:
    """A compiled kernel with the emulator around it."""

    def __init__(self, path: Path):
        self.path, self.functions = path, _loaded(path)

    def check(self, name: str, arguments: list) -> None:
        """Raise ValueError unless the arguments have the kernel's number, kinds and widths. A GPU
        would read whatever bytes there are.
        """
        wanted = self.functions.cuda_cpu_parameters().decode().split()
        got = [_kind(argument) for argument in arguments]
        if len(wanted) != len(got):
            raise ValueError(f"{name}: got {len(got)} arguments; accepted: {len(wanted)}")
        for index, (want, have) in enumerate(zip(wanted, got)):
            if want != have:
                raise ValueError(
                    f"{name}: argument {index} is {TYPES[have[0]]} of {have[1]} bytes; accepted: "
                    f"{TYPES[want[0]]} of {want[1]} bytes"
                )

    def run(self, file_name: str, grid, block, shared_bytes: int, arguments: list) -> None:
        """One launch. Raises CudaError."""
        self._say_what_memory_there_is(shared_bytes, arguments)
        self.functions.cuda_cpu_start_counting(_sites is not None)
        seed = random.getrandbits(32) if _seed is None else _seed
        values = [
            np.uint64(x.data_ptr()) if isinstance(x, Tensor) else np.array(x) for x in arguments
        ]
        values = [np.atleast_1d(value) for value in values]  # kept until the launch has ended
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        sizes = [(ctypes.c_uint * 3)(*size) for size in (grid, block)]
        wrong = self.functions.cuda_cpu_launch(
            self.functions.cuda_cpu_body, addresses, *sizes, ctypes.c_uint64(seed)
        )
        self.functions.cuda_cpu_forget_memory()
        if wrong is not None:
            raise CudaError(self._in_words(wrong.decode(), file_name) + f" (seed {seed})")
        if _sites is not None:
            _sites.extend(self._counts(file_name))

    def _say_what_memory_there_is(self, shared_bytes: int, arguments: list) -> None:
        variables, functions = _symbols(self.path)
        launch = ctypes.cast(self.functions.cuda_cpu_launch, ctypes.c_void_p).value
        base = launch - functions["cuda_cpu_launch"]
        found = [(v.name, base + v.offset, v.size_bytes, KINDS.index(v.kind)) for v in variables]
        dynamic = self.functions.cuda_cpu_dynamic_shared()
        found.append(("the dynamic shared memory", dynamic, shared_bytes, KINDS.index("shared")))
        found += _tensors(arguments)
        for label, begin, size_bytes, kind in sorted(found, key=lambda memory: memory[1]):
            self.functions.cuda_cpu_add_memory(
                label.encode(), ctypes.c_size_t(begin), ctypes.c_size_t(size_bytes), kind
            )

    def _in_words(self, message: str, file_name: str) -> str:
        """The emulator's message with its places, "@1f2a", as lines of the .cu file."""

        def line(place: re.Match) -> str:
            return f"{file_name}:{compiling.line_of(self.path, int(place[1], 16), file_name)}"

        return re.sub(r"@([0-9a-f]+)", line, message)

    def _counts(self, file_name: str) -> list[Site]:
        """The Sites of the launch. What the compiler unrolled or copied is one site again."""
        found: dict[tuple, np.ndarray] = {}
        for text in self.functions.cuda_cpu_counts().decode().splitlines():
            place, access, size_bytes, kind, *counts, name = text.split(" ", 8)
            line = compiling.line_of(self.path, int(place, 16), file_name)
            site = line, ACCESSES[int(access)], KINDS[int(kind)], name, int(size_bytes)
            found[site] = found.get(site, 0) + np.array(counts, int)
        return [Site(*site, *counts.tolist()) for site, counts in sorted(found.items())]


def _kind(argument) -> str:
    """ "p8": a pointer, "f4": a float of 4 bytes, "i8": an int of 8."""
    if isinstance(argument, Tensor):
        return "p8"
    return f"{'f' if isinstance(argument, np.floating) else 'i'}{argument.nbytes}"


def _tensors(arguments: list) -> list[tuple[str, int, int, int]]:
    """(label, address, bytes, kind) of the tensors; one for those that share memory."""
    merged = []
    tensors = [(index, x) for index, x in enumerate(arguments) if isinstance(x, Tensor)]
    for index, x in sorted(tensors, key=lambda pair: pair[1].data_ptr()):
        label = f"argument {index} ({str(x.dtype).removeprefix('torch.')} {list(x.shape)})"
        begin, end = x.data_ptr(), x.data_ptr() + _reach_bytes(x)
        if merged and begin < merged[-1][2]:
            before = merged.pop()
            label, begin, end = f"{before[0]} or {label}", before[1], max(before[2], end)
        merged.append((label, begin, end))
    return [(label, begin, end - begin, KINDS.index("global")) for label, begin, end in merged]


def _reach_bytes(x: Tensor) -> int:
    """From a tensor's first element to the end of its last one. x: [...], any strides."""
    if not x.numel():
        return 0
    return x.itemsize * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())))
