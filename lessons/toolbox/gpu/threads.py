"""The threads of a launch, side by side: a register is an array with a number for each thread.

All programs of a grid (as many as fit) run in lockstep, because one operation of NumPy over
thousands of threads costs little more than over one. A register that is the same in every thread,
as a parameter is, is kept once: an array of length 1.
"""

from collections.abc import Callable

import numpy as np

from lessons.toolbox.gpu.clocks import Clocks
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.global_memory import GlobalMemory
from lessons.toolbox.gpu.mbarriers import MemoryBarriers
from lessons.toolbox.gpu.ptx import Kernel, Line
from lessons.toolbox.gpu.shared_memory import SharedMemory
from lessons.toolbox.gpu.tensor_memory import TensorMemory
from lessons.toolbox.gpu.values import DTYPES, UNSIGNED, number

WARP = 32
# What a register holds in a thread that never wrote it. It is no fault to read it: the compiler
# adds up with whole warps where some lanes hold nothing, and drops their results.
GARBAGE = {size: UNSIGNED[size](0xCDCDCDCDCDCDCDCD & ((1 << 8 * size) - 1)) for size in UNSIGNED}
GARBAGE_PREDICATE = np.bool_(True)


def garbage(bits: int) -> np.ndarray:
    """[1]: what a register of this width holds that no instruction writes."""
    value = GARBAGE_PREDICATE if bits == 1 else GARBAGE[bits // 8]
    return np.array([value], dtype=type(value))


Reader = Callable[["Threads"], np.ndarray]


class Threads:
    """The threads of some programs of a launch.

    programs: their indices in the grid, [P]; grid: (x, y, z); block: threads a program, (x, y, z).
    """

    def __init__(
        self,
        kernel: Kernel,
        programs: np.ndarray,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        memory: GlobalMemory,
        shared_bytes: int,
        parameters: dict[str, bytes],
        generator: np.random.Generator,
    ):
        self.kernel, self.grid, self.memory, self.random = kernel, grid, memory, generator
        self.parameters = parameters
        self.block_size = block[0] * block[1] * block[2]
        self.warps = -(-self.block_size // WARP)  # of a program
        self.num_programs, self.count = len(programs), len(programs) * self.warps * WARP
        self.lanes = np.arange(self.count)
        self.cta, self.thread = np.divmod(self.lanes, self.warps * WARP)
        self.lane = self.thread % WARP
        self.warp_of_program = self.thread // WARP
        self.warp = self.cta * self.warps + self.warp_of_program
        self.programs = programs
        self.program = (programs[self.cta] + 1).astype(np.int32)  # 0 means none
        has_tensor_memory = any(i.op == "tcgen05" for i in kernel.instructions)
        beside = ("the copy engine", "the tensor core")[: 1 + has_tensor_memory]
        self.clocks = Clocks(self.num_programs, self.warps, beside)
        self.shared = SharedMemory(
            self.num_programs, shared_bytes, self.clocks, smallest_access(kernel, "shared")
        )
        self.tensor = TensorMemory(self) if has_tensor_memory else None
        self.local = np.zeros((self.count, kernel.local_bytes), dtype=np.uint8)
        self.registers: dict[str, np.ndarray] = self.special(grid, block)
        self.mbarriers = MemoryBarriers(self)
        self.products = None  # matrix products beside the warps (wgmma)
        # register of such a product -> the threads that wrote it after their last wgmma.fence
        self.unfenced: dict[str, np.ndarray] = unfenced(kernel, self.count)
        self.events: list = []  # copies of the engine that have not ended: functions
        self.stores: list = []  # of the engine, that no thread has waited for
        self.maps: dict[str, object] = {}  # parameter -> tensor map
        # (place among the programs, address) of maps that the copy engine may see
        self.fenced_maps: set[tuple[int, int]] = set()
        self.alive = self.thread < self.block_size  # the last warp may have fewer than 32
        self.pc, self.seed, self.takes_turns = 0, 0, False  # the order's, see `machine`
        self.counts = None  # of `counters`, where they are asked for

    def special(self, grid: tuple, block: tuple) -> dict[str, np.ndarray]:
        """The registers that say which thread this is."""
        found = {}
        place, inner = self.programs[self.cta], self.thread
        for axis, blocks, threads in zip("xyz", grid, block):
            found[f"%ctaid.{axis}"] = place % blocks
            found[f"%tid.{axis}"] = inner % threads
            found[f"%nctaid.{axis}"] = np.array([blocks])
            found[f"%ntid.{axis}"] = np.array([threads])
            found[f"%cluster_ctaid.{axis}"] = np.array([0])
            found[f"%cluster_nctaid.{axis}"] = np.array([1])
            place, inner = place // blocks, inner // threads
        found |= {"%laneid": self.lane, "%warpid": self.warp_of_program}
        found |= {"%cluster_ctarank": np.array([0]), "%smid": self.cta % 1}
        found |= {name: value.astype(np.uint32) for name, value in found.items()}
        offsets = self.kernel.shared | self.kernel.local
        found |= {name: np.array([place], dtype=np.uint64) for name, place in offsets.items()}
        return found

    # ------------------------------------------------------------ registers

    def write(self, name: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        """Put a value into a register, of the threads in `mask` or of all. "_" takes anything."""
        if name == "_":
            return
        is_predicate = value.dtype == np.bool_
        if not is_predicate:
            value = value.view(UNSIGNED[value.dtype.itemsize])
        if mask is not None:
            old = self.registers.get(name)
            if old is None:
                old = GARBAGE_PREDICATE if is_predicate else GARBAGE[value.dtype.itemsize]
            value = np.where(mask, value, old)
        self.registers[name] = value

    def spread(self, value: np.ndarray) -> np.ndarray:
        """A number for each thread: [count]."""
        return value if len(value) == self.count else np.broadcast_to(value, self.count)

    def active(self, mask: np.ndarray | None) -> np.ndarray:
        """The threads of a mask, by number. None: all that have not ended."""
        if mask is None:
            return self.lanes if self.alive.all() else np.flatnonzero(self.alive)
        return np.flatnonzero(mask)

    def of(self, value: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """A register's value in some threads."""
        if len(value) == 1:
            return np.broadcast_to(value, len(lanes))
        return value if lanes is self.lanes else value[lanes]

    def fence(self, mask: np.ndarray | None) -> None:
        """fence.proxy.async: the hardware beside the warps sees what these have stored."""
        lanes = self.active(mask)
        warps = np.unique(np.stack([self.cta[lanes], self.warp_of_program[lanes]]), axis=1)
        self.clocks.fence(warps[0], warps[1])

    # ------------------------------------------------------------ words

    def line_of(self, place: int) -> Line:
        """The line of the source that an instruction belongs to."""
        return self.kernel.instructions[place].line

    def place_of(self, program: int) -> tuple[int, int, int]:
        """A program's place in the grid."""
        x, y, _ = self.grid
        return program % x, program // x % y, program // (x * y)

    def name_of(self, program: int) -> str:
        """The same in words."""
        x, y, z = self.place_of(program)
        return f"program ({x}, {y}, {z})"

    def fail(self, what: str, lanes: np.ndarray) -> None:
        """Raises Fault: what happened, at which line, in which thread."""
        instruction = self.kernel.instructions[self.pc]
        who = ""
        if len(lanes):
            first = int(lanes[0])
            who = (
                f", {self.name_of(int(self.program[first]) - 1)}, thread {int(self.thread[first])}"
            )
        raise Fault(
            f"{self.kernel.name}, {instruction.line}{who}: {what} [{instruction.text[:120]}] "
            f"(LADDER_ORDER={self.seed})"
        )


def unfenced(kernel: Kernel, count: int) -> dict[str, np.ndarray]:
    """At a kernel's begin no register of a warpgroup's product is fenced, and none that is copied
    into one.
    """
    products = [i for i in kernel.instructions if i.op == "wgmma" and i.has("mma_async")]
    names = {name for i in products for o in i.operands[:2] if isinstance(o, tuple) for name in o}
    moves = [i.operands for i in kernel.instructions if i.op == "mov" and names]
    while more := {of for to, of in moves if to in names and of[:2] == "%r"} - names:
        names |= more
    return {name: np.ones(count, dtype=bool) for name in names}


def reader(operand: str, type_: str) -> Reader:
    """How to read an operand as a type: a function of the threads that gives [count] or [1].

    The register may be wider than the type: its lower bits count.
    """
    dtype = DTYPES[type_]
    constant = number(operand, dtype)
    if constant is not None:
        return lambda threads: constant

    def read(threads: Threads) -> np.ndarray:
        value = threads.registers[operand]
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(UNSIGNED[dtype.itemsize])
        return value.view(dtype)

    return read


def predicate_reader(operand: str) -> Reader:
    """The same for a predicate, which may stand as !%p1."""
    if operand.lstrip("-").isdigit():
        constant = np.array([operand != "0"])
        return lambda threads: constant
    if operand.startswith("!"):
        return lambda threads: ~threads.registers[operand[1:]]
    return lambda threads: threads.registers[operand]


def smallest_access(kernel: Kernel, space: str) -> int:
    """The size of a kernel's smallest access to a space, at most 4 bytes: what is watched as
    one.
    """
    sizes = [4]
    for instruction in kernel.instructions:
        if instruction.op in ("ld", "st", "atom", "red") and instruction.has(space):
            sizes.append(DTYPES[instruction.type].itemsize)
        if instruction.op == "stmatrix" and space == "shared":
            sizes.append(2)
    return min(sizes)
