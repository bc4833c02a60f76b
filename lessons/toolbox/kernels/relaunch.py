"""Launches of Triton's interpreter, made again where kernels are compiled.

    with launches_of() as launches, Film() as film:
        rms_norm(x, weight, 1e-5)           # interpreted here
    film = compiled(film, launches)         # film: the interpreter's, of the same launches

A launch is its kernel, the grid, the options, and its arguments as they were before it. A kernel
travels by its module and name, or as source text where it has no file (a notebook's cell) or
belongs to a function.
"""

import ast
import importlib
import inspect
import io
import linecache
import pickle
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from lessons.toolbox.exercises.loading import load_file
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.film import Access, Film

CHIP = 90  # an H100's


@dataclass(frozen=True)
class Launch:
    """kernel[grid](*arguments, **named)."""

    kernel: object
    grid: tuple[int, ...]
    arguments: tuple
    named: dict

    def run(self) -> None:
        """Make it."""
        self.kernel[self.grid](*self.arguments, **self.named)


@dataclass
class Launches:
    """Packed launches, in order. why_not: why one of them could not be packed."""

    packed: list[bytes] = field(default_factory=list)
    why_not: str | None = None


@contextmanager
def launches_of() -> Iterator[Launches]:
    """Within it each launch of an interpreted kernel is packed before it begins."""
    from triton.runtime.interpreter import InterpretedFunction  # here: it may not be installed

    launches = Launches()
    run = InterpretedFunction.run

    def watched(this, *arguments, grid, **named):
        if callable(grid):
            known = {name: x for name, x in named.items() if name in this.arg_names}
            grid = grid(inspect.getcallargs(this.fn, *arguments, **known))
        options = {name: x for name, x in named.items() if name != "warmup"}
        try:
            launches.packed.append(pack(Launch(this, tuple(grid), arguments, options)))
        except (
            Exception
        ) as error:  # an argument that cannot be pickled: the launch runs all the same
            launches.why_not = in_one_line(error)
        return run(this, *arguments, grid=grid, **named)

    with mock.patch.object(InterpretedFunction, "run", watched):
        yield launches


def compiled(film: Film, launches: Launches) -> Film:
    """The film of what the compiled code does in the launches of an interpreted film, with that
    one's addresses and arguments. The interpreted one itself where compiled code would stop,
    because an access lies outside, and, after a line that says why, where the kernels do not
    compile or not run.
    """
    if any(len(access.outside) for access in film.accesses):
        return film
    accesses, why_not = [], launches.why_not
    if not why_not:
        try:
            accesses, why_not = call(f"{__name__}:filmed", launches.packed, chip=CHIP)
        except RuntimeError as error:
            why_not = str(error)
    if why_not:
        print(f"The film is the interpreter's, because the compiled kernel gave: {why_not}")
        return film
    again = copy(film)
    again.accesses, again.chip = accesses, CHIP
    return again


def filmed(launches: list[bytes]) -> tuple[list[Access], str | None]:
    """The accesses of the launches, made again, and in one line why there are no more of them. To
    be called where kernels are compiled. Addresses are those of the process that packed the
    launches.
    """
    starts: dict[int, int] = {}
    with Film(start_of=lambda start: starts.get(start, start)) as film:
        why_not = None
        try:
            for packed in launches:
                launch = pickle.loads(packed)
                starts.update((memory.bytes.data_ptr(), memory.start) for memory in Memory.all)
                launch.run()
        except Exception as error:  # the compiler's, the machine's, or that of a learner's file
            why_not = in_one_line(error)
    return film.accesses, why_not


def in_one_line(error: Exception) -> str:
    """What went wrong. The compiler's messages show the source first, and end with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    kind, reason = type(error).__name__, lines[-1] if lines else ""
    return reason if reason.lower().startswith(kind.lower()) else f"{kind}: {reason}"


# ---- packing


class Memory:
    """The bytes of one storage. start: its address in the process that packed it."""

    all: ClassVar[list["Memory"]] = []  # alive, so that no two have one address

    def __init__(self, start: int, data: bytes):
        self.start = start
        self.bytes = torch.empty(len(data), dtype=torch.uint8)
        if data:
            self.bytes.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        Memory.all.append(self)


class _Packer(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file)
        self.storages: dict[int, _Stored] = {}

    def reducer_override(self, x):
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            start = storage.data_ptr()
            stored = self.storages.setdefault(start, _Stored(start, storage))
            layout = tuple(x.shape), x.stride(), x.storage_offset()
            return _tensor, (stored, x.dtype, *layout)
        if isinstance(x, _Stored):
            data = torch.empty(0, dtype=torch.uint8).set_(x.storage.cpu())
            return Memory, (x.start, data.numpy().tobytes())
        if isinstance(x, ModuleType):
            return importlib.import_module, (x.__name__,)
        if hasattr(x, "rewrite") and callable(getattr(x, "fn", None)):  # an interpreted kernel
            return _recipe(x.fn)
        return NotImplemented


@dataclass(eq=False)
class _Stored:
    start: int
    storage: torch.UntypedStorage


def pack(launch: Launch) -> bytes:
    """As bytes; a storage that two tensors share is one."""
    file = io.BytesIO()
    _Packer(file).dump(launch)
    return file.getvalue()


def _recipe(fn) -> tuple:
    """How to make a kernel again: a function and its arguments."""
    file = inspect.getsourcefile(fn) or ""
    if fn.__module__ != "__main__" and "<locals>" not in fn.__qualname__ and Path(file).is_file():
        return _from_file, (fn.__module__, file, fn.__qualname__)
    text = textwrap.dedent(inspect.getsource(fn))
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    known = fn.__globals__  # alone, because the interpreter sees no closure either
    return _from_text, (fn.__name__, text, {name: known[name] for name in names & known.keys()})


# ---- unpacking


def _tensor(memory: Memory, dtype, shape, stride, offset) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.bytes.untyped_storage(), offset, shape, stride)


def _from_file(module: str, file: str, name: str):
    """The kernel of that name, from its module, or from its file where it is no module of a
    package, as a learner's file is none.
    """
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = None
    if getattr(found, "__file__", None) != file:
        found = load_file(Path(file))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _from_text(name: str, text: str, known: dict):
    """The kernel that a text defines. known: what else it uses."""
    file = f"<{name} of a notebook or a function, {len(linecache.cache)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    known["__name__"] = module = f"filmed_{len(linecache.cache)}"
    sys.modules[module] = ModuleType(module)  # Triton asks for it
    exec(compile(text, file, "exec"), known)
    return known[name]
