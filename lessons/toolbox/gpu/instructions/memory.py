"""Loads and stores.

Source: NVIDIA, PTX ISA 9.0, 9.7.9.8 (ld), 9.7.9.11 (st), 5.1 (state spaces).
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel
from lessons.toolbox.gpu.threads import Threads, reader
from lessons.toolbox.gpu.values import DTYPES, UNSIGNED

SPACES = ("param", "shared", "shared_cta", "global", "local")


def space_of(instruction: Instruction) -> str:
    """Which memory. Without a name: global, the one that the course's kernels mean."""
    found = next((word for word in instruction.modifiers if word in SPACES), "global")
    return found.removesuffix("_cta")


def address_reader(operand: Address, kernel: Kernel, space: str):
    """[count]: where each thread reads or writes, int64."""
    offset = np.int64(operand.offset)
    if operand.base in kernel.shared:
        offset, base = offset + kernel.shared[operand.base], ""
    else:
        base = operand.base
    if not base:
        constant = np.array([offset], dtype=np.int64)
        return lambda threads: threads.spread(constant)
    wide = kernel.width(base) == 64
    read = reader(base, "s64" if wide else "u32")

    def address(threads: Threads) -> np.ndarray:
        return threads.spread(read(threads).astype(np.int64) + offset)

    return address


def load(instruction: Instruction, kernel: Kernel):
    """One value, or up to eight beside each other, into registers."""
    space = space_of(instruction)
    target, source = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    if space == "param":
        return load_parameter(instruction, kernel)
    size = DTYPES[instruction.type].itemsize
    signed = instruction.type[0] == "s"
    widths = [0 if name == "_" else kernel.width(name) // 8 for name in targets]
    address = address_reader(source, kernel, space)
    count = len(targets)

    def run(threads, mask):
        lanes = threads.active(mask)
        where = threads.of(address(threads), lanes)
        found = memory_of(threads, space).load(threads, where, size, count, lanes)
        for name, values, width in zip(targets, found, widths):
            if width > size:
                kind = "i" if signed else "u"
                values = values.view(f"{kind}{size}").astype(f"{kind}{width}")
                values = values.view(UNSIGNED[width])
            if len(lanes) < threads.count:
                whole = np.zeros(threads.count, dtype=values.dtype)
                whole[lanes] = values
                values = whole
            threads.write(name, values, mask)

    return run


def memory_of(threads: Threads, space: str):
    return {"global": threads.memory, "shared": threads.shared, "local": Local(threads)}[space]


def load_parameter(instruction: Instruction, kernel: Kernel):
    """A parameter is the same in every thread, unless a register says which one."""
    target, source = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    size = DTYPES[instruction.type].itemsize
    kind = "i" if instruction.type[0] == "s" else "u"
    widths = [max(size, kernel.width(name) // 8) for name in targets]
    address = None if kernel.has_parameter(source.base) else reader(source.base, "u64")

    def value(threads, name: str, start: int, width: int):
        stored = np.frombuffer(threads.parameters[name], f"{kind}{size}", 1, start)
        return stored.astype(f"{kind}{width}")

    def run(threads, mask):
        for k, (name, width) in enumerate(zip(targets, widths)):
            if address is None:
                found = value(threads, source.base, source.offset + k * size, width)
            else:
                lanes = threads.active(mask)  # the others may not have made their address yet
                asked = threads.of(address(threads), lanes)
                where, which = np.unique(asked, return_inverse=True)
                places = [kernel.parameter_at(int(at) + source.offset) for at in where]
                every = [value(threads, at, start + k * size, width) for at, start in places]
                found = np.zeros(threads.count, f"{kind}{width}")
                found[lanes] = np.concatenate(every)[which]
            threads.write(name, found, mask)

    return run


def store(instruction: Instruction, kernel: Kernel):
    """One value, or up to eight beside each other, from registers."""
    space = space_of(instruction)
    target, source = instruction.operands
    sources = source if isinstance(source, tuple) else (source,)
    size = DTYPES[instruction.type].itemsize
    values = [reader(name, f"u{8 * size}") for name in sources]
    address = address_reader(target, kernel, space)

    def run(threads, mask):
        lanes = threads.active(mask)
        where = threads.of(address(threads), lanes)
        given = [threads.of(read(threads), lanes) for read in values]
        memory_of(threads, space).store(threads, where, size, given, lanes)

    return run


class Local:
    """A thread's own memory, for what does not fit into its registers."""

    def __init__(self, threads: Threads):
        self.bytes = threads.local

    def load(self, threads, address, size, count, lanes):
        self.check(threads, address, size * count, lanes)
        view = self.bytes.view(UNSIGNED[size])
        return [view[lanes, address // size + k] for k in range(count)]

    def store(self, threads, address, size, values, lanes):
        self.check(threads, address, size * len(values), lanes)
        view = self.bytes.view(UNSIGNED[size])
        for k, value in enumerate(values):
            view[lanes, address // size + k] = value

    def check(self, threads, address, size, lanes):
        outside = (address < 0) | (address + size > self.bytes.shape[1])
        if outside.any():
            threads.fail(f"local memory has {self.bytes.shape[1]} bytes", lanes[outside])


KNOWN = {"ld": load, "ldu": load, "st": store}
