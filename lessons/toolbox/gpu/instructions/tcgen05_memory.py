"""tcgen05: warps and tensor memory. They allocate columns, and move rows to their registers and
back.

    tcgen05.alloc [place], columns    a warp allocates columns; the first is stored at place in
                                      shared memory
    tcgen05.dealloc d, columns
    tcgen05.ld.SHAPE.xN r, [d]        N registers of each thread from N columns
    tcgen05.st.SHAPE.xN [d], r
    tcgen05.wait::ld, wait::st        until the warp's own have ended

    32x32b       thread i has row i of the warp's quarter
    16x32bx2     threads 0 to 15 have 16 rows, threads 16 to 31 the same rows, `split` columns on

A load or store goes on beside its warp. Until it is waited for, a register that is being loaded may
not be read, and what is being stored belongs to no one.

Columns that hold nothing are loaded as NaN, and that is no fault: Triton loads ahead of a loop that
may not run, and drops the result. A matrix product that reads them is one.

Source: NVIDIA, PTX ISA 9.0, 9.7.16.7 (alloc), 9.7.16.2.3 (shapes), 9.7.16.8 (ld, st, wait).
"""

import re
from dataclasses import dataclass

import numpy as np

from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.instructions.tensor_cores import whole_warps
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.tensor_memory import HALF
from lessons.toolbox.gpu.threads import WARP, reader

SHAPES = ("32x32b", "16x32bx2")


def first_lanes(threads, mask) -> np.ndarray:
    """The first lane of each warp, where whole warps are here."""
    whole_warps(threads, mask)
    lanes = threads.active(mask)
    return lanes[threads.lane[lanes] == 0]


# ---------------------------------------------------------------- allocation


def allocate(instruction: Instruction, kernel: Kernel):
    """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], columns."""
    one_program(instruction)
    target, count = instruction.operands
    place, columns = address_reader(target, kernel, "shared"), reader(count, "u32")

    def run(threads, mask):
        lanes = first_lanes(threads, mask)
        wanted = int(threads.of(columns(threads), lanes)[0])
        firsts = threads.tensor.allocate(threads, wanted, lanes).astype(np.uint32)
        threads.shared.store(threads, place(threads)[lanes], 4, [firsts], lanes)

    return run


def free(instruction: Instruction, kernel: Kernel):
    """tcgen05.dealloc.cta_group::1.sync.aligned.b32 address, columns."""
    one_program(instruction)
    address, columns = (reader(operand, "u32") for operand in instruction.operands)

    def run(threads, mask):
        lanes = first_lanes(threads, mask)
        first = threads.of(address(threads), lanes).astype(np.int64)
        count = int(threads.of(columns(threads), lanes)[0])
        threads.tensor.free(threads, first, count, lanes)

    return run


def give_up(instruction: Instruction, kernel: Kernel):
    """relinquish_alloc_permit: the program allocates no more."""
    one_program(instruction)

    def run(threads, mask):
        threads.tensor.closed[threads.cta[first_lanes(threads, mask)]] = True

    return run


def one_program(instruction: Instruction) -> None:
    """Raises ValueError for the tensor memory of two programs (cta_group::2)."""
    if not instruction.has("cta_group_1"):
        raise ValueError(instruction.text)


# ---------------------------------------------------------------- rows


@dataclass
class Move:
    """One instruction's loads or stores in flight. names: the registers that a load fills; lanes:
    the first of each warp; cells: [warps, N].
    """

    names: tuple[str, ...]
    lanes: np.ndarray
    place: int
    cells: np.ndarray


def rows(instruction: Instruction, kernel: Kernel):
    """tcgen05.ld.sync.aligned.32x32b.xN.b32 r, [d]; tcgen05.st.sync.aligned.16x32bx2.xN.b32 [d],
    split, r.
    """
    what, _, _, shape, count, type_ = instruction.modifiers
    *where, registers = instruction.operands
    if what == "ld":
        registers, *where = instruction.operands
    names = registers if isinstance(registers, tuple) else (registers,)
    if shape not in SHAPES or type_ != "b32" or re.fullmatch(r"x\d+", count) is None:
        raise ValueError(instruction.text)
    if len(names) != int(count[1:]) or len(where) != 1 + SHAPES.index(shape):
        raise ValueError(instruction.text)
    address = address_reader(where[0], kernel, "tensor")
    split = int(where[1], 0) if len(where) > 1 else None
    move = load if what == "ld" else store

    def run(threads, mask):
        lanes = first_lanes(threads, mask)
        base = address(threads)[lanes]
        check_quarter(threads, base >> 16, split, lanes)
        move(threads, names, lanes, base >> 16, base & 0xFFFF, split)

    return run


