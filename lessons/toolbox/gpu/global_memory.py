"""The GPU's memory: the buffers that a launch was given, and nothing beside them.

Every buffer lies in a window of 2^40 bytes of its own, so an address that leaves its buffer reaches
no other one: it is a fault, however far it strays. A buffer is the storage of a tensor on the CPU
itself. Nothing is copied.

Programs run in any order, and nothing but an atomic operation orders them. So bytes that one
program writes may be touched by no other program of the launch, but read by those that have
acquired what it released (releases.py).
"""

import numpy as np

from lessons.toolbox.gpu.releases import Releases
from lessons.toolbox.gpu.values import UNSIGNED

WINDOW = 40  # bits of an offset in a buffer
MANY = -1  # read by more than one program


class Buffer:
    """Bytes that a kernel may touch. watched: whether the kernel may write them at all; dtype: of
    the tensor that lies there, where it is known.
    """

    def __init__(self, data: np.ndarray, name: str, watched: bool, dtype=None):
        self.data, self.name, self.watched, self.dtype = data, name, watched, dtype
        self.views: dict[int, np.ndarray] = {}
        self.writer = self.reader = self.written = None

    def view(self, size: int) -> np.ndarray:
        """The bytes as unsigned integers of one size, without the few that fill none."""
        if size not in self.views:
            whole = self.data[: len(self.data) // size * size]
            self.views[size] = whole.view(UNSIGNED[size])
        return self.views[size]

    def watch(self, cell: int) -> None:
        """Begin to note who writes and reads each cell: 0 for none, else a program's number + 1,
        and after how many releases it was written. The system gives memory for the parts that are
        used.
        """
        cells = len(self.data) // cell + 1
        self.writer = np.zeros(cells, dtype=np.int32)
        self.reader = np.zeros(cells, dtype=np.int32)
        self.written = np.zeros(cells, dtype=np.int32)


class GlobalMemory:
    """The buffers of a launch. cell: bytes that are watched as one, the smallest access."""

    def __init__(self, buffers: list[Buffer], cell: int):
        self.buffers, self.cell = buffers, cell
        self.releases = Releases()
        for buffer in buffers:
            if buffer.watched:
                buffer.watch(cell)

    @staticmethod
    def address(index: int, offset: int = 0) -> int:
        """The address of a byte of buffer `index`."""
        return ((index + 1) << WINDOW) + offset

    def parts(self, threads, address: np.ndarray, size: int, lanes: np.ndarray):
        """(buffer, offsets, which of the lanes) for each buffer that the addresses lie in. Raises
        Fault for an address outside of every buffer, or not a multiple of `size`.
        """
        if size & (size - 1):
            raise ValueError(f"size: got {size}; accepted: a power of two")
        window = address >> WINDOW
        if len(window) and (window == window[0]).all():
            choices = [(int(window[0]), slice(None))]
        else:
            choices = [(int(which), window == which) for which in np.unique(window)]
        for which, chosen in choices:
            offset = address[chosen] - (which << WINDOW)
            who = lanes[chosen]
            if not 0 < which <= len(self.buffers):
                threads.fail(self.stray(which, offset, size), who)
            buffer = self.buffers[which - 1]
            if int(offset.max(initial=0)) + size > len(buffer.data):
                outside = offset + size > len(buffer.data)
                threads.fail(self.stray(which, offset[outside], size), who[outside])
            if size > 1 and (offset & (size - 1)).any():
                odd = (offset & (size - 1)) != 0
                threads.fail(
                    f"byte {int(offset[odd][0])} of {buffer.name} is not a multiple of {size}",
                    who[odd],
                )
            yield buffer, offset, chosen

    def stray(self, which: int, offset: np.ndarray, size: int) -> str:
        """In words: where an address lies that is in no buffer."""
        if 0 < which <= len(self.buffers):
            buffer = self.buffers[which - 1]
            over = f"{int(offset[0])} of {buffer.name}, which has {len(buffer.data)} bytes"
            return f"{size} bytes at {over}"
        if 0 <= which < len(self.buffers):
            buffer, before = self.buffers[which], (1 << WINDOW) - int(offset[0])
            return f"{size} bytes, {before} before the first of {buffer.name}"
        return f"{size} bytes at address {(which << WINDOW) + int(offset[0]):#x}, in no buffer"

    # ------------------------------------------------------------ access

    def load(self, threads, address: np.ndarray, size: int, count: int, lanes: np.ndarray) -> list:
        """`count` values of `size` bytes for each lane: arrays [lanes]. Raises Fault."""
        if threads.counts:
            threads.counts.access(threads, "loaded", address, size * count, lanes)
        found = [np.empty(len(lanes), dtype=UNSIGNED[size]) for _ in range(count)]
        for buffer, offset, chosen in self.parts(threads, address, size * count, lanes):
            if buffer.watched:
                self.note_read(threads, buffer, offset, size * count, lanes[chosen])
            view, first = buffer.view(size), offset // size
            for k, values in enumerate(found):
                values[chosen] = view[first + k]
        return found

    def store(self, threads, address: np.ndarray, size: int, values: list, lanes) -> None:
        """values: for each element of the vector an array [lanes]. Raises Fault."""
        if threads.counts:
            threads.counts.access(threads, "stored", address, size * len(values), lanes)
        for buffer, offset, chosen in self.parts(threads, address, size * len(values), lanes):
            self.note_write(threads, buffer, offset, size * len(values), lanes[chosen])
            view, first = buffer.view(size), offset // size
            for k, value in enumerate(values):
                view[first + k] = value[chosen]

    def _cells(self, offset: np.ndarray, size: int) -> list[np.ndarray]:
        first = offset // self.cell
        return [first + k for k in range(max(1, size // self.cell))]

    def note_read(self, threads, buffer: Buffer, offset, size: int, lanes) -> None:
        """Check and note that programs read these bytes of a buffer that the kernel writes."""
        program = threads.program[lanes]
        for cell in self._cells(offset, size):
            writer = buffer.writer[cell]
            if (late := (writer != 0) & (writer != program)).any():
                late &= ~self.releases.known_to(program, writer, buffer.written[cell])
            if late.any():
                self.race(threads, buffer, "reads", "writes", writer, late, lanes)
            reader = buffer.reader[cell]
            buffer.reader[cell] = np.where((reader == 0) | (reader == program), program, MANY)

    def note_write(self, threads, buffer: Buffer, offset, size: int, lanes) -> None:
        """Check and note that programs write these bytes."""
        if not buffer.watched:  # where the kernel's code did not tell that it may be written
            buffer.watched = True
            buffer.watch(self.cell)
        program = threads.program[lanes]
        releases = self.releases.of(program)
        for cell in self._cells(offset, size):
            for touched, how in ((buffer.writer[cell], "writes"), (buffer.reader[cell], "reads")):
                if (late := (touched != 0) & (touched != program)).any():
                    self.race(threads, buffer, "writes", how, touched, late, lanes)
            buffer.writer[cell], buffer.written[cell] = program, releases
            if (late := buffer.writer[cell] != program).any():  # in this very instruction
                self.race(threads, buffer, "writes", "writes", buffer.writer[cell], late, lanes)

    def race(self, threads, buffer: Buffer, what: str, how: str, other, late, lanes) -> None:
        bad = int(np.flatnonzero(late)[0])
        number = int(other[bad])
        whom = "other programs" if number == MANY else threads.name_of(number - 1)
        verb = how.rstrip("s") if number == MANY else how
        threads.fail(
            f"race in global memory: it {what} bytes of {buffer.name} that {whom} {verb} in the "
            f"same launch",
            lanes[bad : bad + 1],
        )
