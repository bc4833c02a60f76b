"""A program's shared memory, and who may touch it when.

Warps run in any order. What one warp writes, another may read only after a barrier that both pass,
and so for a write after a read. The machine runs one order, so it looks at the order that barriers
*promise*, with a clock for each warp (a vector clock):

    clock[p, w, u]   how much of warp u's past warp w of program p knows of
    clock[p, w, w]   its own time; it steps on at every barrier

A barrier lets its warps know of each other's past. Each cell of memory remembers who wrote it last
and when, and when each warp read it last. A read is in order if the reader's clock knows of the
write, a write if it knows of the write and of all reads before.

From Hopper on, hardware beside the warps touches shared memory too: the copy engine (TMA), which
has a clock of its own here, and the tensor cores (WGMMA), which read on a warp's behalf until it
waits for them. They see what a warp stored only after its `fence.proxy.async`.

Source: Flanagan and Freund, FastTrack: efficient and precise dynamic race detection (PLDI 2009),
section 3.
"""

import numpy as np

from lessons.toolbox.gpu.values import UNSIGNED

# A cell's record of its last write: the writer's time, the instruction, the warp.
TIME, PLACE = 26, 6
IN_FLIGHT = 1 << 36  # a time that no clock reaches: an asynchronous copy is still writing