def check_quarter(threads, row: np.ndarray, split: int | None, lanes: np.ndarray) -> None:
    """Raises Fault for lanes of tensor memory that the warp cannot reach."""
    quarter = threads.warp_of_program[lanes] % 4 * WARP
    wrong = (row != quarter) & ((split is None) | (row != quarter + HALF))
    if wrong.any():
        k = int(np.flatnonzero(wrong)[0])
        threads.fail(
            f"warp {int(threads.warp_of_program[lanes[k]])} at lane {int(row[k])} of tensor "
            f"memory; it reaches lanes {int(quarter[k])} to {int(quarter[k]) + WARP - 1}",
            lanes[k : k + 1],
        )


def cells_of(threads, row, first, count: int, split: int | None, lanes) -> np.ndarray:
    """[warps, N]: the cells that each warp touches."""
    tensor = threads.tensor
    if split is None:
        halves = row[:, None] + np.array([0, HALF])
        return tensor.cells_at(threads, halves, first, count, lanes)
    parts = [tensor.cells_at(threads, row[:, None], first + k, count, lanes) for k in (0, split)]
    return np.concatenate(parts, axis=1)


def words_at(threads, row, first, count: int, split: int | None, lanes) -> tuple:
    """Where in `words` each register of each thread is: an index for [warps, threads, count]."""
    thread = np.arange(WARP)
    mine = thread if split is None else thread % HALF
    ahead = 0 * thread if split is None else thread // HALF * split
    column = (first[:, None] + ahead)[:, :, None] + np.arange(count)
    return threads.cta[lanes][:, None, None], (row[:, None] + mine)[:, :, None], column


def load(threads, names, lanes, row, first, split) -> None:
    """The registers hold the rows, but may be read only after wait::ld."""
    tensor = threads.tensor
    cells = cells_of(threads, row, first, len(names), split, lanes)
    warp = note(threads, tensor.cells.note_read, cells, lanes)
    tensor.cells.begin_read(threads.pc, cells.reshape(-1), warp)
    found = tensor.words[words_at(threads, row, first, len(names), split, lanes)]
    here = np.zeros(threads.count, dtype=bool)
    here.reshape(-1, WARP)[lanes // WARP] = True
    for k, name in enumerate(names):
        value = np.zeros(threads.count, dtype=np.uint32)
        value.reshape(-1, WARP)[lanes // WARP] = found[:, :, k]
        threads.write(name, value, here)
    tensor.loads.append(Move(names, lanes, threads.pc, cells))


def store(threads, names, lanes, row, first, split) -> None:
    """The rows hold the registers; no one may touch them before wait::st."""
    tensor = threads.tensor
    cells = cells_of(threads, row, first, len(names), split, lanes)
    warp = note(threads, tensor.cells.note_write, cells, lanes)
    tensor.cells.begin_write(threads.pc, cells.reshape(-1), warp)
    values = [threads.spread(threads.registers[name]).reshape(-1, WARP) for name in names]
    at = words_at(threads, row, first, len(names), split, lanes)
    tensor.words[at] = np.stack([value[lanes // WARP] for value in values], axis=2)
    tensor.stores.append(Move((), lanes, threads.pc, cells))


def note(threads, how, cells: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Check and note an access of the lanes' warps. Returns the warp of each cell."""
    each = np.repeat(lanes, cells.shape[1])
    warp = threads.warp_of_program[each]
    how(threads, cells.reshape(-1), threads.cta[each], warp, each)
    return warp


def wait(instruction: Instruction, kernel: Kernel):
    """tcgen05.wait::ld.sync.aligned: for the loads of these warps; wait::st: for their stores."""
    which = {"wait_ld": "loads", "wait_st": "stores"}[instruction.modifiers[0]]

    def run(threads, mask):
        here = np.zeros(threads.count, dtype=bool)
        here[first_lanes(threads, mask)] = True
        left, cells = [], threads.tensor.cells
        end = cells.end_read if which == "loads" else cells.end_write
        for move in getattr(threads.tensor, which):
            done = here[move.lanes]
            lanes = move.lanes[done][:, None]
            end(move.place, move.cells[done], threads.cta[lanes], threads.warp_of_program[lanes])
            if not done.all():
                left.append(Move(move.names, move.lanes[~done], move.place, move.cells[~done]))
        setattr(threads.tensor, which, left)
        for move in left:  # another's read of the same cells stays marked
            if which == "loads":
                warp = threads.warp_of_program[move.lanes][:, None]
                cells.begin_read(move.place, move.cells, warp)

    return run


def fence(instruction: Instruction, kernel: Kernel):
    """tcgen05.fence::before_thread_sync, after_thread_sync: nothing here, because a barrier of
    threads orders these instructions already (see `tcgen05`).
    """
    return lambda threads, mask: None


BUILDERS = {
    "alloc": allocate,
    "dealloc": free,
    "relinquish_alloc_permit": give_up,
    "ld": rows,
    "st": rows,
    "wait_ld": wait,
    "wait_st": wait,
    "fence_before_thread_sync": fence,
    "fence_after_thread_sync": fence,
}
