"""tcgen05: what goes on beside the warps. A product and a copy of scales are in flight from the
moment that a thread starts them until an mbarrier that it committed them to tells their end.

Which of a thread's own may follow each other without a wait, in the same order (`->`):

    mma -> mma    products of one shape on the same d
    cp  -> mma    a copy of scales, and the product that reads them

Nothing else. A copy that overwrites scales has to wait for the products that read them, and
a warp that loads sums for the products that add to them.

Source: NVIDIA, PTX ISA 9.0, 9.7.16.6.2 (pipelined instructions), 9.7.16.12 (commit).
"""

from dataclasses import dataclass, field

import numpy as np

from lessons.toolbox.gpu.instructions.tcgen05_shapes import Shape


def no_cells(lanes: np.ndarray) -> np.ndarray:
    return np.zeros((len(lanes), 0), dtype=np.int64)


@dataclass
class Flight:
    """Products, or copies of scales, of one instruction. lanes: the threads that started them;
    known: what their warps knew then (`clocks`); shape: of a product, None for a copy; shared:
    marks of what they read in shared memory; reads, writes: cells of tensor memory, [lanes, N].
    """

    lanes: np.ndarray
    place: int
    known: np.ndarray
    shape: Shape | None
    reads: np.ndarray
    writes: np.ndarray
    shared: list = field(default_factory=list)

    def of(self, chosen: np.ndarray) -> "Flight":
        """The part of some of its lanes. chosen: [lanes] bool."""
        lanes, shared = self.lanes[chosen], []
        for each, marks in self.shared:
            held = np.isin(each, lanes)
            shared.append((each[held], [(who[held], cell[held], at) for who, cell, at in marks]))
        cells = self.reads[chosen], self.writes[chosen]
        return Flight(lanes, self.place, self.known[:, chosen], self.shape, *cells, shared)


def started_by(threads, lanes: np.ndarray, shape: Shape | None) -> Flight:
    """What the lanes are about to start; one thread of each program. Raises Fault for more."""
    if len(lanes) != len(np.unique(threads.cta[lanes])):
        threads.fail("more than one thread of the program starts the product", lanes)
    known = threads.clocks.told(threads.cta[lanes], threads.warp_of_program[lanes])
    return Flight(lanes, threads.pc, known, shape, no_cells(lanes), no_cells(lanes))


def take_off(threads, flight: Flight) -> None:
    """From here on it is in flight, and its cells are marked."""
    tensor, agent = threads.tensor, threads.clocks.agent("the tensor core")
    tensor.cells.begin_read(threads.pc, flight.reads, agent)
    tensor.cells.begin_write(threads.pc, flight.writes, agent)
    tensor.starter[flight.writes] = flight.lanes[:, None]
    tensor.shape[flight.writes] = tensor.number_of(flight.shape)
    tensor.started += 1
    tensor.flights.append((tensor.started, flight))


def is_its_own(threads, flight: Flight, cells: np.ndarray, shape: Shape | None) -> np.ndarray:
    """[lanes, N] bool: whether a cell was filled last by something that the same thread started: a
    product of that shape, or a copy (None). It may still go on. cells: [lanes, N].
    """
    tensor, agent = threads.tensor, threads.clocks.agent("the tensor core")
    by_it = tensor.cells.writer(cells) == agent
    same = tensor.shape[cells] == tensor.number_of(shape)
    return by_it & same & (tensor.starter[cells] == flight.lanes[:, None])


def check_written(threads, flight: Flight, cells, chosen: np.ndarray, what: str) -> None:
    """Raises Fault if a thread does not know that those of its cells which are chosen were written.
    cells, chosen: [lanes, N].
    """
    each = np.broadcast_to(flight.lanes[:, None], cells.shape)[chosen]
    warp, cta = threads.warp_of_program[each], threads.cta[each]
    threads.tensor.cells.after_write(threads, cells[chosen], cta, warp, each, what)


def check_unread(threads, flight: Flight, cells: np.ndarray) -> None:
    """Raises Fault if another agent may still read what the lanes are about to write. cells:
    [lanes, N].
    """
    each = np.repeat(flight.lanes, cells.shape[1])
    warp, cta = threads.warp_of_program[each], threads.cta[each]
    threads.tensor.cells.after_reads(threads, cells.reshape(-1), cta, warp, each)


def land(threads, started: int, lanes: np.ndarray) -> None:
    """The first `started` flights, those of the lanes, are done: what they read is free, what they
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
