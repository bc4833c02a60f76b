"""What the programs of a kernel launch load and store, one access after another.

    with Film() as film:
        out = rms_norm(x, weight, 1e-5)
    film.accesses[0].program, film.accesses[0].line     who did it, and where it stands in the
                                                        kernel
    film.accesses[0].elements(x)                        how often it touched each element of x
    film.programs(), film.kernels()                     in the order of the grid, of the launches

`Accesses` adds up what a whole launch moves. A film keeps the order, and who it was.
`lessons.toolbox.draw.film` draws it.

Where kernels are compiled for a CPU (LADDER_CHIP), a film is what the compiled code does, with the
sectors that its warps ask for. `relaunch.compiled` takes such a film of interpreted launches.

In Triton's interpreter an address outside every tensor is kept, and not touched: a load gets NaN
there (for integers -1), a store goes nowhere. So a kernel with a wrong mask can be filmed to its
end without spoiling anything, which compiled code does not allow: it stops there with a Fault.
"""

import contextlib
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from lessons.toolbox.kernels.bounds import ACCESSES, is_inside
from lessons.toolbox.kernels.launches import watching_launches
from lessons.toolbox.measure.device import compiled_chip, has_triton, interpreting

KINDS = {"load": "load", "store": "store", "atomic_rmw": "atomic", "atomic_cas": "atomic"}
CHIPS = {75: "a T4", 80: "an A100", 89: "an RTX 4090", 90: "an H100", 100: "a B200"}
Program = tuple[int, int, int]


def why_no_film() -> str | None:
    """Why nothing can be recorded on this machine, in words, or None."""
    if not has_triton():
        return "Triton is not installed here, so no kernel runs"
    if not (interpreting() or compiled_chip()):
        return "kernels are compiled here, and a GPU keeps no record of its addresses"
    return None


@dataclass(frozen=True)
class Access:
    """One load, store or atomic operation of one program."""

    kernel: str
    program: Program
    kind: str  # "load", "store" or "atomic"
    line: str  # of the kernel's source, without its indentation; "" where it cannot be read
    addresses: np.ndarray  # int64: what it touched, under a true mask and inside a tensor
    outside: np.ndarray  # int64: what it would have touched outside every tensor
    # Of compiled code. The interpreter knows no warps: 0.
    sectors: int = 0  # of 32 bytes, that its warps asked for
    needed: int = 0  # that its bytes fill
    together: int = 0  # neighbours that one lane takes at once

    def elements(self, x: Tensor) -> Tensor:
        """How often it touched each element of x: int64, shaped like x: [...]."""
        storage = x.untyped_storage()
        size = storage.nbytes() // x.itemsize
        element = (self.addresses - storage.data_ptr()) // x.itemsize
        counts = np.bincount(element[(element >= 0) & (element < size)], minlength=size)
        return torch.from_numpy(counts).as_strided(x.shape, x.stride(), x.storage_offset())

    def offsets_outside(self, x: Tensor) -> np.ndarray:
        """Of each address outside, how many elements it lies behind the first one of x:
        [...], as int64."""
        return (self.outside - x.data_ptr()) // x.itemsize


class Film:
    """Within it every access of a kernel is kept, of an interpreted one or of one that is compiled
    for a CPU. Raises RuntimeError where a GPU runs them.
    """

    def __init__(self, start_of: Callable[[int], int] = int):
        """start_of: the address that a storage is to have in the film, for the one that it has."""
        if reason := why_no_film():
            raise RuntimeError(f"no film: {reason}")
        self.chip = compiled_chip()  # None: Triton's interpreter
        self._start_of = start_of
        self.accesses: list[Access] = []
        self.arguments: dict[str, Tensor] = {}  # of all launches, by the argument's name
        self._kept: list[Tensor] = []  # alive, so that their addresses stay theirs
        self._given: dict[str, tuple[int, int]] = {}
        self._kernel = ""

    def __enter__(self) -> "Film":
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(watching_launches(self._launch))
        self._patches.enter_context(self._of_compiled() if self.chip else self._of_interpreted())
        return self

    def __exit__(self, *error) -> None:
        self._patches.close()

    @property
    def source(self) -> str:
        """Where it was recorded, in words."""
        if self.chip:
            return f"compiled for {CHIPS.get(self.chip, f'sm_{self.chip}')}, run on a CPU"
        words = "recorded in Triton's interpreter"
        if any(len(access.outside) for access in self.accesses):
            words += ", because compiled code stops at an address outside"
        return words

    def programs(self, kernel: str | None = None) -> list[Program]:
        """Every program that touched something, in the order of the grid (of all kernels, or of
        one).
        """
        found = {a.program for a in self.accesses if kernel in (None, a.kernel)}
        return sorted(found, key=lambda program: program[::-1])

    def dimensions(self) -> int:
        """How many of the grid's three are used, as far as accesses show it."""
        used = [i for program in self.programs() for i, index in enumerate(program) if index]
        return 1 + max(used, default=0)

    def kernels(self) -> list[str]:
        """The kernels that touched something, in the order of their first launch."""
        return list(dict.fromkeys(access.kernel for access in self.accesses))

    def _launch(self, kernel: str, tensors: dict[str, Tensor]) -> None:
        self._kernel = kernel
        self._kept += tensors.values()
        self._given.clear()
        for name, x in tensors.items():
            start = x.untyped_storage().data_ptr()
            self._given[name] = start, start + x.untyped_storage().nbytes()
            known = self.arguments.setdefault(name, x)
            if known.data_ptr() != x.data_ptr():
                self.arguments[f"{name} of {kernel}"] = x

    def _of_compiled(self):
        from lessons.toolbox.gpu.filming import filming  # here, because it imports Access

        return filming(self.accesses, self._start_of)

    def _of_interpreted(self):
        # here, because Triton may not be installed
        from triton.runtime import interpreter

        memory = interpreter._interpreter
        watched = {
            name: self._watch(getattr(memory, name), name, interpreter.interpreter_builder)
            for name in ACCESSES
        }
        return mock.patch.multiple(memory, **watched)

    def _watch(self, original, name: str, builder):
        _, at, value, mask_at = ACCESSES[name]

        def access(*args):
            pointers = args[at]
            mask = np.ones(pointers.shape, bool) if mask_at is None else args[mask_at]
            mask = np.broadcast_to(mask, pointers.shape).astype(bool)
            addresses = pointers.astype(np.int64)
            safe = mask & is_inside(addresses, args[value].itemsize, self._given)
            self.accesses.append(
                Access(
                    self._kernel,
                    tuple(builder.grid_idx),
                    KINDS[name],
                    _line(),
                    addresses[safe],
                    addresses[mask & ~safe],
                )
            )
            if mask_at is None:
                return original(*args) if safe.all() else _garbage(args[value], ~safe)
            rest = list(args)
            rest[mask_at] = safe
            result = original(*rest)
            return result if result is None else _garbage(result, mask & ~safe)

        return access


def _garbage(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The values, with every bit set where the address was outside: NaN, or -1."""
    if where.any():
        values = values.copy()
        values.view(np.uint8).reshape(*values.shape, -1)[where] = 0xFF
    return values


def _line() -> str:
    """The line of the kernel that is being interpreted."""
    here, frame = Path(__file__).parent, sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if "triton" not in file.parts and file.parent != here:
            return linecache.getline(str(file), frame.f_lineno).strip()
        frame = frame.f_back
    return ""
