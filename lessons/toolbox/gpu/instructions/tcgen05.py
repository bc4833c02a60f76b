"""tcgen05: Blackwell's tensor core. One thread starts a matrix product, which reads shared memory
(A also tensor memory) and adds to sums in tensor memory, beside the warps.

    tcgen05.mma [d], a, b, what, p    d = a · b + d, or a · b where p does not hold
    tcgen05.mma….block_scale [d], a, b, what, [a_scales], [b_scales], p
                                      the same, each number times the scale of its block
    tcgen05.commit [mbarrier]         arrives when all that the thread has started so far is done

What may follow without a wait is said in `tcgen05_flights`, what `what` means in `tcgen05_shapes`,
where scales are in `tcgen05_scales`.

d has a row a lane. With M = 64 it fills the lower or the upper 16 lanes of each quarter, and so
must an A in tensor memory.

The manual also asks for a tcgen05.fence where a barrier of threads orders two of these
instructions. Triton 3.7 emits none, so none is asked for here.

Source: NVIDIA, PTX ISA 9.0, 9.7.16.4.1 (matrix descriptor), 9.7.16.10 (mma), 9.7.16.10.5 (lanes),
9.7.16.12 (commit).
"""

import numpy as np

from lessons.toolbox.gpu.instructions import tcgen05_memory, tcgen05_scales
from lessons.toolbox.gpu.instructions.descriptors import (
    operand_chunks,
    operand_numbers,
    swizzle_field,
)
from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.instructions.tcgen05_flights import (
    Flight,
    check_unread,
    check_written,
    is_its_own,
    land,
    started_by,
    take_off,
)
from lessons.toolbox.gpu.instructions.tcgen05_shapes import (
    ROW_BYTES,
    TYPES,
    Shape,
    scales_of,
    shape_of,
)
from lessons.toolbox.gpu.instructions.tensor_cores import BITS, numbers, product
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel
from lessons.toolbox.gpu.tensor_memory import HALF, LANES
from lessons.toolbox.gpu.threads import predicate_reader, reader

SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}  # bits 61 to 63 of a descriptor -> bytes of a row
QUARTER = 32  # lanes


def any_form(instruction: Instruction, kernel: Kernel):
    """Blackwell's family, one program at a time (cta_group::1)."""
    builders = {"mma": multiply, "commit": commit}
    builders |= tcgen05_memory.BUILDERS | tcgen05_scales.BUILDERS
    return builders[instruction.modifiers[0]](instruction, kernel)


# ---------------------------------------------------------------- products


def multiply(instruction: Instruction, kernel: Kernel):
    """tcgen05.mma.cta_group::1.kind::f16 [d], a, b, descriptor, keeps; with .block_scale the
    addresses of the scales stand before the last operand.
    """
    _, group, kind, *more = instruction.modifiers
    if group != "cta_group_1" or kind not in TYPES:
        raise ValueError(instruction.text)
    many = scales_of(kind, tuple(more))
    target, a, b, what, *of_scales, keeps = instruction.operands
    if len(of_scales) != (2 if many else 0) or (more and not many):
        raise ValueError(instruction.text)
    to = address_reader(target, kernel, "tensor")
    is_in_tensor_memory = isinstance(a, Address)
    of_a = address_reader(a, kernel, "tensor") if is_in_tensor_memory else reader(a, "u64")
    of_b, what, keeps = reader(b, "u64"), reader(what, "u32"), predicate_reader(keeps)
    of_scales = [address_reader(operand, kernel, "tensor") for operand in of_scales]

    def run(threads, mask):
        lanes = threads.active(mask)
        shape, places = shape_of(threads, kind, many, threads.of(what(threads), lanes))
        flight = started_by(threads, lanes, shape)
        if threads.counts:
            flops = 2 * shape.rows * shape.columns * shape.depth * len(lanes)
            threads.counts.columns["flops"][threads.pc] += flops
        base = to(threads)[lanes]
        right = from_shared(threads, flight, of_b(threads), 1)
        if is_in_tensor_memory:
            left = from_tensor(threads, flight, of_a(threads)[lanes], base)
        else:
            left = from_shared(threads, flight, of_a(threads), 0)
        if many:
            at = [read(threads)[lanes] for read in of_scales]
            left = left * tcgen05_scales.scales(threads, flight, at[0], shape.rows, places[0])
            right = right * tcgen05_scales.scales(threads, flight, at[1], shape.columns, places[1])
        kept = threads.of(keeps(threads), lanes)
        rows, first = sums_at(threads, base, shape)
        before_adding(threads, flight, rows, first, kept)
        at = (threads.cta[lanes][:, None, None], rows[:, :, None])
        at = (*at, (first[:, None] + np.arange(shape.columns))[:, None, :])
        words = threads.tensor.words
        c = np.where(kept[:, None, None], words[at].view(np.float32), np.float32(0))
        words[at] = product(left, right.swapaxes(1, 2), c).view(np.uint32)
        take_off(threads, flight)

    return run


def from_shared(threads, flight: Flight, descriptors, which: int) -> np.ndarray:
    """[lanes, rows, depth]: operand A (0) or B (1) in shared memory."""
    lanes, shape = flight.lanes, flight.shape
    type_, turned = shape.types[which], shape.turned[which]
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
    if threads.counts:
        threads.counts.matrix_read(threads, 16 * where[0].size, len(lanes))
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


def from_tensor(threads, flight: Flight, address, base) -> np.ndarray:
    """[lanes, rows, depth]: A in tensor memory, 8 columns. Raises Fault where d lies in other
    lanes.
    """
    tensor, lanes, shape = threads.tensor, flight.lanes, flight.shape
    type_ = shape.types[0]
    if type_ == "e2m1":
        threads.fail("the machine knows no A of 4 bits in tensor memory", lanes)
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
    check_written(threads, flight, cells, np.ones(cells.shape, dtype=bool), "reads")
    flight.reads = cells
    column = first[:, None, None] + np.arange(columns)
    words = tensor.words[threads.cta[lanes][:, None, None], rows[:, :, None], column]
    parts = np.ascontiguousarray(words).view(f"u{BITS[type_] // 8}")
    return numbers(parts, type_)


def before_adding(threads, flight: Flight, rows, first, kept) -> None:
    """Check d. What products of the same shape that the same thread started add to it comes before;
    of all else the thread must know that it is done.
    """
    tensor, lanes = threads.tensor, flight.lanes
    cells = tensor.cells_at(threads, rows[:, ::HALF], first, flight.shape.columns, lanes)
    if kept.any():
        tensor.check_written(threads, cells[kept], lanes[kept])
    others = ~is_its_own(threads, flight, cells, flight.shape)
    check_written(threads, flight, cells, others, "adds to")
    check_unread(threads, flight, cells)
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


KNOWN = {"tcgen05": any_form}
