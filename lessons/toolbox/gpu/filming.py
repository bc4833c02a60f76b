"""What the machine sees of a launch's loads, stores and atomic operations, for a film.

The compiler makes many instructions of one `tl.load`, and each runs for some of a program's warps.
Here they become one access again: those of one operation that follow each other, until a warp
repeats an instruction, as in a loop, or closes a group of asynchronous copies.
"""

import ast
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from lessons.toolbox.gpu.counters import SECTOR, Counts, counting, pairs
from lessons.toolbox.gpu.global_memory import Buffer, GlobalMemory
from lessons.toolbox.gpu.instructions.memory import space_of
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.kernels.film import Access, Program

KINDS = {"ld": "load", "ldu": "load", "st": "store", "atom": "atomic", "red": "atomic"}


@contextmanager
def filming(accesses: list[Access], start_of: Callable[[int], int] = int) -> Iterator[None]:
    """Within it compiled kernels run slower, and at its end, by a Fault too, `accesses` has got
    theirs. start_of: the address that a storage is to have in the film, for the one that it has.
    """
    shots: list[Shot] = []
    try:
        with counting(lambda kernel: Filming(kernel, shots, start_of)):
            yield
    finally:
        accesses += [shot.developed() for shot in shots]


@dataclass
class Shot:
    """One access of one program, while it is being made."""

    kernel: str
    program: Program
    kind: str  # "load", "store" or "atomic"
    instruction: Instruction  # the first one
    seen: set[tuple[int, int]] = field(default_factory=set)  # (place in the code, warp) that ran
    addresses: list[np.ndarray] = field(default_factory=lambda: [np.zeros(0, np.int64)])
    outside: list[np.ndarray] = field(default_factory=lambda: [np.zeros(0, np.int64)])
    sectors: int = 0
    together: int = 0
    itemsize: int = 1

    def is_of(self, kind: str, instruction: Instruction) -> bool:
        """Whether the compiler made the instruction of the same operation, in the same call of the
        function that holds it.
        """
        return (self.kind, self.instruction.location) == (kind, instruction.location)

    def developed(self) -> Access:
        """As the film keeps it."""
        source = self.instruction.source
        addresses = np.concatenate(self.addresses)
        return Access(
            self.kernel,
            self.program,
            self.kind,
            first_line(source.file, source.number),
            addresses,
            np.concatenate(self.outside),
            self.sectors,
            -(-len(np.unique(addresses)) * self.itemsize // SECTOR),
            self.together,
        )


class Filming(Counts):
    """Adds each access of a launch to the shots, in the order in which it began."""

    def __init__(self, kernel: Kernel, shots: list[Shot], start_of: Callable[[int], int]):
        super().__init__(kernel)
        self.kernel, self.shots, self.start_of = kernel.name, shots, start_of
        self.current: dict[int, Shot] = {}  # of each program

    def executed(self, threads, mask, taking) -> None:
        """Some warps are at an instruction: begin an access of their programs, or go on with it."""
        super().executed(threads, mask, taking)
        instruction = self.instructions[threads.pc]
        if instruction.op == "cp" and instruction.has("commit_group"):
            self.current.clear()
        kind = kind_of(instruction)
        if kind is None:
            return
        lanes = threads.active(mask)
        both = np.stack([threads.program[lanes] - 1, threads.warp_of_program[lanes]])
        programs, warps = np.unique(both, axis=1)
        for program in np.unique(programs).tolist():
            here = {(threads.pc, warp) for warp in warps[programs == program].tolist()}
            shot = self.current.get(program)
            if not (shot and shot.is_of(kind, instruction)) or shot.seen & here:
                shot = Shot(self.kernel, threads.place_of(program), kind, instruction)
                self.current[program] = shot
                self.shots.append(shot)
            shot.seen |= here

    def access(self, threads, kind, address, size, lanes) -> None:
        """Lanes ask for `size` bytes each: what they touch is part of their programs' accesses."""
        super().access(threads, kind, address, size, lanes)
        which, offset = places_of(threads.memory.buffers, address)
        for program, number in np.unique([threads.program[lanes] - 1, which], axis=1).T.tolist():
            mine = (threads.program[lanes] - 1 == program) & (which == number)
            buffer, shot = threads.memory.buffers[number], self.current[program]
            itemsize = min(size, buffer.dtype.itemsize if buffer.dtype else size)
            elements = offset[mine, None] + np.arange(0, size, itemsize)
            inside = (elements >= 0) & (elements + itemsize <= len(buffer.data))
            begin = self.start_of(buffer.data.ctypes.data)
            shot.addresses.append(begin + elements[inside])
            shot.outside.append(begin + elements[~inside])
            shot.sectors += len(pairs(threads.warp[lanes[mine]], address[mine] // SECTOR)[0])
            shot.itemsize = itemsize
            shot.together = max(shot.together, size // itemsize)


@cache
def first_line(file: str, number: int) -> str:
    """The first line of the statement that line `number` belongs to, without its indentation. Of a
    call over more lines the compiler names that of an argument. Of CUDA C++ the line itself.
    """
    lines = linecache.getlines(file)
    if file.endswith(".cu"):
        return lines[number - 1].strip()
    statements = [
        node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.stmt)
    ]
    around = [node.lineno for node in statements if node.lineno <= number <= node.end_lineno]
    return lines[max(around) - 1].strip() if around else ""


def kind_of(instruction: Instruction) -> str | None:
    """ "load", "store" or "atomic" of an instruction that asks for global memory, or None."""
    if instruction.op == "cp" and instruction.has("global"):
        # of its two memories the one to write to is named first
        to_global = instruction.text.find("global") < instruction.text.find("shared")
        return "store" if to_global else "load"
    if instruction.op in KINDS and space_of(instruction) == "global":
        return KINDS[instruction.op]
    return None


def places_of(buffers: list[Buffer], address: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(number of the buffer, bytes from its first) of each address; of one in no buffer those of
    the buffer that it misses by least.
    """
    starts = np.array([GlobalMemory.address(i) for i in range(len(buffers))])
    sizes = np.array([len(buffer.data) for buffer in buffers])
    offset = address[:, None] - starts
    number = np.maximum(np.maximum(-offset, offset - sizes), 0).argmin(1)
    return number, np.take_along_axis(offset, number[:, None], 1)[:, 0]
