"""Simulated shared memory: allocations that start as poison, views of them, and who uses which
part.

A part that a copy fills may be neither read nor written, and a part that a copy or a product reads
may not be written, until that work has ended. Ordinary stores become visible to TMA and to the
tensor cores by fence_async_shared().
"""

import linecache
import re
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.toolbox.proof.traps import poisoned
from lessons.toolbox.simulator.machine import HERE, line, program, refuse


@dataclass(eq=False)
class Access:
    """Work in flight that uses a part of an allocation."""

    view: "Shared"
    writes: bool
    what: str
    barrier: object = None  # that tells when it has ended


class Allocation:
    """Shared memory of one program. data: poison until something is written."""

    def __init__(self, name: str, dtype: torch.dtype, shape: list[int]):
        self.name, self.data = name, poisoned(shape, dtype)
        self.accesses: list[Access] = []
        self.barriers: dict[int, object] = {}  # by their place


class Shared:
    """A shared memory descriptor: an allocation or a part of it. name: "k_smem[1]"."""

    def __init__(self, allocation: Allocation, data: Tensor, name: str):
        self.allocation, self.data, self.name = allocation, data, name
        self.dtype, self.shape = data.dtype, list(data.shape)

    # ------------------------------------------------------------ views

    def index(self, i) -> "Shared":
        """The i-th part of the first dimension."""
        if not 0 <= i < self.shape[0]:
            raise refuse(f"{self.name}.index({i}): there are {self.shape[0]}")
        return self._view(self.data[int(i)], f"{self.name}[{int(i)}]")

    def slice(self, start, length, dim=0) -> "Shared":
        """`length` rows of one dimension."""
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise refuse(f"{self.name}.slice({start}, {length}, {dim}): shape {self.shape}")
        name = f"{self.name}[{start}:{start + length}, dim {dim}]"
        return self._view(self.data.narrow(dim, int(start), int(length)), name)

    def permute(self, order) -> "Shared":
        """The same memory with its dimensions in another order."""
        return self._view(self.data.permute(*order), self.name)

    def reshape(self, shape) -> "Shared":
        """The same memory in another shape."""
        return self._view(self.data.view(*shape), self.name)

    def _view(self, data: Tensor, name: str) -> "Shared":
        return Shared(self.allocation, data, name)

    def overlaps(self, other: "Shared") -> bool:
        """Whether both views hold a common element."""
        if self.allocation is not other.allocation:
            return False
        (first, behind), (other_first, other_behind) = self._span(), other._span()
        if behind <= other_first or other_behind <= first:
            return False
        return bool(torch.isin(self._places(), other._places()).any())

    def _span(self) -> tuple[int, int]:
        steps = sum((n - 1) * stride for n, stride in zip(self.data.shape, self.data.stride()))
        return self.data.storage_offset(), self.data.storage_offset() + steps + 1

    def _places(self) -> Tensor:
        places = torch.arange(self.allocation.data.numel())
        layout = self.data.shape, self.data.stride(), self.data.storage_offset()
        return places.as_strided(*layout).flatten()

    # ------------------------------------------------------------ ordinary loads and stores

    def load(self, layout=None) -> Tensor:
        """The elements as a tensor, [*shape]."""
        self.check(writes=False, doing="this line")
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        """Write value, [*shape]."""
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            given = f"{value.dtype} {list(value.shape)}"
            raise refuse(f"{self.name}.store: got {given}; accepted: {self.dtype} {self.shape}")
        self.check(writes=True, doing="this line")
        self.data.copy_(value)
        program().unfenced.append((self, program().running))
        program().pause()

    # ------------------------------------------------------------ who uses it

    def check(self, writes: bool, doing: str) -> None:
        """Raise Hazard if work in flight forbids to read or write this part now."""
        for access in self.allocation.accesses:
            if (writes or access.writes) and self.overlaps(access.view):
                verb = "writes" if writes else "reads"
                still = "fills" if access.writes else "reads"
                hint = f" ({_last_wait(access.barrier)})" if access.barrier else ""
                raise refuse(f"{doing} {verb} {self.name}, which {access.what} still {still}{hint}")

    def check_fenced(self, doing: str) -> None:
        """Raise Hazard if an ordinary store to this part may not be visible to TMA and wgmma."""
        for view, _ in program().unfenced:
            if self.overlaps(view):
                raise refuse(f"{doing} reads {self.name}, stored without fence_async_shared()")

    def begin(self, writes: bool, what: str, barrier=None) -> Access:
        """From now on work in flight uses this part."""
        self.check(writes, what)
        if not writes:
            self.check_fenced(what)
        access = Access(self, writes, f"{what} of {line()}", barrier)
        self.allocation.accesses.append(access)
        return access

    def end(self, access: Access) -> None:
        """The work has ended."""
        self.allocation.accesses.remove(access)


def _last_wait(barrier) -> str:
    last = program().running.waits.get(barrier)
    name = barrier.name
    return f"its last wait for {name}: {last}" if last else f"it never waited for {name}"


def allocate_shared_memory(dtype, shape, layout=None, value=None) -> Shared:
    """gl.allocate_shared_memory: poison, or `value`. Its name is the variable's."""
    allocation = Allocation(_name_of_targets(), dtype, [int(n) for n in shape])
    view = Shared(allocation, allocation.data, allocation.name)
    if value is not None:
        view.store(value)
    return view


def fence_async_shared(cluster=False) -> None:
    """What this partition stored is visible to TMA and to the tensor cores from now on."""
    mine = program().running
    program().unfenced = [(view, owner) for view, owner in program().unfenced if owner is not mine]


def _name_of_targets() -> str:
    """The variables that the kernel's lines assign to, of the kernel and of the functions that it
    called: "k.tiles".
    """
    frame, names = sys._getframe(1), []
    while frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    while not frame.f_code.co_filename.startswith(HERE):
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if found := re.match(r"\s*(\w+) *=", text):
            names.insert(0, found[1])
        frame = frame.f_back
    return ".".join(names) or f"shared memory of {line()}"
