"""wgmma: Hopper's matrix product of a warpgroup (four warps), from shared memory, beside the warps.

    wgmma.fence           what these threads have written to registers is there for the products
    wgmma.mma_async ...   starts d = a · b + d; a may lie in registers, b always in shared memory
    wgmma.commit_group    closes a group of products
    wgmma.wait_group n    waits for all groups but the last n

Until it is waited for, the registers of d belong to no thread: to read them is a fault. So is a
store to the shared memory that a product still reads. A register that a thread has written needs a
fence before a product uses it, as a or as d, and all need one before the first product.

Source: NVIDIA, PTX ISA 9.0, 9.7.15.7 (wgmma), 9.7.15.7.1 (wgmma.fence).
"""

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from lessons.toolbox.gpu.instructions.descriptors import (
    operand_chunks,
    operand_numbers,
    swizzle_field,
)
from lessons.toolbox.gpu.instructions.tensor_cores import (
    BITS,
    accumulator_order,
    operand_matrix,
    product,
    product_in_14_bits,
    whole_warps,
)
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import WARP, predicate_reader

GROUP = 4 * WARP  # threads of a warpgroup
SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}  # bits 62 and 63 of a descriptor -> bytes of a row


@dataclass
class Product:
    """One instruction in flight. lanes: the threads of its warpgroups; group: of each thread, -1
    while open; marks: what it reads of shared memory.
    """

    names: tuple[str, ...]
    lanes: np.ndarray  # [count] bool
    group: np.ndarray  # [count]
    marks: list  # (the lane of each mark, [(warp, cell, stamp), ...])


class Products:
    """All that are in flight. values: what the registers will hold."""

    def __init__(self, count: int):
        self.closed = np.zeros(count, dtype=np.int64)
        self.flying: list[Product] = []
        self.values: dict[str, np.ndarray] = {}

    def names(self, here: np.ndarray) -> set[str]:
        """The registers in flight in any of these threads."""
        return {n for flying in self.flying if (flying.lanes & here).any() for n in flying.names}

    def value(self, threads, name: str) -> np.ndarray:
        """[count]: what a sum adds to: the register, or what a product in flight leaves there."""
        value = threads.spread(threads.registers.get(name, np.zeros(1, dtype=np.uint32)))
        for flying in self.flying:
            if name in flying.names:
                value = np.where(flying.lanes, self.values[name], value)
        return value


def products(threads) -> Products:
    if threads.products is None:
        threads.products = Products(threads.count)
    return threads.products


