"""Registers to registers: mov, also of the halves of a register; prmt; addresses; hints.

Source: NVIDIA, PTX ISA 9.0, 9.7.9 (data movement).
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import predicate_reader, reader
from lessons.toolbox.gpu.values import DTYPES, UNSIGNED


def move(instruction: Instruction, kernel: Kernel):
    """A register, a constant or the address of a variable."""
    target, source = instruction.operands
    if isinstance(target, tuple):
        return taken_apart(target, source)
    if isinstance(source, tuple):
        return put_together(target, source)
    if instruction.type == "pred":
        read = predicate_reader(source)
    elif kernel.has_parameter(source):
        place = np.array([kernel.address_of(source)], dtype=np.uint64)
        return lambda threads, mask: threads.write(target, place, mask)
    else:
        read = reader(source, f"b{DTYPES[instruction.type].itemsize * 8}")
    return lambda threads, mask: threads.write(target, read(threads), mask)


def taken_apart(targets: tuple[str, ...], source: str):
    """mov.b32 {low, high}, whole."""
    count = len(targets)

    def run(threads, mask):
        whole = threads.registers[source]
        part = UNSIGNED[whole.dtype.itemsize // count]
        bits = 8 * part().itemsize
        for k, target in enumerate(targets):
            threads.write(target, (whole >> whole.dtype.type(bits * k)).astype(part), mask)

    return run


def put_together(target: str, sources: tuple[str, ...]):
    """mov.b32 whole, {low, high}."""
    count = len(sources)

    def run(threads, mask):
        parts = [threads.registers[source] for source in sources]
        size = parts[0].dtype.itemsize
        dtype = UNSIGNED[size * count]
        whole = np.zeros(1, dtype=dtype)
        for k, part in enumerate(parts):
            whole = whole | (part.astype(dtype) << dtype(8 * size * k))
        threads.write(target, whole, mask)

    return run


def permute_bytes(instruction: Instruction, kernel: Kernel):
    """prmt d, a, b, c: each byte of d is one of the eight of a and b, or copies of its sign."""
    target, low, high, choice = instruction.operands
    sources = [reader(operand, "u32") for operand in (low, high, choice)]

    def run(threads, mask):
        a, b, c = np.broadcast_arrays(*(read(threads) for read in sources))
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(len(a), dtype=np.uint32)
        for k in range(4):
            which = (c >> np.uint32(4 * k)) & np.uint32(0xF)
            byte = (both >> (8 * (which & 7)).astype(np.uint64)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), 0xFF, 0)
            byte = np.where(which & 8, sign, byte).astype(np.uint32)
            result |= byte << np.uint32(8 * k)
        threads.write(target, result, mask)

    return run


def convert_address(instruction: Instruction, kernel: Kernel):
    """cvta: an address of one space as one of all spaces. Here they are the same number, except
    that a variable's place in shared memory has no other use.
    """
    target, source = instruction.operands
    if kernel.has_parameter(source):
        place = np.array([kernel.address_of(source)], dtype=np.uint64)
        return lambda threads, mask: threads.write(target, place, mask)
    read = reader(source, instruction.type)
    return lambda threads, mask: threads.write(target, read(threads), mask)


def nothing(instruction: Instruction, kernel: Kernel):
    """Hints: what they change is speed."""
    return lambda threads, mask: None


KNOWN = {
    "mov": move,
    "prmt": permute_bytes,
    "cvta": convert_address,
    "prefetch": nothing,
    "prefetchu": nothing,
    "griddepcontrol": nothing,
    "setmaxnreg": nothing,
    "nanosleep": nothing,
}
