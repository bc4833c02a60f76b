"""What a launch does, counted instruction by instruction: how a profile is made.

    with counting():
        kernel[grid](...)       # each Launch then has `counts`

A kind of `Counts` that also keeps what happens (`recorder`) may count in its place: counting(kind).

**Global memory.** The loads or stores of a warp's threads by one instruction are a *request*.
Memory answers in *sectors* of 32 bytes. A request needs at least as many as its distinct bytes
fill; more are fetched where the threads' addresses have gaps.

**Shared memory** has 32 banks of 4 bytes. In one *pass* each bank gives one word. Threads that want
different words of one bank make a request take more passes. Requests of 8 bytes a thread go by half
a warp, those of 16 bytes by a quarter.

Source: CUDA C++ Best Practices Guide 13, sections 10.2.1 (coalescing) and 10.2.3 (banks).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from lessons.toolbox.gpu.global_memory import WINDOW
from lessons.toolbox.gpu.ptx import Instruction, Kernel

SECTOR, LINE, BANKS, WORD, WARP = 32, 128, 32, 4, 32
GLOBAL = ("requests", "sectors", "least_sectors", "bytes", "first_sectors", "own_sectors")
SHARED = ("shared_requests", "passes", "least_passes")
_kind: "Callable[[Kernel], Counts] | None" = None
_programs: int | None = None
_together: int = 1


@contextmanager
def counting(
    kind: "Callable[[Kernel], Counts] | None" = None,
    programs: int | None = None,
    together: int = 1,
) -> Iterator[None]:
    """Within it launches count what they do. It makes them a few times slower. kind: what makes a
    launch's Counts from its kernel; None: Counts itself. programs: of each launch only so many run,
    evenly spread over the grid, so what it computes is incomplete; None: all. together: of so many
    programs side by side all run or none, because they wait for or add to each other.
    """
    global _kind, _programs, _together
    before = _kind, _programs, _together
    _kind, _programs, _together = kind or Counts, programs, together
    try:
        yield
    finally:
        _kind, _programs, _together = before


def counts_for(kernel: Kernel) -> "Counts | None":
    """Where a launch counts; None outside of `counting`."""
    return _kind and _kind(kernel)


def sampled(order: np.ndarray) -> np.ndarray:
    """Those of a grid's programs, in a drawn order, that run: all, or a sample within
    `counting(n)`.
    """
    if _programs is None or len(order) <= _programs:
        return order
    groups = np.linspace(0, len(order) // _together - 1, _programs // _together).astype(np.int64)
    return (groups[:, None] * _together + np.arange(_together)).reshape(-1)


class Counts:
    """Of each instruction of a kernel, [instructions]: `threads` that took part, the columns of
    GLOBAL and SHARED, and `flops` of tcgen05, whose shape the code does not tell (see
    matrix_flops).
    """

    def __init__(self, kernel: Kernel):
        self.instructions = kernel.instructions
        names = ("threads", "flops", *GLOBAL, *SHARED)
        self.columns = {name: np.zeros(len(kernel.instructions), np.int64) for name in names}
        # The way of each warp, for the time model: (place, which warps: None for all), in order, of
        # the programs of the first batch.
        self.path: list[tuple[int, np.ndarray | None]] = []
        self.programs: np.ndarray | None = None
        # What steps of the path did to mbarriers: {index in path: [(what, address, warps, how many
        # each, bytes or parity)]}
        self.flags: dict[int, list[tuple[str, int, np.ndarray, np.ndarray, int]]] = {}
        # Who touched each sector of a buffer last, a program's number + 1, 0 for none:
        # {(loads or stores, buffer's number): [sectors]}
        self.touched: dict[tuple[str, int], np.ndarray] = {}

    def executed(self, threads, mask, taking) -> None:
        """The threads of `mask` stand at an instruction, and `taking` of them, for which its
        predicate holds, are about to run it.
        """
        self.columns["threads"][threads.pc] += len(threads.active(taking))
        if threads.programs is self.programs:
            warps = (threads.alive if mask is None else mask).reshape(-1, WARP).any(1)
            self.path.append((threads.pc, None if warps.all() else warps))

    def done(self, threads) -> None:
        """The instruction has been run."""

    def flag(self, threads, what: str, address: int, lanes: np.ndarray, number: int = 0) -> None:
        """Lanes do something to the mbarrier at an address. what: "init" (number: of arrivals),
        "arrive" (number: of arrivals a lane), "expect" (number: bytes, with an arrival), "copy"
        (number: bytes to come) or "wait" (number: parity), which has found the phase complete.
        """
        if threads.programs is self.programs and len(lanes):
            warps, many = np.unique(threads.warp[lanes], return_counts=True)
            done = (what, address, warps, many, number)
            self.flags.setdefault(len(self.path) - 1, []).append(done)

    def access(self, threads, kind: str, address: np.ndarray, size: int, lanes) -> None:
        """Lanes load or store `size` bytes each in global memory. kind: "loaded" or "stored"."""
        if not len(lanes):
            return
        warp = threads.warp[lanes]
        requests, which = np.unique(warp, return_inverse=True)
        chunks, _ = pairs(which, address // size)
        of_request, sectors = pairs(which, address // SECTOR)
        distinct = np.bincount(chunks, minlength=len(requests)) * size
        first, own = self._touch(threads, kind, sectors, requests[of_request])
        self._add(
            GLOBAL,
            threads.pc,
            len(requests),
            len(sectors),
            int((-(-distinct // SECTOR)).sum()),
            len(lanes) * size,
            first,
            own,
        )

    def _touch(self, threads, kind: str, sectors: np.ndarray, warp: np.ndarray) -> tuple[int, int]:
        """Note who touches the sectors; (those that come from memory, because no program had
        touched them, those that the same program had). What a launch has stored is in a cache.
        """
        first = own = 0
        program = threads.programs[warp // threads.warps] + 1
        buffers = sectors >> (WINDOW - 5)
        for number in np.unique(buffers):
            if not 0 < number <= len(threads.memory.buffers):
                continue  # an address in no buffer, for which a Fault comes next
            touched = self._sectors(threads, kind, int(number))
            stored = self.touched.get(("stored", int(number)), touched)
            at = sectors & ((1 << (WINDOW - 5)) - 1)
            here = (buffers == number) & (at < len(touched))
            at, whose = at[here], program[here]
            first += len(np.unique(at[(touched[at] == 0) & (stored[at] == 0)]))
            own += int((touched[at] == whose).sum())
            touched[at] = whose
        return first, own

    def _sectors(self, threads, kind: str, number: int) -> np.ndarray:
        key = (kind, number)
        if key not in self.touched:
            size = len(threads.memory.buffers[number - 1].data)
            self.touched[key] = np.zeros(size // SECTOR + 1, dtype=np.int32)
        return self.touched[key]

    def shared_access(self, threads, address: np.ndarray, size: int, lanes) -> None:
        """Lanes load or store `size` bytes each at places of their programs' shared memory."""
        if not len(lanes):
            return
        part = min(WARP, WARP * WORD // size)  # threads that are served together
        warp, lane = threads.warp[lanes], threads.lane[lanes]
        group = warp * WARP + lane // part
        if part < WARP and self.instructions[threads.pc].op == "ld":
            group = np.where(twins(warp, lane, address, 2 * part), group // 2 * 2, group)
        passes = passes_of(group, address, size)
        self._add(SHARED, threads.pc, len(np.unique(warp)), int(passes.sum()), len(passes))

    def async_copy(self, threads, target, source, size: int, lanes, live) -> None:
        """Lanes copy `size` bytes each from `source` in global memory to `target` in shared memory;
        those that are not live write zeros.
        """
        if not live.all():
            self.shared_access(threads, target[~live], size, lanes[~live])
        if not live.any():
            return
        warp, target, source = threads.warp[lanes[live]], target[live], source[live]
        part = min(WARP, WARP * WORD // size)
        # because one piece of data goes to one place a pass: lanes with the same source queue up
        order = np.lexsort((source, warp))
        fresh = np.r_[True, (np.diff(warp[order]) != 0) | (np.diff(source[order]) != 0)]
        turn = np.empty(len(order), np.int64)
        turn[order] = np.arange(len(order)) - np.flatnonzero(fresh)[np.cumsum(fresh) - 1]
        keys = np.stack([warp, source // LINE, turn])
        _, group = np.unique(keys, axis=1, return_inverse=True)
        passes = passes_of(group.reshape(-1), target, size)
        warps, many = np.unique(warp, return_counts=True)
        self._add(SHARED, threads.pc, len(warps), int(passes.sum()), int((-(-many // part)).sum()))

    def matrix_read(self, threads, matrix_bytes: int, groups: int) -> None:
        """Each of `groups` warpgroups reads operands of that many bytes from shared memory."""
        passes = groups * (matrix_bytes // (BANKS * WORD))
        self._add(SHARED, threads.pc, groups, passes, passes)

    def copied(self, threads, box_bytes: int, barriers: np.ndarray, lanes: np.ndarray) -> None:
        """The copy engine fills a box of shared memory for each lane, and tells its mbarrier."""
        passes = len(lanes) * box_bytes // (BANKS * WORD)
        self._add(SHARED, threads.pc, len(lanes), passes, passes)
        for address in np.unique(barriers):
            self.flag(threads, "copy", int(address), lanes[barriers == address], box_bytes)

    def _add(self, names: tuple[str, ...], place: int, *numbers: int) -> None:
        for name, number in zip(names, numbers):
            self.columns[name][place] += number

    def footprint(self, kind: str) -> int:
        """Bytes of distinct sectors "loaded" or "stored": what must cross the bus at least once."""
        return SECTOR * sum(int((x > 0).sum()) for (k, _), x in self.touched.items() if k == kind)


def twins(warp: np.ndarray, lane: np.ndarray, address: np.ndarray, many: int) -> np.ndarray:
    """[lanes]: whether each thread of its `many` has the address of its neighbour, or of its next
    but one.
    """
    _, row = np.unique(warp, return_inverse=True)
    of = np.full((row.max() + 1, WARP), -1, dtype=np.int64)
    of[row, lane] = address
    found = np.zeros((len(of), WARP // many), dtype=bool)
    for distance in (1, 2):
        other = of[:, np.arange(WARP) ^ distance]
        same = (of == other) | (of < 0) | (other < 0)
        found |= same.reshape(len(of), -1, many).all(2)
    return found[row, lane // many]


def passes_of(group: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
    """Passes of each group of threads, in the order of their numbers: the most words of one
    bank.
    """
    groups, which = np.unique(group, return_inverse=True)
    words = address[:, None] // WORD + np.arange(max(1, size // WORD))
    each, word = pairs(np.repeat(which, words.shape[1]), words.reshape(-1))
    in_bank = np.bincount(each * BANKS + word % BANKS, minlength=len(groups) * BANKS)
    return in_bank.reshape(-1, BANKS).max(1)


def pairs(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct pairs of two arrays, [N] each; first below 2^18, second below 2^45."""
    both = np.unique(first.astype(np.int64) << 45 | second.astype(np.int64))
    return both >> 45, both & ((1 << 45) - 1)


def matrix_flops(instruction: Instruction) -> int:
    """Multiplications and additions that one warp's share of a matrix instruction does, 0 for any
    other.
    """
    if instruction.op not in ("mma", "wgmma"):
        return 0
    shape = next((w for w in instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", w)), None)
    if shape is None:
        return 0
    rows, columns, depth = map(int, re.findall(r"\d+", shape))
    warps = 4 if instruction.op == "wgmma" else 1
    return 2 * rows * columns * depth // warps


def wgmma_rate(instruction: Instruction) -> int:
    """FLOPs a clock of one of an SM's four matrix units, by the data sheet of an H100: 1024 in 16
    bits, twice that in 8, half of it in TF32.
    """
    if instruction.has("e4m3", "e5m2", "s8", "u8"):
        return 2048
    return 512 if instruction.has("tf32") else 1024