def multiply(instruction: Instruction, kernel: Kernel):
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.bf16.bf16 d, a, b, scale-d, ..."""
    what = instruction.modifiers[0]
    if what == "fence":
        return fence
    if what == "commit_group":
        return commit
    if what == "wait_group":
        left = int(instruction.operands[0], 0)
        return lambda threads, mask: wait(threads, mask, left)
    shape = next(word for word in instruction.modifiers if re.fullmatch(r"m64n\d+k\d+", word))
    _, columns, depth = map(int, re.findall(r"\d+", shape))
    d, a, b, keeps, *rest = instruction.operands
    to, of_a, of_b = instruction.modifiers[-3:]
    signs, turned = rest[:2], [word != "0" for word in rest[2:]]
    if any(sign != "1" for sign in signs) or to not in ("f32", "s32"):
        raise ValueError(instruction.text)
    a_turned = turned[0] if len(turned) == 2 else False
    b_turned = turned[-1] if turned else False
    keeps = predicate_reader(keeps)
    size = np.dtype("f4" if to == "f32" else "i4")
    order = accumulator_order(16, columns).reshape(-1)
    inverse = np.argsort(order)
    types = of_a, of_b
    add = partial(product_in_14_bits, types=types) if BITS[of_a] == 8 and to == "f32" else product

    def run(threads, mask):
        groups = warpgroups(threads, mask)
        check_fenced(threads, [*d, *(a if isinstance(a, tuple) else ())], threads.active(mask))
        flight = products(threads)
        marks = []
        right = from_shared(threads, b, groups, columns, depth, of_b, b_turned, marks, None)
        if isinstance(a, tuple):
            every = operand_matrix(threads, a, 16, depth, of_a, False)
            left = every[groups // WARP + np.arange(4)[:, None]].swapaxes(0, 1)
            left = left.reshape(len(groups), 64, depth)
        else:
            left = from_shared(threads, a, groups, 64, depth, of_a, a_turned, marks, True)
        if threads.counts:
            rows = columns if isinstance(a, tuple) else columns + 64
            threads.counts.matrix_read(threads, rows * depth * BITS[of_b] // 8, len(groups))
        lanes = np.zeros(threads.count, dtype=bool)
        lanes.reshape(-1, WARP)[groups // WARP + np.arange(4)[:, None]] = True
        held = [flight.value(threads, name) for name in d]
        whole = np.stack([x.reshape(-1, WARP) for x in held], axis=1)
        warps = groups[:, None] // WARP + np.arange(4)
        c = whole[warps].reshape(len(groups), 4, -1)[:, :, order].reshape(len(groups), 64, columns)
        c = np.ascontiguousarray(c).view(size)
        kept = threads.spread(keeps(threads))[groups][:, None, None]
        result = add(left, right.swapaxes(1, 2), np.where(kept, c, size.type(0)))
        result = result.reshape(len(groups), 4, -1)[:, :, inverse].view(np.uint32)
        result = result.reshape(len(groups), 4, len(d), WARP)
        for k, name in enumerate(d):
            value = held[k].copy()
            value.reshape(-1, WARP)[warps] = result[:, :, k]
            flight.values[name] = value
        flight.flying.append(Product(d, lanes, np.where(lanes, -1, 0), marks))

    return run


def fence(threads, mask) -> None:
    """wgmma.fence: products see what these threads have written to registers."""
    here = np.zeros(threads.count, dtype=bool)
    here[threads.active(mask)] = True
    for name, late in threads.unfenced.items():
        if late.any():
            threads.unfenced[name] = late & ~here


def note_written(threads, place: int, names: frozenset[str], here: np.ndarray) -> None:
    """Threads have written registers at a place of the code. here: [count] bool. A copy of a
    register is as late as that one, because the assembler gives both the same place: Triton's
    compiler puts copies behind the fence.
    """
    for name in names & threads.unfenced.keys():
        late = threads.unfenced.get(copied(threads.kernel.instructions[place]), True)
        threads.unfenced[name] = np.where(here, late, threads.unfenced[name])


def copied(instruction: Instruction) -> str:
    """The register that a plain move copies; "" for anything else."""
    source = instruction.operands[-1] if instruction.op == "mov" else ""
    return source if isinstance(source, str) and source.startswith("%r") else ""


def check_fenced(threads, names: list[str], lanes: np.ndarray) -> None:
    """Raises Fault if a register of a product was written after the last fence, or never fenced."""
    for name in names:
        late = threads.unfenced[name][lanes]
        if late.any():
            threads.fail(
                f"a matrix product (wgmma) uses register {name}, and no wgmma.fence came after it "
                f"was written",
                lanes[late],
            )


def warpgroups(threads, mask) -> np.ndarray:
    """The first lanes of the warpgroups of a mask. Raises Fault if a part of one is elsewhere."""
    whole_warps(threads, mask)
    lanes = threads.active(mask)
    first = lanes[threads.thread[lanes] % GROUP == 0]
    if len(first) * GROUP != len(lanes):
        threads.fail("only a part of the warpgroup takes part", lanes)
    return first


def from_shared(threads, name, groups, rows, depth, type_, turned, marks, own_rows) -> np.ndarray:
    """[groups, rows, depth] of an operand in shared memory. own_rows: warp w reads rows 16 w to
    16 w + 15 alone, else every warp reads all.
    """
    descriptor = threads.spread(threads.registers[name])[groups]
    width = SWIZZLES[swizzle_field(descriptor, 62)]
    where = operand_chunks(descriptor, width, rows, depth, type_, turned)
    for warp in range(4):
        part = where[:, 16 * warp : 16 * warp + 16] if own_rows and not turned else where
        part = part.reshape(len(groups), -1)
        lanes = np.repeat(groups + warp * WARP, part.shape[1])
        places = threads.shared.places(threads, part.reshape(-1), 16, lanes)
        marks.append((lanes, threads.shared.note_read_beside(threads, places, 16, lanes)))
    return operand_numbers(threads, where, groups, type_, turned)


def commit(threads, mask) -> None:
    """Close a group: it holds the products since the last one."""
    flight = products(threads)
    here = np.zeros(threads.count, dtype=bool)
    here[threads.active(mask)] = True
    flight.closed += here
    for flying in flight.flying:
        open_ = flying.lanes & here & (flying.group < 0)
        flying.group = np.where(open_, flight.closed, flying.group)


def wait(threads, mask, left: int) -> None:
    """Wait for all groups but the last `left`: their registers hold the sums."""
    flight = products(threads)
    here = np.zeros(threads.count, dtype=bool)
    here[threads.active(mask)] = True
    ended = []
    for flying in flight.flying:
        now = flying.lanes & here & (flying.group >= 0) & (flying.group <= flight.closed - left)
        if now.any():
            flying.lanes = flying.lanes & ~now
            end_reads(threads, flying, now)
            ended.append((flying.names, now))
    flight.flying = [flying for flying in flight.flying if flying.lanes.any()]
    for names, now in ended:
        for other in flight.flying:  # a later product adds to the same sums
            if set(other.names) & set(names):
                now = now & ~other.lanes
        for name in names:
            threads.write(name, flight.values[name], now)
    for flying in flight.flying:  # what others still read stays marked
        for _, marks in flying.marks:
            threads.shared.still_read(marks)


def end_reads(threads, flying: Product, now: np.ndarray) -> None:
    """The products of the threads `now` have ended: their shared memory is free."""
    left = []
    for lanes, marks in flying.marks:
        done = now[lanes]
        if done.any():
            ended = [(warp[done], cell[done], stamp) for warp, cell, stamp in marks]
            threads.shared.end_read(threads, ended, threads.cta[lanes[done]])
        if not done.all():
            keep = ~done
            left.append((lanes[keep], [(w[keep], c[keep], stamp) for w, c, stamp in marks]))
    flying.marks = left


KNOWN = {"wgmma": multiply}
