"""Kernels launched on pretended tensors: checked as a GPU's driver checks them, counted, and
interpreted.

Triton compiles a kernel anew for every variant: each combination of constants, types, alignments
and options (`variant_of`). On a GPU that takes about a second each, so the number of variants says
how long a lesson's tests compile.
"""

import time
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from lessons.toolbox.kernels.cuda_cpp import CudaKernel, common_device, packed
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.proof.pretended.hosts import Hosts
from lessons.toolbox.proof.pretended.refusals import CaptureError, NotRehearsed
from lessons.toolbox.proof.pretended.tensor import PretendedTensor

MOST_PROGRAMS = 20_000  # of one launch; a program takes milliseconds in the interpreter
MOST_SECONDS = 60.0  # of a core, for interpreting in one test
LARGEST_GRID = (2**31 - 1, 65_535, 65_535)  # CUDA programming guide, technical specifications


class Launches:
    """What was launched in this process, and how long interpreting took."""

    def __init__(self):
        self.count = 0
        self.variants: set[tuple] = set()
        self.left_out: Counter[str] = Counter()  # what could not be run here
        self.seconds = 0.0  # since the test began
        self.unspecialised: frozenset[str] = frozenset()  # arguments of the kernel being launched

    def report(self) -> dict:
        """{launches, operations, variants: {kernel: how many}, left_out: {what: how often}}."""
        variants = Counter(variant[0] for variant in self.variants)
        return {
            "launches": self.count,
            "operations": Hosts.operations,
            "variants": dict(variants.most_common()),
            "left_out": dict(self.left_out),
        }

    def leave_out(self, what: str) -> NotRehearsed:
        """Count what cannot be run here; returns the exception to raise."""
        self.left_out[what] += 1
        return NotRehearsed(what)

    def admit(self, kernel: str, variant: tuple, grid: tuple) -> None:
        """Count a launch. Raises RuntimeError for a grid that CUDA refuses."""
        grid = (*grid, 1, 1)[:3]
        if any(size > most for size, most in zip(grid, LARGEST_GRID)):
            raise RuntimeError(
                f"Triton Error [CUDA]: invalid argument: {kernel} has grid {grid}, the most is "
                f"{LARGEST_GRID}"
            )
        self.count += 1
        if Hosts.captured_by is not None and variant not in self.variants:
            raise CaptureError(f"{kernel} is compiled while stream is capturing: warm it up before")
        self.variants.add(variant)


LAUNCHES = Launches()


# ---------------------------------------------------------------- arguments


