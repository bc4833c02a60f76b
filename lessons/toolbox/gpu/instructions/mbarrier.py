"""mbarrier instructions, and elect's companion: who arrives, who waits.

Source: NVIDIA, PTX ISA 9.0, 9.7.14.15 (mbarrier).
"""

import numpy as np

from lessons.toolbox.gpu.instructions.control import fronts_of
from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import reader


def each_address(threads, address: np.ndarray, lanes: np.ndarray):
    """(address, the lanes that name it)."""
    where = address[lanes]
    for at in np.unique(where):
        yield int(at), lanes[where == at]


def barrier(instruction: Instruction, kernel: Kernel):
    """init, inval, arrive, arrive.expect_tx; try_wait is a wait (control)."""
    what = instruction.modifiers[0]
    if what in ("try_wait", "test_wait"):
        return wait(instruction, kernel)
    operands = instruction.operands[1:] if what == "arrive" else instruction.operands
    address = address_reader(operands[0], kernel, "shared")
    number = reader(operands[1], "u32") if len(operands) > 1 else None
    announces = instruction.has("expect_tx")
    if what not in ("init", "inval", "arrive", "expect_tx"):
        raise ValueError(instruction.text)

    def run(threads, mask):
        values = None if number is None else threads.spread(number(threads))
        for at, lanes in each_address(threads, address(threads), threads.active(mask)):
            value = 1 if values is None else int(values[lanes[0]])
            if threads.counts and what in ("init", "arrive"):
                kind = "expect" if announces else what
                threads.counts.flag(threads, kind, at, lanes, value)
            if what == "init":
                threads.mbarriers.init(at, value, lanes)
            elif what == "inval":
                threads.mbarriers.invalidate(at, lanes)
            elif announces:
                threads.mbarriers.arrive(at, lanes, announced=value)
            else:
                threads.mbarriers.arrive(at, lanes, count=value)

    return lambda run_, taking, leaving: going_on(run_, run, taking, leaving)


def going_on(run, act, taking, leaving):
    """Act, and let all threads of the front go on."""
    if taking is None or len(taking):
        act(run.threads, taking)
    place = run.threads.pc + 1
    return fronts_of(run, (place, taking), (place, leaving))


def wait(instruction: Instruction, kernel: Kernel):
    """try_wait.parity p, [address], parity: threads whose phase is not complete stay here until it
    is, as the hardware may let them.
    """
    if not instruction.has("parity"):
        raise ValueError(instruction.text)
    target, operand, parity = instruction.operands[:3]
    address, wanted = address_reader(operand, kernel, "shared"), reader(parity, "u32")

    def control(run, taking, leaving):
        threads, place = run.threads, run.threads.pc
        mask = run.masked(taking)
        parities = threads.spread(wanted(threads))
        ready = np.zeros(threads.count, dtype=bool)
        for at, lanes in each_address(threads, address(threads), np.flatnonzero(mask)):
            done = lanes[threads.mbarriers.is_complete(at, parities[lanes], lanes)]
            ready[done] = True
            if threads.counts:
                for value in (0, 1):
                    same = done[parities[done] & 1 == value]
                    threads.counts.flag(threads, "wait", at, same, value)
            if len(done):
                threads.mbarriers.acquire(at, done)
        if ready.any():
            threads.write(target, np.array([True]), ready)
        run.stall(place, mask & ~ready)
        return fronts_of(run, (place + 1, ready), (place + 1, leaving))

    return control


KNOWN = {"mbarrier": barrier}
