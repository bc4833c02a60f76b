"""Blackwell's tensor memory (TMEM): where its tensor core keeps its sums.

A program has 128 lanes of 512 columns, 32 bits each. It belongs to no one until a warp allocates
columns, all lanes of them. An address is (lane << 16) + column. Warps move rows between it and
their registers, warp w only lanes 32 (w mod 4) to 32 (w mod 4) + 31: its quarter. The tensor core
reads and writes all lanes.

Every access takes 16 lanes or more at a time, so 16 lanes of a column are watched as one cell.

Source: NVIDIA, PTX ISA 9.0, 9.7.16.1 (tensor memory), 9.7.16.7 (allocation), 9.7.16.8 (quarters).
"""

import numpy as np

from lessons.toolbox.gpu.clocks import Cells

LANES, COLUMNS = 128, 512
HALF = 16  # lanes of a cell
UNIT = 32  # columns: the smallest allocation
WARP = 32
EMPTY = 0xFFFFFFFF  # what a column holds that nothing was written to: NaN


class TensorMemory:
    """Of all programs that run together. words: [programs, lanes, columns]."""

    def __init__(self, threads):
        programs = threads.num_programs
        self.words = np.full((programs, LANES, COLUMNS), EMPTY, dtype=np.uint32)
        # the allocation that a column belongs to: the number of its first one + 1; 0 for none
        self.owner = np.zeros((programs, COLUMNS), dtype=np.int64)
        self.closed = np.zeros(programs, dtype=bool)  # no more allocations
        self.place = 0  # of the instruction that allocated last
        count = programs * LANES // HALF * COLUMNS
        self.cells = Cells(threads.clocks, count, "tensor memory", "store")
        # of a cell that the tensor core wrote last: the thread that started it, the number of its
        # shape
        self.starter, self.shape = np.zeros((2, count), dtype=np.int64)
        self.shapes: list = []
        self.started = 0  # matrix products, and copies of scales, so far
        self.flights: list = []  # those that go on: (its number, what it touches)
        self.loads: list = []  # of warps, that no wait::ld has waited for
        self.stores: list = []

    def loading(self, threads, here: np.ndarray) -> set[str]:
        """The registers that a load is filling in any of these threads."""
        warps = here.reshape(-1, WARP).any(1)
        return {
            n for load in self.loads if warps[threads.warp[load.lanes]].any() for n in load.names
        }

    def read_early(self, threads, step, here: np.ndarray) -> frozenset[str]:
        """The registers that a step reads while a load fills them. To pack two of them is no read:
        the pair is another name of the same registers, and the load fills it, too.
        """
        early = step.reads & self.loading(threads, here)
        if not step.packs:
            return early
        for load in self.loads:
            if not early.isdisjoint(load.names):
                load.names += tuple(step.writes)
        return frozenset()

    def number_of(self, shape) -> int:
        """Of a product's shape; None, a copy of scales, has one too."""
        if shape not in self.shapes:
            self.shapes.append(shape)
        return self.shapes.index(shape)

    # ------------------------------------------------------------ allocation

    def allocate(self, threads, columns: int, lanes: np.ndarray) -> np.ndarray:
        """Columns for the programs of the lanes, one lane each; where they begin. Programs get them
        at a drawn place. Raises Fault where there is none: the program would wait for ever.
        """
        if columns not in (32, 64, 128, 256, 512):
            threads.fail(
                f"{columns} columns of tensor memory; accepted: 32, 64, 128, 256, 512", lanes
            )
        firsts = np.zeros(len(lanes), dtype=np.int64)
        for k, program in enumerate(threads.cta[lanes]):
            if self.closed[program]:
                threads.fail("it allocates after it gave up the right to", lanes[k : k + 1])
            free = self.owner[program] == 0
            starts = [
                first
                for first in range(0, COLUMNS - columns + 1, UNIT)
                if free[first : first + columns].all()
            ]
            if not starts:
                threads.fail(
                    f"{columns} columns of tensor memory, where {int(free.sum())} of {COLUMNS} are "
                    f"free: the program waits for ever",
                    lanes[k : k + 1],
                )
            firsts[k] = threads.random.choice(starts)
            self.owner[program, firsts[k] : firsts[k] + columns] = firsts[k] + 1
        self.place = threads.pc
        return firsts

    def free(self, threads, address: np.ndarray, columns: int, lanes: np.ndarray) -> None:
        """Give an allocation back. Raises Fault if it is another one, or still in use."""
        mine = self.owner[threads.cta[lanes]] == address[:, None] + 1
        if (mine.sum(1) != columns).any():
            bad = np.flatnonzero(mine.sum(1) != columns)[:1]
            threads.fail(
                f"it frees {columns} columns from {int(address[bad][0])} on, which are no "
                f"allocation",
                lanes[bad],
            )
        rows = np.broadcast_to(np.arange(0, LANES, HALF), (len(lanes), LANES // HALF))
        cells = self.touch(threads, self.cells.note_write, rows, address, columns, lanes)
        self.cells.written[cells] = 0
        self.owner[threads.cta[lanes]] *= ~mine
        for program, columns in zip(threads.cta[lanes], mine):
            self.words[program][:, columns] = EMPTY

    def check_freed(self, threads) -> None:
        """Raises Fault if a program has ended with an allocation."""
        kept = (self.owner > 0).any(1)
        if kept.any():
            program = int(np.flatnonzero(kept)[0])
            threads.pc = self.place
            name = threads.name_of(int(threads.programs[program]))
            threads.fail(f"{name} ends with columns of tensor memory that it has not freed", [])

    # ------------------------------------------------------------ access

    def check(self, threads, first: np.ndarray, count: int, lanes: np.ndarray) -> None:
        """Raises Fault if columns first to first + count - 1 are not of one allocation."""
        outside = (first < 0) | (first + count > COLUMNS)
        if not outside.any():
            owners = self.owner[threads.cta[lanes][:, None], first[:, None] + np.arange(count)]
            outside = (owners[:, 0] == 0) | (owners != owners[:, :1]).any(1)
        if outside.any():
            at = int(first[outside][0])
            threads.fail(
                f"columns {at} to {at + count - 1} of tensor memory are not allocated to the "
                f"program",
                lanes[outside],
            )

    def cells_at(self, threads, rows, first, count: int, lanes):
        """[lanes, N]: the cells of some halves and columns. rows: [lanes, halves], the first lane
        of each half; first: [lanes], the first column. Raises Fault for columns that are not
        allocated.
        """
        self.check(threads, first, count, lanes)
        column = (first[:, None] + np.arange(count))[:, None, :]
        cta = threads.cta[lanes][:, None, None]
        cell = (cta * (LANES // HALF) + rows[:, :, None] // HALF) * COLUMNS + column
        return cell.reshape(len(lanes), -1)

    def touch(self, threads, note, rows, first, count: int, lanes) -> np.ndarray:
        """Check and note an access of the lanes' warps; note: a method of Cells. Returns the cells,
        [lanes, count of them].
        """
        cells = self.cells_at(threads, rows, first, count, lanes)
        each = np.repeat(lanes, cells.shape[1])
        note(threads, cells.reshape(-1), threads.cta[each], threads.warp_of_program[each], each)
        return cells

    def check_written(self, threads, cells: np.ndarray, lanes: np.ndarray) -> None:
        """Raises Fault if one of the cells holds nothing. cells: [lanes, N]."""
        empty = self.cells.written[cells] == 0
        if empty.any():
            which, at = np.argwhere(empty)[0]
            column = int(cells[which, at] % COLUMNS)
            threads.fail(
                f"column {column} of tensor memory is read before it is written",
                lanes[which : which + 1],
            )
