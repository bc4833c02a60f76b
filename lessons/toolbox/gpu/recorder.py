"""What one warp of a launch does, step by step: which instruction, what it reads, what it changes,
and the addresses that its lanes ask for.

    recording = record_warp(lambda: kernel[grid](x, out, n, BLOCK=128), program=0, warp=0)
    recording.steps[0].instruction, recording.steps[0].written    {register: [32], or [1] for all}

Kernels have to be compiled for it: in a process with LADDER_CHIP (`another_process.call` starts
one).
"""

import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lessons.toolbox.gpu.counters import GLOBAL, SHARED, Counts, counting
from lessons.toolbox.gpu.decode import WITHOUT_RESULT, names
from lessons.toolbox.gpu.global_memory import WINDOW
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.kernels.launches import watching_launches


@dataclass(frozen=True)
class Request:
    """What a warp's lanes ask of memory in one instruction."""

    kind: str  # "loaded", "stored" (global memory) or "shared"
    address: np.ndarray  # [lanes], of each lane that asks
    size: int  # bytes a lane
    lanes: np.ndarray  # which of the 32 ask
    counted: dict[str, int]  # the columns of counters.GLOBAL or SHARED, of this request alone


@dataclass
class Step:
    """One instruction of the warp. lanes: [32] bool, those that took part. read, written:
    {register: [32] values, or [1] where every lane has the same}; bool for predicates.
    """

    place: int
    instruction: Instruction
    lanes: np.ndarray
    read: dict[str, np.ndarray]
    written: dict[str, np.ndarray] = field(default_factory=dict)
    request: Request | None = None


@dataclass
class Recording:
    """The steps of one warp of one launch."""

    name: str
    program: int
    warp: int
    instructions: list[Instruction]
    steps: list[Step] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)  # the arguments, in the order of addresses
    dtypes: dict[str, str] = field(default_factory=dict)  # {argument: "float32"}

    def place_in(self, address: np.ndarray) -> tuple[str, np.ndarray] | None:
        """(the argument, bytes from its first element) of addresses; None for plain numbers."""
        number = int(address[0]) >> WINDOW
        if not 0 < number <= len(self.buffers) or (address >> WINDOW != number).any():
            return None
        return self.buffers[number - 1], address - (number << WINDOW)

    @property
    def floats(self) -> set[str]:
        """The registers that some instruction adds, multiplies or compares as floats."""
        calculations = [i for i in self.instructions if i.type.startswith("f") and i.op != "cvt"]
        return {name for i in calculations for name in names(i.operands)}

    def code(self, number: int) -> str:
        """A line of the kernel's source."""
        return linecache.getline(self.file, number).rstrip()

    @property
    def file(self) -> str:
        return next(i.source.file for i in self.instructions if i.source)


class WarpSteps(Counts):
    """Counts of one warp alone, and its steps."""

    def __init__(self, kernel: Kernel, recording: Recording):
        super().__init__(kernel)
        self.kernel, self.recording, self.open = kernel, recording, None
        recording.name, recording.instructions = kernel.name, list(kernel.instructions)
        recording.steps.clear()

    def mine(self, threads) -> np.ndarray:
        """[count] bool: the threads of the warp."""
        program = threads.program == self.recording.program + 1
        return program & (threads.warp_of_program == self.recording.warp)

    def executed(self, threads, mask, taking) -> None:
        """Begin a step if the warp is here."""
        mine = self.mine(threads)
        here = mine if mask is None else mask & mine
        self.open = None
        if not here.any():
            return
        self.recording.buffers = [buffer.name for buffer in threads.memory.buffers]
        active = np.zeros(threads.count, dtype=bool)
        active[threads.active(taking)] = True
        instruction = self.kernel.instructions[threads.pc]
        step = Step(threads.pc, instruction, active[mine], {})
        known = self.kernel.steps[threads.pc].reads & threads.registers.keys()
        in_order = [instruction.predicate, *names(instruction.operands)]
        for name in dict.fromkeys(name for name in in_order if name in known):
            step.read[name] = values(threads.registers[name], mine)
        self.recording.steps.append(step)
        self.open = step

    def done(self, threads) -> None:
        """End it: what is in the registers now."""
        if self.open is None or self.open.instruction.op in WITHOUT_RESULT:
            return
        for name in names(self.open.instruction.operands[:1]):
            if name in threads.registers:
                self.open.written[name] = values(threads.registers[name], self.mine(threads))

    def access(self, threads, kind, address, size, lanes) -> None:
        """Global memory: keep and count what the warp asks for."""
        self._keep(threads, kind, address, size, lanes, GLOBAL)

    def shared_access(self, threads, address, size, lanes) -> None:
        """Shared memory, likewise."""
        self._keep(threads, "shared", address, size, lanes, SHARED)

    def _keep(self, threads, kind, address, size, lanes, columns) -> None:
        own = self.mine(threads)[lanes]
        if self.open is None or not own.any():
            return
        before = {name: self.columns[name][threads.pc] for name in columns}
        if kind == "shared":
            super().shared_access(threads, address[own], size, lanes[own])
        else:
            super().access(threads, kind, address[own], size, lanes[own])
        counted = {name: int(self.columns[name][threads.pc] - before[name]) for name in columns}
        self.open.request = Request(
            kind, address[own].copy(), size, threads.lane[lanes[own]], counted
        )


def values(register: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """[1] or [32] of a register of all threads."""
    return (register if len(register) == 1 else register[mine]).copy()


def record_warp(launch: Callable[[], object], program: int = 0, warp: int = 0) -> Recording:
    """Run launch(), which starts one kernel, and keep what a warp of a program does. program: its
    place in the grid, x first. Raises ValueError if there is no such warp; Fault.
    """
    recording = Recording("", program, warp, [])

    def told(name: str, tensors: dict) -> None:
        recording.dtypes = {
            name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()
        }

    with watching_launches(told), counting(partial(WarpSteps, recording=recording)):
        launch()
    if not recording.steps:
        raise ValueError(
            f"program {program}, warp {warp}: nothing ran; accepted: those of a compiled launch"
        )
    return recording
