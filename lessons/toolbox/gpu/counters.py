"""What a launch does, counted instruction by instruction: how a profile is made.

    with counting():
        kernel[grid](...)       # each Launch then has `counts`

A kind of `Counts` that also keeps what happens (`recorder`) may count in its place: counting(kind).

**Global memory.** The loads or stores of a warp's threads by one instruction are a *request*. Memory
answers in *sectors* of 32 bytes. A request needs at least as many as its distinct bytes fill; more
are fetched where the threads' addresses have gaps.

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

SECTOR, BANKS, WORD, WARP = 32, 32, 4, 32
GLOBAL = ("requests", "sectors", "least_sectors", "bytes")
SHARED = ("shared_requests", "passes", "least_passes")
_kind: "Callable[[Kernel], Counts] | None" = None


@contextmanager
def counting(kind: "Callable[[Kernel], Counts] | None" = None) -> Iterator[None]:
    """Within it launches count what they do. It makes them a few times slower. kind: what makes a
    launch's Counts from its kernel; None: Counts itself.
    """
    global _kind
    before, _kind = _kind, kind or Counts
    try:
        yield
    finally:
        _kind = before


def counts_for(kernel: Kernel) -> "Counts | None":
    """Where a launch counts; None outside of `counting`."""
    return _kind and _kind(kernel)


class Counts:
    """Of each instruction of a kernel, [instructions]: `threads` that took part, and the columns
    of GLOBAL and SHARED.
    """

    def __init__(self, kernel: Kernel):
        names = ("threads", *GLOBAL, *SHARED)
        self.columns = {name: np.zeros(len(kernel.instructions), np.int64) for name in names}
        # the sectors of each buffer that were touched: {(loads or stores, buffer's number): [sectors]}
        self.touched: dict[tuple[str, int], np.ndarray] = {}

    def executed(self, threads, mask, taking) -> None:
        """The threads of `mask` stand at an instruction, and `taking` of them, for which its
        predicate holds, are about to run it.
        """
        self.columns["threads"][threads.pc] += len(threads.active(taking))

    def done(self, threads) -> None:
        """The instruction has been run."""

    def access(self, threads, kind: str, address: np.ndarray, size: int, lanes) -> None:
        """Lanes load or store `size` bytes each in global memory. kind: "loaded" or "stored"."""
        if not len(lanes):
            return
        warp = threads.warp[lanes]
        requests, which = np.unique(warp, return_inverse=True)
        chunks, _ = pairs(which, address // size)
        _, sectors = pairs(which, address // SECTOR)
        distinct = np.bincount(chunks, minlength=len(requests)) * size
        self._add(
            GLOBAL,
            threads.pc,
            len(requests),
            len(sectors),
            int((-(-distinct // SECTOR)).sum()),
            len(lanes) * size,
        )
        buffers = sectors >> (WINDOW - 5)
        for number in np.unique(buffers):
            at = sectors[buffers == number] & ((1 << (WINDOW - 5)) - 1)
            self._sectors(threads, kind, int(number))[at] = True

    def _sectors(self, threads, kind: str, number: int) -> np.ndarray:
        key = (kind, number)
        if key not in self.touched:
            size = len(threads.memory.buffers[number - 1].data)
            self.touched[key] = np.zeros(size // SECTOR + 1, dtype=bool)
        return self.touched[key]

    def shared_access(self, threads, address: np.ndarray, size: int, lanes) -> None:
        """Lanes load or store `size` bytes each at places of their programs' shared memory."""
        if not len(lanes):
            return
        part = min(WARP, WARP * WORD // size)  # threads that are served together
        warp, lane = threads.warp[lanes], threads.lane[lanes]
        groups, which = np.unique(warp * WARP + lane // part, return_inverse=True)
        words = address[:, None] // WORD + np.arange(max(1, size // WORD))
        each = np.repeat(which, words.shape[1])
        group, word = pairs(each, words.reshape(-1))
        in_bank = np.bincount(group * BANKS + word % BANKS, minlength=len(groups) * BANKS)
        passes = in_bank.reshape(-1, BANKS).max(1)
        self._add(SHARED, threads.pc, len(np.unique(warp)), int(passes.sum()), len(groups))

    def _add(self, names: tuple[str, ...], place: int, *numbers: int) -> None:
        for name, number in zip(names, numbers):
            self.columns[name][place] += number

    def footprint(self, kind: str) -> int:
        """Bytes of distinct sectors "loaded" or "stored": what must cross the bus at least once."""
        return SECTOR * sum(int(x.sum()) for (k, _), x in self.touched.items() if k == kind)


def pairs(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct pairs of two arrays, [N] each; first below 2^18, second below 2^45."""
    both = np.unique(first.astype(np.int64) << 45 | second.astype(np.int64))
    return both >> 45, both & ((1 << 45) - 1)


def matrix_flops(instruction: Instruction) -> int:
    """Multiplications and additions that one warp's share of a matrix instruction does, 0 for any other."""
    if instruction.op not in ("mma", "wgmma"):
        return 0
    shape = next((w for w in instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", w)), None)
    if shape is None:
        return 0
    rows, columns, depth = map(int, re.findall(r"\d+", shape))
    warps = 4 if instruction.op == "wgmma" else 1
    return 2 * rows * columns * depth // warps
