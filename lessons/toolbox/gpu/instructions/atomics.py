"""atom and red: read, change and write as one step, thread after thread in a drawn order.

Source: NVIDIA, PTX ISA 9.0, 9.7.14.6 (atom), 9.7.14.7 (red).
"""

import numpy as np

from lessons.toolbox.gpu.instructions.memory import address_reader, space_of
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel
from lessons.toolbox.gpu.releases import orders
from lessons.toolbox.gpu.threads import reader
from lessons.toolbox.gpu.values import DTYPES, PAIRS, UNSIGNED

CHANGES = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "exch": lambda old, x: x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "inc": lambda old, x: type(old)(0) if old >= x else old + type(old)(1),
    "dec": lambda old, x: x if old == 0 or old > x else old - type(old)(1),
}


def atomic(instruction: Instruction, kernel: Kernel):
    """atom d, [a], b{, c}: d is what stood there before. red gives nothing back."""
    space, type_ = space_of(instruction), instruction.type
    operands = instruction.operands
    target = None if isinstance(operands[0], Address) else operands[0]
    place, *given = operands[0 if target is None else 1 :]
    if isinstance(given[0], tuple):
        raise ValueError(instruction.text)
    name = next(word for word in instruction.modifiers if word in CHANGES or word == "cas")
    address = address_reader(place, kernel, space)
    values = [reader(operand, type_) for operand in given]
    size = DTYPES[type_].itemsize
    change = CHANGES.get(name)
    acquires, releases = orders(instruction) if space == "global" else (False, False)
    if type_ in ("f16", "bf16", *PAIRS):  # computed in float32, and rounded
        raise ValueError(instruction.text)

    def run(threads, mask):
        lanes = threads.active(mask)
        where = threads.of(address(threads), lanes)
        views = places_of(threads, space, where, size, lanes)
        inputs = [threads.of(read(threads), lanes) for read in values]
        before = np.zeros(threads.count, dtype=DTYPES[type_])
        for at in threads.random.permutation(len(lanes)):
            view, index = views[at]
            typed = view.view(DTYPES[type_])
            old = typed[index]
            before[lanes[at]] = old
            if change:
                typed[index] = change(old, inputs[0][at])
            elif old == inputs[0][at]:  # cas: only where it still is what one thinks
                typed[index] = inputs[1][at]
            if acquires or releases:
                program, place = int(threads.program[lanes[at]]), int(where[at])
                threads.memory.releases.meet(program, place, acquires, releases)
        if target is not None:
            threads.write(target, before.view(UNSIGNED[size]), mask)

    return run


def places_of(threads, space: str, where, size: int, lanes) -> list[tuple[np.ndarray, int]]:
    """(array of unsigned integers, index) for each lane."""
    if threads.counts:
        if space == "shared":
            threads.counts.shared_access(threads, where, size, lanes)
        else:
            threads.counts.access(threads, "stored", where, size, lanes)
    if space == "shared":
        places = threads.shared.places(threads, where, size, lanes) // size
        return [(threads.shared.view(size), int(place)) for place in places]
    found: list = [None] * len(lanes)
    for buffer, offset, chosen in threads.memory.parts(threads, where, size, lanes):
        for at, place in zip(np.arange(len(lanes))[chosen], offset // size):
            found[at] = (buffer.view(size), int(place))
    return found


def fence(instruction: Instruction, kernel: Kernel):
    """membar, fence: the machine keeps the order of a thread's own accesses anyway. A proxy fence
    lets asynchronous hardware see ordinary stores.
    """

    def run(threads, mask):
        if instruction.has("proxy"):
            threads.fence(mask)

    return run


KNOWN = {"atom": atomic, "red": atomic, "membar": fence, "fence": fence}
