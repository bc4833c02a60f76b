"""tcgen05: Blackwell's tensor core. One thread starts a matrix product, which reads shared memory
(A also tensor memory) and adds to sums in tensor memory, beside the warps.

    tcgen05.mma [d], a, b, what, p    d = a · b + d, or a · b where p does not hold
    tcgen05.commit [mbarrier]         arrives when all that the thread has started so far is done

Products of one shape on the same d go one after another. Anything else that touches what a product
reads or writes has to wait at an mbarrier that it was committed to.

`what` is the instruction descriptor: types, M, N, which operands are transposed. d has a row a
lane. With M = 64 it fills the lower or the upper 16 lanes of each quarter, and so must an A in
tensor memory.

The manual also asks for a tcgen05.fence where a barrier of threads orders two of these
instructions. Triton 3.7 emits none, so none is asked for here.

Source: NVIDIA, PTX ISA 9.0, 9.7.16.4 (descriptors), 9.7.16.6 (what is ordered), 9.7.16.10
(mma), 9.7.16.10.5 (lanes), 9.7.16.12 (commit).
"""

from dataclasses import dataclass

import numpy as np

from lessons.toolbox.gpu.faults import UnknownInstruction
from lessons.toolbox.gpu.instructions import tcgen05_memory
from lessons.toolbox.gpu.instructions.descriptors import (
    operand_chunks,
    operand_numbers,
    swizzle_field,
)
from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.instructions.tensor_cores import BITS, numbers, product
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel
from lessons.toolbox.gpu.tensor_memory import HALF, LANES
from lessons.toolbox.gpu.threads import predicate_reader, reader

SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}  # bits 61 to 63 of a descriptor -> bytes of a row
# kind -> the types that an instruction descriptor may name
TYPES = {
    "kind_f16": {0: "f16", 1: "bf16"},
    "kind_tf32": {2: "tf32"},
    "kind_f8f6f4": {0: "e4m3", 1: "e5m2"},
}
ROW_BYTES = 32  # of an operand: the K of one instruction
QUARTER = 32  # lanes
OTHER_FIELDS = 0b1110_0000_1000_0000_0110_0000_0100_1111  # sparsity, saturation, signs, shifts


@dataclass(frozen=True)
class Shape:
    """What an instruction descriptor says. turned: A and B have a row in memory for each k."""

    rows: int
    columns: int
    depth: int
    types: tuple[str, str]
    turned: tuple[bool, bool]


