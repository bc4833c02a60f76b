"""What the 32 threads of a warp do together: shuffles, votes, sums.

Each takes part or faults: an instruction that names threads which stand elsewhere has no meaning.

Source: NVIDIA, PTX ISA 9.0, 9.7.9.6 (shfl.sync), 9.7.14.9 (vote), 9.7.14.11 (redux), 9.7.14.12
(elect).
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import WARP, Threads, predicate_reader, reader
from lessons.toolbox.gpu.values import DTYPES

LANES = np.arange(WARP)


def taking_part(threads: Threads, mask, members: np.ndarray) -> np.ndarray:
    """[count] bool: the threads that are here. Raises Fault if one that is named is not.

    members: [count], the mask that each thread gives. What threads that are elsewhere hold in that
    register counts for nothing.
    """
    here = threads.alive if mask is None else mask
    given = np.where(here, members, 0).astype(np.uint32).reshape(-1, WARP)
    members = np.bitwise_or.reduce(given, axis=1).repeat(WARP)
    named = (members >> threads.lane.astype(np.uint32)) & np.uint32(1) == 1
    warp_is_here = here.reshape(-1, WARP).any(1)[threads.lanes // WARP]
    missing = warp_is_here & named & ~here & (threads.thread < threads.block_size)
    if missing.any():
        threads.fail(
            "threads of the warp that must take part are elsewhere", np.flatnonzero(missing)
        )
    unnamed = here & ~named
    if unnamed.any():
        threads.fail("a thread takes part that the mask does not name", np.flatnonzero(unnamed))
    return here


def shuffle(instruction: Instruction, kernel: Kernel):
    """shfl.sync d|p, a, b, c, members: the value of a of another lane. c: the size of segments and
    how far one may reach.
    """
    target, value, lane, clamp, members = instruction.operands
    target, _, valid = target.partition("|")
    mode = instruction.modifiers[1]
    of, to = reader(value, "b32"), reader(lane, "u32")
    limits, named = reader(clamp, "u32"), reader(members, "u32")

    def run(threads, mask):
        taking_part(threads, mask, threads.spread(named(threads)))
        x = threads.spread(of(threads))
        other, limit = threads.spread(to(threads)).astype(np.int64) & 31, limits(threads)
        segment, bound = (limit >> 8 & 31).astype(np.int64), (limit & 31).astype(np.int64)
        mine = threads.lane
        first, last = mine & segment, (mine & segment) | (bound & ~segment)
        source = {
            "up": mine - other,
            "down": mine + other,
            "bfly": mine ^ other,
            "idx": first | (other & ~segment),
        }[mode]
        reaches = source >= last if mode == "up" else source <= last
        source = np.where(reaches, source, mine)
        if valid:
            threads.write(valid, reaches, mask)
        threads.write(target, x[threads.lanes - mine + source], mask)

    return run


def vote(instruction: Instruction, kernel: Kernel):
    """ballot: a bit for each lane. any, all, uni: one answer for the warp."""
    mode = instruction.modifiers[1] if instruction.has("sync") else instruction.modifiers[0]
    target, operand, members = instruction.operands
    holds, named = predicate_reader(operand), reader(members, "u32")

    def run(threads, mask):
        here = taking_part(threads, mask, threads.spread(named(threads)))
        yes = (threads.spread(holds(threads)) & here).reshape(-1, WARP)
        no = here.reshape(-1, WARP) & ~yes
        if mode == "ballot":
            bits = (yes.astype(np.uint64) << LANES.astype(np.uint64)).sum(1).astype(np.uint32)
            threads.write(target, np.repeat(bits, WARP), mask)
            return
        found = {"any": yes.any(1), "all": ~no.any(1), "uni": ~(yes.any(1) & no.any(1))}[mode]
        threads.write(target, np.repeat(found, WARP), mask)

    return run


def reduce(instruction: Instruction, kernel: Kernel):
    """redux.sync: the sum, smallest, ... of a register over the warp."""
    op, type_ = instruction.modifiers[1], instruction.type
    target, operand, members = instruction.operands
    of, named = reader(operand, type_), reader(members, "u32")
    dtype = DTYPES[type_]
    is_float = type_[0] == "f"
    functions = {
        "add": (np.add, 0),
        "and": (np.bitwise_and, -1),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
        "min": (np.fmin, np.inf) if is_float else (np.minimum, None),
        "max": (np.fmax, -np.inf) if is_float else (np.maximum, None),
    }
    if instruction.has("NaN"):
        functions |= {"min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}
    function, neutral = functions[op]
    if neutral is None:
        neutral = np.iinfo(dtype).max if op == "min" else np.iinfo(dtype).min
    neutral = np.array(neutral).astype(dtype)

    def run(threads, mask):
        here = taking_part(threads, mask, threads.spread(named(threads)))
        x = np.where(here, threads.spread(of(threads)), neutral).reshape(-1, WARP)
        threads.write(target, np.repeat(function.reduce(x, axis=1).astype(dtype), WARP), mask)

    return run


def elect(instruction: Instruction, kernel: Kernel):
    """elect.sync d|p, members: p holds in one thread of the warp, whose lane is d."""
    target, _, chosen = instruction.operands[0].partition("|")
    named = reader(instruction.operands[1], "u32")

    def run(threads, mask):
        here = taking_part(threads, mask, threads.spread(named(threads)))
        first = np.repeat(here.reshape(-1, WARP).argmax(1), WARP)
        threads.write(target, first.astype(np.uint32), mask)
        threads.write(chosen, threads.lane == first, mask)

    return run


def active_mask(instruction: Instruction, kernel: Kernel):
    """activemask: the lanes that are here."""

    def run(threads, mask):
        here = (threads.alive if mask is None else mask).reshape(-1, WARP)
        bits = (here.astype(np.uint64) << LANES.astype(np.uint64)).sum(1).astype(np.uint32)
        threads.write(instruction.operands[0], np.repeat(bits, WARP), mask)

    return run


KNOWN = {
    "shfl": shuffle,
    "vote": vote,
    "redux": reduce,
    "elect": elect,
    "activemask": active_mask,
}
