"""cp.async: from global to shared memory beside the computation (Ampere).

A thread starts copies, closes a group with commit_group, and waits with wait_group N until all but
its last N groups have arrived. Until then the bytes in shared memory belong to no thread: they hold
garbage here, and a warp that touches them is a fault. Other warps see them only after a barrier
that follows the wait.

Source: NVIDIA, PTX ISA 9.0, 9.7.9.25 (asynchronous copies).
"""

from dataclasses import dataclass

import numpy as np

from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import reader


@dataclass
class Copy:
    """One instruction's copies in flight. group: of each lane, -1 while its group is open."""

    lanes: np.ndarray
    group: np.ndarray
    places: np.ndarray
    data: np.ndarray  # [lanes, bytes]


class InFlight:
    """The copies of all threads. closed: how many groups each thread has closed."""

    def __init__(self, count: int):
        self.closed = np.zeros(count, dtype=np.int64)
        self.copies: list[Copy] = []


def in_flight(threads) -> InFlight:
    if not hasattr(threads, "copies"):
        threads.copies = InFlight(threads.count)
    return threads.copies


def copy(instruction: Instruction, kernel: Kernel):
    """cp.async.cg.shared.global [to], [from], 16{, size}: `size` bytes, the rest zeros."""
    if not instruction.has("async") or instruction.has("bulk"):  # bulk: the copy engine's
        raise ValueError(instruction.text)
    if instruction.has("commit_group"):
        return commit
    if instruction.has("wait_group"):
        left = int(instruction.operands[0], 0)
        return lambda threads, mask: wait(threads, mask, left)
    if instruction.has("wait_all"):
        return wait_all
    if not instruction.has("ca", "cg"):
        raise ValueError(instruction.text)
    target, source, size, *rest = instruction.operands
    to, of = address_reader(target, kernel, "shared"), address_reader(source, kernel, "global")
    size = int(size, 0)
    live_size = reader(rest[0], "u32") if rest else None

    def run(threads, mask):
        lanes = threads.active(mask)
        target = threads.of(to(threads), lanes)
        places = threads.shared.places(threads, target, size, lanes)
        threads.shared.begin_copy(threads, places, size, lanes)
        data = np.zeros((len(lanes), size), dtype=np.uint8)
        wanted = np.full(len(lanes), size)
        if live_size is not None:
            wanted = threads.of(live_size(threads), lanes).astype(np.int64)
        part = min(size, 8)
        live = wanted > 0
        if threads.counts and len(lanes):
            source = threads.of(of(threads), lanes)
            threads.counts.async_copy(threads, target, source, size, lanes, live)
        if live.any():
            where = threads.of(of(threads), lanes)[live]
            found = threads.memory.load(threads, where, part, size // part, lanes[live])
            data[live] = np.stack(found, axis=1).view(np.uint8)
            data[np.arange(size) >= wanted[:, None]] = 0
        group = np.full(len(lanes), -1)
        in_flight(threads).copies.append(Copy(lanes, group, places, data))

    return run


def commit(threads, mask) -> None:
    """Close a group: it holds the thread's copies since the last one."""
    flight = in_flight(threads)
    closing = np.zeros(threads.count, dtype=bool)
    closing[threads.active(mask)] = True
    flight.closed += closing
    for copy in flight.copies:
        open_ = (copy.group < 0) & closing[copy.lanes]
        copy.group = np.where(open_, flight.closed[copy.lanes], copy.group)


def wait(threads, mask, left: int) -> None:
    """Wait for all closed groups but the last `left`."""
    flight = in_flight(threads)
    waiting = np.zeros(threads.count, dtype=bool)
    waiting[threads.active(mask)] = True
    arrive(
        threads,
        lambda copy: (
            waiting[copy.lanes]
            & (copy.group >= 0)
            & (copy.group <= flight.closed[copy.lanes] - left)
        ),
    )


def wait_all(threads, mask) -> None:
    """Wait for every copy, of open groups too."""
    waiting = np.zeros(threads.count, dtype=bool)
    waiting[threads.active(mask)] = True
    arrive(threads, lambda copy: waiting[copy.lanes])


def arrive(threads, which) -> None:
    """Deliver the copies for which which(copy) holds, lane by lane."""
    flight = in_flight(threads)
    for copy in flight.copies:
        now = which(copy)
        if now.any():
            threads.shared.end_copy(threads, copy.places[now], copy.data[now], copy.lanes[now])
            keep = ~now
            copy.lanes, copy.group = copy.lanes[keep], copy.group[keep]
            copy.places, copy.data = copy.places[keep], copy.data[keep]
    flight.copies = [copy for copy in flight.copies if len(copy.lanes)]


KNOWN = {"cp": copy}