def shape_of(threads, kind: str, what: np.ndarray) -> Shape:
    """Raises UnknownInstruction for what the machine does not compute."""
    bits = int(what[0])
    types = [TYPES[kind].get(bits >> first & 7) for first in (7, 10)]
    if (what != bits).any() or bits & OTHER_FIELDS or bits >> 4 & 3 != 1 or None in types:
        text = threads.kernel.instructions[threads.pc].text
        raise UnknownInstruction(
            f"{threads.kernel.name}, {threads.line_of(threads.pc)}: the machine does not know the "
            f"instruction descriptor {bits:#x} of {text!r}"
        )
    turned = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    depth = 8 * ROW_BYTES // BITS[types[0]]
    return Shape((bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, depth, tuple(types), turned)


@dataclass
class Flight:
    """Products of one instruction in flight. lanes: the threads that started them; known: what
    their warps knew then (`clocks`); cells of shared and tensor memory that they touch: [lanes, N].
    """

    lanes: np.ndarray
    place: int
    known: np.ndarray
    kind: tuple  # of what goes one after another: shape, and where d begins
    shared: list
    reads: np.ndarray
    writes: np.ndarray

    def of(self, chosen: np.ndarray) -> "Flight":
        """The part of some of its lanes. chosen: [lanes] bool."""
        lanes, shared = self.lanes[chosen], []
        for each, marks in self.shared:
            held = np.isin(each, lanes)
            shared.append((each[held], [(who[held], cell[held], at) for who, cell, at in marks]))
        parts = self.reads[chosen], self.writes[chosen]
        base = tuple(np.array(self.kind[1])[chosen])
        known = self.known[:, chosen]
        return Flight(lanes, self.place, known, (self.kind[0], base), shared, *parts)


def any_form(instruction: Instruction, kernel: Kernel):
    """Blackwell's family, one program at a time (cta_group::1)."""
    builders = {"mma": multiply, "commit": commit} | tcgen05_memory.BUILDERS
    return builders[instruction.modifiers[0]](instruction, kernel)


# ---------------------------------------------------------------- products


def multiply(instruction: Instruction, kernel: Kernel):
    """tcgen05.mma.cta_group::1.kind::f16 [d], a, b, descriptor, keeps."""
    _, group, kind = instruction.modifiers
    target, a, b, what, keeps = instruction.operands
    if group != "cta_group_1" or kind not in TYPES:
        raise ValueError(instruction.text)
    to = address_reader(target, kernel, "tensor")
    is_in_tensor_memory = isinstance(a, Address)
    of_a = address_reader(a, kernel, "tensor") if is_in_tensor_memory else reader(a, "u64")
    of_b, what, keeps = reader(b, "u64"), reader(what, "u32"), predicate_reader(keeps)

    def run(threads, mask):
        lanes = threads.active(mask)
        if len(lanes) != len(np.unique(threads.cta[lanes])):
            threads.fail("more than one thread of the program starts the product", lanes)
        shape = shape_of(threads, kind, threads.of(what(threads), lanes))
        if threads.counts:
            flops = 2 * shape.rows * shape.columns * shape.depth * len(lanes)
            threads.counts.columns["flops"][threads.pc] += flops
        base = to(threads)[lanes]
        known = threads.clocks.told(threads.cta[lanes], threads.warp_of_program[lanes])
        nothing = np.zeros((len(lanes), 0), dtype=np.int64)
        order = shape, tuple(base)
        flight = Flight(lanes, threads.pc, known, order, [], nothing, nothing)
        right = from_shared(threads, flight, of_b(threads), shape, 1)
        if is_in_tensor_memory:
            left = from_tensor(threads, flight, of_a(threads)[lanes], base, shape)
        else:
            left = from_shared(threads, flight, of_a(threads), shape, 0)
        kept = threads.of(keeps(threads), lanes)
        rows, first = sums_at(threads, base, shape)
        before_adding(threads, flight, rows, first, shape, kept)
        at = (threads.cta[lanes][:, None, None], rows[:, :, None])
        at = (*at, (first[:, None] + np.arange(shape.columns))[:, None, :])
        words = threads.tensor.words
        c = np.where(kept[:, None, None], words[at].view(np.float32), np.float32(0))
        words[at] = product(left, right.swapaxes(1, 2), c).view(np.uint32)
        threads.tensor.started += 1
        threads.tensor.flights.append((threads.tensor.started, flight))

    return run


def from_shared(threads, flight: Flight, descriptors, shape: Shape, which: int) -> np.ndarray:
    """[lanes, rows, depth]: operand A (0) or B (1) in shared memory."""
    lanes, type_, turned = flight.lanes, shape.types[which], shape.turned[which]
    descriptor = threads.of(descriptors, lanes)
    rows = (shape.rows, shape.columns)[which]
    if turned and BITS[type_] == 32:
        threads.fail("an operand of tf32 cannot be transposed", lanes)
    width = SWIZZLES.get(swizzle_field(descriptor, 61))
    if width is None:
        threads.fail("the machine does not know this swizzle of the descriptor", lanes)
    where = operand_chunks(descriptor, width, rows, shape.depth, type_, turned)
    each = np.repeat(lanes, where[0].size)
    places = threads.shared.places(threads, where.reshape(-1), 16, each)
    agent = threads.clocks.agent("the tensor core")
    flight.shared.append((each, threads.shared.note_read_beside(threads, places, 16, each, agent)))
    return operand_numbers(threads, where, lanes, type_, turned)


def half_of(threads, base: np.ndarray, rows: int, lanes: np.ndarray) -> np.ndarray:
    """[lanes]: 0, or 16 for the upper halves of the quarters. Raises Fault for any other lane."""
    lane = base >> 16
    accepted = (0, HALF) if rows == 64 else (0,)
    if rows not in (64, 128) or not np.isin(lane, accepted).all():
        threads.fail(
            f"a matrix of {rows} rows at lane {int(lane[0])}; accepted: 128 rows at lane 0, 64 "
            f"rows at lane 0 or 16",
            lanes,
        )
    return lane


def rows_of(half: np.ndarray, rows: int) -> np.ndarray:
    """[lanes, rows]: the lane of tensor memory that each row of a matrix lies in."""
    row = np.arange(rows)
    if rows == LANES:
        return np.broadcast_to(row, (len(half), rows))
    return half[:, None] + row // HALF * QUARTER + row % HALF


def sums_at(threads, base: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(lane of each row, first column) of d."""
    lanes = np.zeros(0, dtype=np.int64)
    return rows_of(half_of(threads, base, shape.rows, lanes), shape.rows), base & 0xFFFF


def from_tensor(threads, flight: Flight, address, base, shape: Shape) -> np.ndarray:
    """[lanes, rows, depth]: A in tensor memory, 8 columns. Raises Fault where d lies in other
    lanes.
    """
    tensor, lanes, type_ = threads.tensor, flight.lanes, shape.types[0]
    half, first = half_of(threads, address, shape.rows, lanes), address & 0xFFFF
    if (half != base >> 16).any():
        threads.fail(
            f"A begins at lane {int(half[0])} of tensor memory and d at lane {int(base[0]) >> 16}: "
            f"the tensor core reads A from the lanes of d",
            lanes,
        )
    rows, columns = rows_of(half, shape.rows), ROW_BYTES // 4
    cells = tensor.cells_at(threads, rows[:, ::HALF], first, columns, lanes)
    tensor.check_written(threads, cells, lanes)
    each = np.repeat(lanes, cells.shape[1])
    warp, cta = threads.warp_of_program[each], threads.cta[each]
    tensor.cells.after_write(threads, cells.reshape(-1), cta, warp, each, "reads")
    flight.reads = cells
    column = first[:, None, None] + np.arange(columns)
    words = tensor.words[threads.cta[lanes][:, None, None], rows[:, :, None], column]
    parts = np.ascontiguousarray(words).view(f"u{BITS[type_] // 8}")
    return numbers(parts, type_)


def before_adding(threads, flight: Flight, rows, first, shape: Shape, kept) -> None:
    """Check and mark d. It may be what products of the same shape that the same thread started are
    still adding to; otherwise the thread must know that it is done.
    """
    tensor, lanes = threads.tensor, flight.lanes
    cells = tensor.cells_at(threads, rows[:, ::HALF], first, shape.columns, lanes)
    if kept.any():
        tensor.check_written(threads, cells[kept], lanes[kept])
    own = [
        other
        for _, other in tensor.flights
        if other.kind == flight.kind and np.array_equal(other.lanes, lanes)
    ]
    agent = threads.clocks.agent("the tensor core")
    if not own or not np.array_equal(own[-1].writes, cells):
        each = np.repeat(lanes, cells.shape[1])
        warp, cta = threads.warp_of_program[each], threads.cta[each]
        tensor.cells.after_write(threads, cells.reshape(-1), cta, warp, each, "adds to")
        tensor.cells.after_reads(threads, cells.reshape(-1), cta, warp, each)
    for marked, begin in ((flight.reads, "begin_read"), (cells, "begin_write")):
        getattr(tensor.cells, begin)(threads.pc, marked, agent)
    flight.writes = cells


# ---------------------------------------------------------------- their end


def commit(instruction: Instruction, kernel: Kernel):
    """tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mbarrier]."""
    known = {"commit", "cta_group_1", "mbarrier_arrive_one", "shared_cluster", "b64"}
    if not known.issuperset(instruction.modifiers):
        raise ValueError(instruction.text)
    barrier = address_reader(instruction.operands[0], kernel, "shared")

    def run(threads, mask):
        lanes, place = threads.active(mask), threads.pc
        where, started = barrier(threads)[lanes], threads.tensor.started

        def end():
            threads.pc = place
            land(threads, started, lanes)
            for at in np.unique(where):
                threads.mbarriers.commit(int(at), lanes[where == at])

        threads.events.append(end)

    return run


def land(threads, started: int, lanes: np.ndarray) -> None:
    """The first `started` products, those of the lanes, are done: what they read is free, what they
    wrote is there.
    """
    tensor, going_on = threads.tensor, []
    agent = threads.clocks.agent("the tensor core")
    for number, flight in tensor.flights:
        done = np.isin(flight.lanes, lanes) & (number <= started)
        if not done.all():
            going_on.append((number, flight.of(~done)))
        if not done.any():
            continue
        ended = flight.of(done)
        threads.clocks.learn(threads.cta[ended.lanes], agent, ended.known)
        cta = threads.cta[ended.lanes][:, None]
        tensor.cells.end_write(ended.place, ended.writes, cta, agent)
        tensor.cells.end_read(ended.place, ended.reads, cta, agent)
        for each, marks in ended.shared:
            threads.shared.end_read(threads, marks, threads.cta[each])
    tensor.flights = going_on
    for _, other in going_on:  # what others still read or write stays marked
        tensor.cells.begin_write(other.place, other.writes, agent)
        tensor.cells.begin_read(other.place, other.reads, agent)
        for _, marks in other.shared:
            threads.shared.still_read(marks)


KNOWN = {"tcgen05": any_form}
