"""Branches, ends and barriers: what decides where threads go on.

control(run, taking, leaving) -> {place: mask}: `taking` are the threads for which the predicate
holds (None: all of the machine's), `leaving` the others of the front.

Source: NVIDIA, PTX ISA 9.0, 9.7.12 (control flow), 9.7.14.1 (barriers).
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import WARP, reader
from lessons.toolbox.gpu.values import number


def fronts_of(run, *parts) -> dict[int, np.ndarray]:
    """{place: mask} of (place, mask) whose masks hold a thread."""
    found: dict[int, np.ndarray] = {}
    for place, mask in parts:
        mask = run.masked(mask)
        if len(mask) and mask.any():
            found[place] = found[place] | mask if place in found else mask
    return found


def branch(instruction: Instruction, kernel: Kernel):
    """Those that take it go to the label, the others on."""
    label = instruction.operands[0]

    def control(run, taking, leaving):
        place = run.threads.pc
        return fronts_of(run, (kernel.labels[label], taking), (place + 1, leaving))

    return control


def branch_by_table(instruction: Instruction, kernel: Kernel):
    """brx.idx i, table: to the label that register i counts."""
    index, table = instruction.operands
    labels = [kernel.labels[name] for name in kernel.tables[table]]
    read = reader(index, "u32")

    def control(run, taking, leaving):
        held, which = run.masked(taking), run.threads.spread(read(run.threads))
        parts = [(place, held & (which == k)) for k, place in enumerate(labels)]
        return fronts_of(run, *parts, (run.threads.pc + 1, leaving))

    return control


def end(instruction: Instruction, kernel: Kernel):
    """ret, exit: the threads are done."""

    def control(run, taking, leaving):
        place = run.threads.pc
        going_on = run.masked(leaving).copy()
        if taking is None or len(taking):
            run.end(taking)
        return fronts_of(run, (place + 1, going_on))

    return control


def trap(instruction: Instruction, kernel: Kernel):
    """A failed assertion of the kernel."""

    def control(run, taking, leaving):
        if taking is None or taking.any():
            run.threads.fail("the kernel stops itself", run.threads.active(taking))
        return fronts_of(run, (run.threads.pc + 1, leaving))

    return control


def barrier(instruction: Instruction, kernel: Kernel):
    """bar.sync a{, b}: wait at barrier a for b threads, or for all of the program. Within a warp
    (bar.warp.sync) there is nothing to wait for, because its threads go in step. bar.sync is
    aligned: the threads of a warp that have not ended come together, or nothing is defined.
    """
    if instruction.has("warp"):
        return lambda run, taking, leaving: fronts_of(
            run, (run.threads.pc + 1, taking), (run.threads.pc + 1, leaving)
        )
    if not instruction.has("sync"):
        raise ValueError(instruction.text)
    which, *counts = instruction.operands
    constant = number(which, np.dtype("u4"))
    which = reader(which, "u32")
    count = reader(counts[0], "u32") if counts else None
    is_aligned = instruction.op == "bar" or instruction.has("aligned")

    def control(run, taking, leaving):
        threads = run.threads
        place = threads.pc + 1
        if is_aligned and taking is not None and len(taking):
            check_whole_warps(threads, taking)
        fronts = fronts_of(run, (place, leaving))
        numbers = which(threads)
        if constant is None and len(numbers) > 1:  # warps of one front at several barriers
            held = run.masked(taking)
            groups = [(int(n), held & (numbers == n)) for n in np.unique(numbers[held])]
        else:
            groups = [(int(numbers[0]), taking)]
        for at, mask in groups:
            needed = None if count is None else count(threads)
            for where, free in run.barriers.arrive(at, needed, place, mask).items():
                fronts[where] = fronts[where] | free if where in fronts else free
        return fronts

    return control


def check_whole_warps(threads, mask: np.ndarray) -> None:
    """Raises Fault if the mask holds a part of a warp's threads."""
    here, missing = mask.reshape(-1, WARP), (threads.alive & ~mask).reshape(-1, WARP)
    parts = np.flatnonzero(here.any(1) & missing.any(1))
    if len(parts):
        warp = int(parts[0])
        threads.fail(
            f"{here[warp].sum()} threads of a warp come to the barrier, "
            f"{missing[warp].sum()} of it do not: a barrier is for whole warps",
            warp * WARP + np.flatnonzero(here[warp]),
        )


KNOWN = {
    "bra": branch,
    "brx": branch_by_table,
    "ret": end,
    "exit": end,
    "trap": trap,
    "bar": barrier,
    "barrier": barrier,
}
