"""A program's shared memory: its bytes, and who may touch them when (`clocks`).

Source: NVIDIA, PTX ISA 9.0, 5.1.7 (shared state space), 9.7.9.25 (asynchronous copies).
"""

import numpy as np

from lessons.toolbox.gpu.clocks import Cells, Clocks, place_of
from lessons.toolbox.gpu.values import UNSIGNED


class SharedMemory:
    """The shared memory of all programs that run together, [programs, size] bytes.

    cell: bytes that are watched as one, the size of the kernel's smallest access.
    """

    def __init__(self, programs: int, size: int, clocks: Clocks, cell: int):
        self.size = -(-max(size, 16) // 16) * 16
        self.asked = size
        self.cell, self.clocks = cell, clocks
        self.bytes = np.full(programs * self.size, 0xFF, dtype=np.uint8)  # NaN in every float type
        self.cells = Cells(clocks, programs * self.size // cell, "shared memory")

    def view(self, size: int) -> np.ndarray:
        """The bytes as unsigned integers of one size."""
        return self.bytes.view(UNSIGNED[size])

    def places(self, threads, address: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        """Where in `bytes` the lanes' addresses lie. Raises Fault outside of the memory."""
        outside = (address < 0) | (address + size > self.asked)
        if outside.any():
            at = int(address[outside][0])
            threads.fail(
                f"shared memory at {at}, {size} bytes: the kernel has {self.asked}",
                lanes[outside],
            )
        if size > 1 and (address & (size - 1)).any():
            odd = (address & (size - 1)) != 0
            threads.fail(
                f"shared memory at {int(address[odd][0])} is not a multiple of {size}", lanes[odd]
            )
        return threads.cta[lanes] * self.size + address

    # ------------------------------------------------------------ order

    def note_read(self, threads, places: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Check and note that the lanes read `size` bytes at `places`."""
        cta, warp = threads.cta[lanes], threads.warp_of_program[lanes]
        for cell in self._cells(places, size):
            self.cells.note_read(threads, cell, cta, warp, lanes)

    def note_write(self, threads, places: np.ndarray, size: int, lanes, again=False) -> None:
        """Check and note that the lanes write `size` bytes at `places`. again: see `Cells`."""
        cta, warp = threads.cta[lanes], threads.warp_of_program[lanes]
        for cell in self._cells(places, size):
            self.cells.note_write(threads, cell, cta, warp, lanes, again)

    def note_read_beside(self, threads, places, size: int, lanes, agent=None) -> list:
        """The same as note_read for hardware that the lanes have started. Until `end_read` no warp
        may write there. agent: who reads, without it the lanes' warps. Returns what end_read wants.
        """
        cta, warp, marks = threads.cta[lanes], threads.warp_of_program[lanes], []
        who = warp if agent is None else np.full(len(lanes), agent)
        for cell in self._cells(places, size):
            self.cells.after_write(threads, cell, cta, warp, lanes, "reads")
            self.cells.after_fence(threads, cell, cta, warp, lanes)
            self.cells.begin_read(threads.pc, cell, who)
            marks.append((who, cell, threads.pc))
        return marks

    def end_read(self, threads, marks: list, cta: np.ndarray) -> None:
        """Reads beside the warps have ended: from here on they count as their agent's, now."""
        for who, cell, place in marks:
            self.cells.end_read(place, cell, cta, who)

    def still_read(self, marks: list) -> None:
        """Mark again what hardware still reads, where another read that has ended stood."""
        for who, cell, place in marks:
            self.cells.begin_read(place, cell, who)

    def _cells(self, places: np.ndarray, size: int) -> list[np.ndarray]:
        first = places // self.cell
        return [first + k for k in range(max(1, size // self.cell))]

    # ------------------------------------------------------------ access

    def load(self, threads, address: np.ndarray, size: int, count: int, lanes: np.ndarray) -> list:
        """`count` values of `size` bytes for each lane: arrays [lanes]. Raises Fault."""
        places = self.places(threads, address, size * count, lanes)
        if threads.counts:
            threads.counts.shared_access(threads, address, size * count, lanes)
        self.note_read(threads, places, size * count, lanes)
        view, first = self.view(size), places // size
        return [view[first + k] for k in range(count)]

    def store(self, threads, address: np.ndarray, size: int, values: list, lanes) -> None:
        """values: for each element of the vector an array [lanes]. Raises Fault."""
        places = self.places(threads, address, size * len(values), lanes)
        if threads.counts:
            threads.counts.shared_access(threads, address, size * len(values), lanes)
        view, first = self.view(size), places // size
        again = np.ones(len(lanes), dtype=bool)
        for k, value in enumerate(values):
            again &= (view[first + k] == value) | nearly(view[first + k], value)
        self.note_write(threads, places, size * len(values), lanes, again)
        for k, value in enumerate(values):
            view[first + k] = value
        for k, value in enumerate(values):  # of threads that store at one place the last one wins
            if (lost := view[first + k] != value).any():
                bad = np.flatnonzero(lost & ~nearly(view[first + k], value))[:1]
                if not len(bad):
                    continue
                threads.fail("two threads store different values at one place", lanes[bad])

    # ------------------------------------------------------------ asynchronous copies

    def begin_copy(self, threads, places: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Mark bytes that are being filled: no warp may touch them, and they hold garbage."""
        self.note_write(threads, places, size, lanes)
        for cell in self._cells(places, size):
            self.cells.begin_write(threads.pc, cell, threads.warp_of_program[lanes])
        self.bytes.reshape(-1, size)[places // size] = 0xFF

    def end_copy(self, threads, places, data: np.ndarray, lanes, agent=None) -> None:
        """Fill them. data: [lanes, bytes]. From here on they count as written by `agent`, without
        one by the lane's warp.
        """
        cta, warp = threads.cta[lanes], threads.warp_of_program[lanes]
        who = warp if agent is None else np.full(len(lanes), agent)
        for cell in self._cells(places, data.shape[1]):
            self.cells.end_write(place_of(self.cells.written[cell]), cell, cta, who)
        self.bytes.reshape(-1, data.shape[1])[places // data.shape[1]] = data


def nearly(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether bits are float32 numbers of one sum in two orders. Threads that hold copies of a sum
    may differ in its last bits: where a product is fused into the first addition of a butterfly, a
    thread rounds its partner's product and not its own.
    """
    if a.dtype.itemsize != 4:
        return np.zeros(len(a), dtype=bool)
    x, y = a.view(np.float32).astype(np.float64), b.view(np.float32).astype(np.float64)
    larger = np.maximum(np.abs(x), np.abs(y))
    return (np.abs(x - y) <= 1e-5 * larger) & (larger >= 2.0**-126)
