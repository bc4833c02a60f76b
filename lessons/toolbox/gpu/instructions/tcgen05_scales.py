"""tcgen05: scales of blocks. A copy brings them from shared memory to tensor memory, and a product
reads them there.

    tcgen05.cp.cta_group::1.32x128b.warpx4 [d], s     32 rows of 16 bytes: a lane each, 4 columns,
                                                      the same in all four quarters
    tcgen05.mma…block_scale.scale_vec::4X [d], a, b, what, [a_scales], [b_scales], p

A product reads the scales of row r of A (or of B) in lane r mod 32, column r / 32: bytes `place`,
`place` + 1, … of its 32 bits, one for each block of k. All four quarters have to hold the same.

    UE8M0   2^(e − 127), 255 is NaN        UE4M3   E4M3 without its sign

Source: NVIDIA, PTX ISA 9.0, 9.7.16.9.2 (cp), 9.7.16.10.7 (block scaling); cuBLAS documentation, 1D
Block Scaling Factors Layout (the order in memory for which one copy is enough).
"""

import numpy as np

from lessons.toolbox.gpu.instructions.descriptors import chunks, swizzle_field
from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.instructions.tcgen05_flights import (
    Flight,
    check_unread,
    check_written,
    is_its_own,
    started_by,
    take_off,
)
from lessons.toolbox.gpu.instructions.tcgen05_shapes import Shape
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.tensor_memory import HALF, LANES
from lessons.toolbox.gpu.threads import WARP, reader
from lessons.toolbox.gpu.values import from_e8m0, from_fp8

QUARTERS = LANES // WARP
WORDS = 4  # columns that a copy fills


def copy(instruction: Instruction, kernel: Kernel):
    """tcgen05.cp.cta_group::1.32x128b.warpx4 [d], descriptor; the last two words in any order."""
    if set(instruction.modifiers) != {"cp", "cta_group_1", "32x128b", "warpx4"}:
        raise ValueError(instruction.text)
    target, source = instruction.operands
    to, source = address_reader(target, kernel, "tensor"), reader(source, "u64")

    def run(threads, mask):
        lanes = threads.active(mask)
        flight = started_by(threads, lanes, None)
        data = from_shared(threads, flight, threads.of(source(threads), lanes))
        first = first_column(threads, to(threads)[lanes], lanes)
        cells = all_lanes(threads, first, WORDS, lanes)
        check_written(threads, flight, cells, np.ones(cells.shape, dtype=bool), "overwrites")
        check_unread(threads, flight, cells)
        cta, lane = threads.cta[lanes][:, None, None], np.arange(LANES)[:, None]
        column = (first[:, None] + np.arange(WORDS))[:, None, :]
        threads.tensor.words[cta, lane, column] = np.tile(data, (1, QUARTERS, 1))
        flight.writes = cells
        take_off(threads, flight)

    return run


def from_shared(threads, flight: Flight, descriptor: np.ndarray) -> np.ndarray:
    """[lanes, 32, 4] uint32: 32 rows of 16 bytes, 8 of which lie side by side."""
    if swizzle_field(descriptor, 61):
        threads.fail("scales of a swizzled row; accepted: no swizzle", flight.lanes)
    where = chunks(descriptor, 0, WARP, 16, across=False)
    each = np.repeat(flight.lanes, WARP)
    places = threads.shared.places(threads, where.reshape(-1), 16, each)
    agent = threads.clocks.agent("the tensor core")
    flight.shared.append((each, threads.shared.note_read_beside(threads, places, 16, each, agent)))
    if threads.counts:
        threads.counts.matrix_read(threads, WARP * 16, len(flight.lanes))
    stored = np.ascontiguousarray(threads.shared.bytes.reshape(-1, 16)[places // 16])
    return stored.view(np.uint32).reshape(-1, WARP, WORDS)


def first_column(threads, address: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """[lanes]. Raises Fault for an address in another lane than the first."""
    if (address >> 16).any():
        threads.fail(f"scales from lane {int(address.max()) >> 16} on; accepted: lane 0", lanes)
    return address & 0xFFFF


def all_lanes(threads, first: np.ndarray, count: int, lanes: np.ndarray) -> np.ndarray:
    """[lanes, N]: the cells of whole columns."""
    halves = np.broadcast_to(np.arange(0, LANES, HALF), (len(lanes), LANES // HALF))
    return threads.tensor.cells_at(threads, halves, first, count, lanes)


def scales(threads, flight: Flight, address, rows: int, place: int) -> np.ndarray:
    """[lanes, rows, k]: what the numbers of an operand are multiplied by, one by one. Notes the
    cells in flight.reads. address: [lanes]; place: the byte where the scales of a row begin.
    """
    shape, tensor, lanes = flight.shape, threads.tensor, flight.lanes
    columns = -(-rows // WARP)
    first = first_column(threads, address, lanes)
    cells = all_lanes(threads, first, columns, lanes)
    tensor.check_written(threads, cells, lanes)
    check_written(threads, flight, cells, ~is_its_own(threads, flight, cells, None), "reads")
    flight.reads = np.concatenate([flight.reads, cells], axis=1)
    column = (first[:, None] + np.arange(columns))[:, None, :]
    words = tensor.words[threads.cta[lanes][:, None, None], np.arange(LANES)[:, None], column]
    quarters = words.reshape(len(lanes), QUARTERS, WARP, columns)
    if (quarters != quarters[:, :1]).any():
        threads.fail("the four quarters of tensor memory hold different scales", lanes)
    # row r: lane r % 32, column r // 32
    of_row = np.ascontiguousarray(quarters[:, 0].swapaxes(1, 2)).reshape(len(lanes), -1)[:, :rows]
    stored = np.ascontiguousarray(of_row).view(np.uint8).reshape(len(lanes), rows, 4)
    return numbers_of(stored[:, :, place : place + shape.scales], shape)


def numbers_of(stored: np.ndarray, shape: Shape) -> np.ndarray:
    """[..., scales] uint8 -> [..., k] float64."""
    if shape.scale_type == "ue8m0":
        found = from_e8m0(stored)
    else:
        found = from_fp8(stored & 0x7F, "e4m3").reshape(stored.shape).astype(np.float64)
    return np.repeat(found, shape.depth // shape.scales, axis=-1)


BUILDERS = {"cp": copy}