class SharedMemory:
    """The shared memory of all programs that run together, [programs, size] bytes.

    cell: bytes that are watched as one, the size of the kernel's smallest access.
    """

    def __init__(self, programs: int, size: int, warps: int, cell: int):
        self.size = -(-max(size, 16) // 16) * 16
        self.asked = size
        self.cell, self.warps = cell, warps
        self.engine = warps  # the copy engine, as one more that reads and writes
        agents = warps + 1
        self.bytes = np.full(programs * self.size, 0xFF, dtype=np.uint8)  # NaN in every float type
        cells = programs * self.size // cell
        self.written = np.zeros(cells, dtype=np.int64)  # time << TIME | place << PLACE | warp
        self.read = np.zeros((agents, cells), dtype=np.int64)  # time << TIME | place
        self.clock = np.zeros((programs, agents, agents), dtype=np.int64)
        own = np.arange(agents)
        self.clock[:, own, own] = 1
        # up to when a warp's stores are visible to hardware beside the warps
        self.fenced = np.zeros((programs, agents), dtype=np.int64)
        self.fenced[:, self.engine] = IN_FLIGHT

    def view(self, size: int) -> np.ndarray:
        """The bytes as unsigned integers of one size."""
        return self.bytes.view(UNSIGNED[size])

    # ------------------------------------------------------------ order

    def synchronize(self, warps: np.ndarray) -> None:
        """A barrier of the warps, [programs, warps] bool: they learn of each other's past."""
        taking = np.flatnonzero(warps.any(1))
        clock, meets = self.clock[taking], np.zeros((len(taking), self.warps + 1), dtype=bool)
        meets[:, : self.warps] = warps[taking]
        known = np.where(meets[:, :, None], clock, 0).max(1)
        clock = np.where(meets[:, :, None], known[:, None], clock)
        own = np.arange(self.warps + 1)
        clock[:, own, own] += meets
        self.clock[taking] = clock

    def fence(self, cta: np.ndarray, agent: np.ndarray) -> None:
        """What these warps have stored so far is visible to the hardware beside them."""
        self.fenced[cta, agent] = self.clock[cta, agent, agent]
        self.clock[cta, agent, agent] += 1

    # ------------------------------------------------------------ access

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

    def note_read(self, threads, places: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Check and note that the lanes read `size` bytes at `places`."""
        mine, warp = self._clocks(threads, lanes)
        stamp = (self._own(mine, warp) << TIME) | threads.pc
        for cell in self._cells(places, size):
            self._after_write(threads, self.written[cell], mine, lanes, "reads")
            self.read[warp, cell] = stamp

    def note_read_beside(self, threads, places: np.ndarray, size: int, lanes: np.ndarray) -> list:
        """The same for hardware beside the warps that the lanes have started. Until `end_read` no
        warp may write there. Returns what end_read wants.
        """
        mine, warp = self._clocks(threads, lanes)
        stamp = (IN_FLIGHT << TIME) | threads.pc
        cta, marks = threads.cta[lanes], []
        for cell in self._cells(places, size):
            written = self.written[cell]
            self._after_write(threads, written, mine, lanes, "reads")
            writer = written & ((1 << PLACE) - 1)
            hidden = (written >> TIME) > self.fenced[cta, writer]
            if hidden.any():
                bad = int(np.flatnonzero(hidden)[0])
                line = threads.line_of((int(written[bad]) >> PLACE) & ((1 << (TIME - PLACE)) - 1))
                threads.fail(
                    f"shared memory: it reads beside the warps what warp {int(writer[bad])} stored "
                    f"at {line}, with no fence.proxy.async in between",
                    lanes[bad : bad + 1],
                )
            self.read[warp, cell] = stamp
            marks.append((warp, cell, stamp))
        return marks

    def end_read(self, threads, marks: list, cta: np.ndarray) -> None:
        """Reads beside the warps have ended: from here on they count as their warp's, now."""
        for warp, cell, stamp in marks:
            own = self.clock[cta, warp, warp]
            self.read[warp, cell] = (own << TIME) | (stamp & ((1 << TIME) - 1))

    def note_write(self, threads, places: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Check and note that the lanes write `size` bytes at `places`."""
        mine, warp = self._clocks(threads, lanes)
        stamp = (self._own(mine, warp) << TIME) | (threads.pc << PLACE) | warp
        for cell in self._cells(places, size):
            self._after_write(threads, self.written[cell], mine, lanes, "writes")
            self._after_reads(threads, cell, mine, lanes)
            self.written[cell] = stamp

    def _cells(self, places: np.ndarray, size: int) -> list[np.ndarray]:
        first = places // self.cell
        return [first + k for k in range(max(1, size // self.cell))]

    def _clocks(self, threads, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each lane's row of `clock` begins, and its warp in the program."""
        warp = threads.warp_of_program[lanes]
        agents = self.warps + 1
        return (threads.cta[lanes] * agents + warp) * agents, warp

    def _own(self, mine: np.ndarray, warp: np.ndarray) -> np.ndarray:
        return self.clock.reshape(-1)[mine + warp]

    def _after_write(self, threads, written, mine, lanes, what: str) -> None:
        writer = written & ((1 << PLACE) - 1)
        late = (written >> TIME) > self.clock.reshape(-1)[mine + writer]
        if late.any():
            bad = int(np.flatnonzero(late)[0])
            record = int(written[bad])
            line = threads.line_of((record >> PLACE) & ((1 << (TIME - PLACE)) - 1))
            if record >> TIME >= IN_FLIGHT:
                why = f"what the asynchronous copy of {line} is still filling"
            else:
                why = f"what {self.who(record & 63)} wrote at {line}, with no barrier in between"
            threads.fail(f"race in shared memory: it {what} {why}", lanes[bad : bad + 1])

    def _after_reads(self, threads, cell: np.ndarray, mine, lanes) -> None:
        for warp in range(self.warps + 1):
            read = self.read[warp, cell]
            late = (read >> TIME) > self.clock.reshape(-1)[mine + warp]
            if late.any():
                bad = int(np.flatnonzero(late)[0])
                line = threads.line_of(int(read[bad]) & ((1 << TIME) - 1))
                threads.fail(
                    f"race in shared memory: it writes what {self.who(warp)} reads at {line}, with no "
                    f"barrier in between",
                    lanes[bad : bad + 1],
                )

    def who(self, agent: int) -> str:
        return "the copy engine" if agent == self.engine else f"warp {agent}"

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
        self.note_write(threads, places, size * len(values), lanes)
        view, first = self.view(size), places // size
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
        stamp = (IN_FLIGHT << TIME) | (threads.pc << PLACE)
        warp = threads.warp_of_program[lanes]
        for cell in self._cells(places, size):
            self.written[cell] = stamp | warp
        self.bytes.reshape(-1, size)[places // size] = 0xFF

    def end_copy(
        self, threads, places: np.ndarray, data: np.ndarray, lanes: np.ndarray, by_engine=False
    ) -> None:
        """Fill them. data: [lanes, bytes]. From here on they count as written by the lane's warp, or
        by the copy engine.
        """
        mine, warp = self._clocks(threads, lanes)
        if by_engine:
            warp = np.full(len(lanes), self.engine)
            own = self.clock[threads.cta[lanes], self.engine, self.engine]
        else:
            own = self._own(mine, warp)
        stamp = (own << TIME) | warp
        for cell in self._cells(places, data.shape[1]):
            place = self.written[cell] & (((1 << TIME) - 1) ^ ((1 << PLACE) - 1))
            self.written[cell] = stamp | place
        self.bytes.reshape(-1, data.shape[1])[places // data.shape[1]] = data


def nearly(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether bits are float32 numbers of one sum in two orders. Threads that hold copies of a sum may
    differ in its last bits: where a product is fused into the first addition of a butterfly, a thread
    rounds its partner's product and not its own.
    """
    if a.dtype.itemsize != 4:
        return np.zeros(len(a), dtype=bool)
    x, y = a.view(np.float32).astype(np.float64), b.view(np.float32).astype(np.float64)
    larger = np.maximum(np.abs(x), np.abs(y))
    return (np.abs(x - y) <= 1e-5 * larger) & (larger >= 2.0**-126)