def host_of(kernel: str, index, value):
    """An argument as the interpreter takes it. Raises ValueError for a tensor that a GPU cannot
    read.
    """
    if isinstance(value, PretendedTensor):
        return value.host
    if isinstance(value, Tensor):
        raise ValueError(
            f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?): "
            f"{kernel}, {list(value.shape)} on {value.device}"
        )
    if isinstance(value, tuple):
        parts = [host_of(kernel, index, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if hasattr(value, "base") and hasattr(value, "block_shape"):  # a tensor descriptor
        host_of(kernel, index, value.base)
    return value


def kind_of(value) -> object:
    """What of an argument decides which variant is compiled: Triton's rules of specialisation."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return "1" if value == 1 else (width, value % 16 == 0)
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    if hasattr(value, "block_shape"):
        return kind_of(value.base), tuple(value.block_shape), repr(getattr(value, "layout", ""))
    return repr(value)


def width_of(value) -> object:
    """What is left of it for an argument that a kernel does not specialise: its type."""
    if kind_of(value) == "1":
        return "i32"
    return kind_of(value)[0] if type(value) is int or isinstance(value, Tensor) else kind_of(value)


def variant_of(name: str, constants: set[str], values: dict, options: dict) -> tuple:
    """(kernel, one entry an argument, options): equal where Triton reuses what it compiled."""
    kinds = []
    for key, value in values.items():
        kind = width_of if key in LAUNCHES.unspecialised else kind_of
        kinds.append((key, repr(value) if key in constants else kind(value)))
    return name, tuple(sorted(kinds)), tuple(sorted((k, repr(v)) for k, v in options.items()))


# ---------------------------------------------------------------- who launches


def noting_unspecialised(original):
    """Triton's InterpretedFunction.run, which notes the arguments that the decorator names."""

    def run(self, *args, **kwargs):
        LAUNCHES.unspecialised = frozenset(self.kwargs.get("do_not_specialize") or ())
        return original(self, *args, **kwargs)

    return run


def interpreted(original):
    """Triton's GridExecutor.__call__, on pretended tensors."""

    def launch(self, *args, **kwargs):
        name = self.fn.__name__
        args = [host_of(name, i, value) for i, value in enumerate(args)]
        kwargs = {key: host_of(name, key, value) for key, value in kwargs.items()}
        values = dict(zip(self.arg_names, args)) | kwargs
        options = {key: values.pop(key) for key in list(values) if key not in self.arg_names}
        grid = tuple(self.grid(values) if callable(self.grid) else self.grid)
        variant = variant_of(name, set(self.constexprs), values, options)
        LAUNCHES.admit(name, variant, grid)
        run = partial(timed, name, grid, partial(original, self, *args, **kwargs))
        if not Hosts.keep_values:
            return
        if Hosts.captured_by is not None:
            Hosts.captured_by.runs.append(run)
        else:
            run()

    return launch


def timed(name: str, grid: tuple, run) -> None:
    """Interpret a launch, unless that takes too long."""
    programs = 1
    for size in grid:
        programs *= size
    if programs > MOST_PROGRAMS:
        raise LAUNCHES.leave_out(f"{name} with {programs} programs, too many to interpret")
    if LAUNCHES.seconds > MOST_SECONDS:
        raise LAUNCHES.leave_out(f"{name} after {MOST_SECONDS:.0f} s of interpreting in one test")
    start = time.process_time()  # because a busy machine interprets no more
    run()
    LAUNCHES.seconds += time.process_time() - start


def gluon(self, *args, grid, warmup, **kwargs):
    """GluonJITFunction.run: arguments and grid are checked, and nothing runs."""
    name = self.fn.__name__
    values = dict(zip(self.arg_names, args)) | kwargs
    for key, value in values.items():
        host_of(name, key, value)
    options = {key: values.pop(key) for key in list(values) if key not in self.arg_names}
    constants = {param.name for param in self.params if param.is_constexpr}
    grid = tuple(grid(values) if callable(grid) else grid)
    LAUNCHES.admit(name, variant_of(name, constants, values, options), grid)
    if Hosts.keep_values:
        raise LAUNCHES.leave_out(f"{name}: Gluon is not interpreted")


def cuda_cpp(self, grid, block, shared_bytes: int = 0, *, arguments: tuple) -> None:
    """CudaKernel.launch: arguments and grid are checked, and nothing runs."""
    common_device(self.name, arguments)
    packed(self.name, arguments)
    grid = grid if isinstance(grid, tuple) else (grid,)
    LAUNCHES.admit(self.name, (f"{Path(self.file).name}: {self.name}",), grid)
    if Hosts.keep_values:
        raise LAUNCHES.leave_out(f"{self.name}: CUDA C++ needs NVRTC and a GPU")


def install() -> None:
    """Launch kernels so in this process, for good."""
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    assert triton.knobs.runtime.interpret, "kernels are interpreted: set TRITON_INTERPRET=1"
    patch.object(GridExecutor, "__call__", interpreted(GridExecutor.__call__)).start()
    run = noting_unspecialised(InterpretedFunction.run)
    patch.object(InterpretedFunction, "run", run).start()
    patch.object(GluonJITFunction, "run", gluon).start()
    patch.object(CudaKernel, "launch", cuda_cpp).start()
