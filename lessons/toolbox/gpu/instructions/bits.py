"""Shifts, fields of bits, comparisons, choices.

Source: NVIDIA, PTX ISA 9.0, 9.7.1 (bit fields), 9.7.6 (comparisons), 9.7.8 (logic and shifts).
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import predicate_reader, reader
from lessons.toolbox.gpu.values import DTYPES, FLOATS, PAIRS, pack, unpack, widen

COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,  # of unsigned numbers
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
JOINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
# True as well where an operand is NaN. `ne` of ordered numbers is false there.
UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def compare(instruction: Instruction, kernel: Kernel):
    """setp.lt p|q, a, b: p says whether it holds, q the opposite; both combined with another one by
    setp.lt.and. Of packed numbers p is for the lower halves and q for the upper ones.
    """
    name, *rest, type_ = instruction.modifiers
    if not JOINED.keys() >= set(rest):
        raise ValueError(instruction.text)
    target, first, second, *more = instruction.operands
    left, right = reader(first, type_), reader(second, type_)
    combine = next((word for word in rest if word in JOINED), None)
    other = predicate_reader(more[0]) if more else None
    target, _, opposite = target.partition("|")
    holds = comparison(name, PAIRS.get(type_, type_))

    def run(threads, mask):
        a, b = left(threads), right(threads)
        if type_ in PAIRS:
            found, second = map(holds, unpack(a), unpack(b))
        else:
            found = holds(a, b)
            second = ~found
        for name, value in ((target, found), (opposite, second)):
            if name:
                if combine:
                    value = JOINED[combine](value, other(threads))
                threads.write(name, value, mask)

    return run


def comparison(name: str, type_: str):
    """Of two arrays of a type: whether it holds for each pair. False where an operand is NaN, but
    for the names in UNORDERED.
    """
    function, is_float = COMPARE[UNORDERED.get(name, name)], type_ in ("f16", "bf16", "f32", "f64")

    def holds(a, b):
        if type_ in ("f16", "bf16"):
            a, b = widen(a, type_), widen(b, type_)
        elif type_ in FLOATS:
            a, b = a.view(FLOATS[type_]), b.view(FLOATS[type_])
        found = function(a, b)
        if is_float and name in ("ne", *UNORDERED):
            either = np.isnan(a) | np.isnan(b)
            found = found & ~either if name == "ne" else found | either
        return found

    return holds


def select(instruction: Instruction, kernel: Kernel):
    """selp d, a, b, p: a where p holds."""
    target, first, second, condition = instruction.operands
    type_ = f"b{DTYPES[instruction.type].itemsize * 8}"
    left, right, holds = reader(first, type_), reader(second, type_), predicate_reader(condition)

    def run(threads, mask):
        threads.write(target, np.where(holds(threads), left(threads), right(threads)), mask)

    return run


def shift(instruction: Instruction, kernel: Kernel):
    """By more than the width: nothing is left, or copies of the sign."""
    type_ = instruction.type
    target, value, amount = instruction.operands
    of, by = reader(value, type_), reader(amount, "u32")
    bits = int(type_[1:])
    is_left, is_signed = instruction.op == "shl", type_[0] == "s"

    def run(threads, mask):
        x, count = of(threads), by(threads)
        held = np.minimum(count, bits - 1).astype(x.dtype)
        moved = np.left_shift(x, held) if is_left else np.right_shift(x, held)
        if not is_signed or is_left:
            moved = np.where(count >= bits, x.dtype.type(0), moved)
        threads.write(target, moved, mask)

    return run


def bit_field(instruction: Instruction, kernel: Kernel):
    """bfe d, a, start, length: some of a's bits, with copies of the last one in front for .s32."""
    type_ = instruction.type
    target, value, start, length = instruction.operands
    of, first, count = reader(value, "b" + type_[1:]), reader(start, "u32"), reader(length, "u32")
    bits, signed = int(type_[1:]), type_[0] == "s"

    def run(threads, mask):
        at, size = first(threads) & 0xFF, count(threads) & 0xFF
        x = of(threads).astype(np.uint64)
        field = (x >> np.minimum(at, 63).astype(np.uint64)) & (
            (np.uint64(1) << np.minimum(size, 63).astype(np.uint64)) - np.uint64(1)
        )
        if signed:
            last = np.minimum(at + size - 1, bits - 1).astype(np.uint64)
            sign = (size > 0) & (((x >> last) & np.uint64(1)) == 1)
            ones = ~((np.uint64(1) << np.minimum(size, 63).astype(np.uint64)) - np.uint64(1))
            field = np.where(sign, field | ones, field)
        threads.write(target, field.astype(DTYPES["u" + type_[1:]]), mask)

    return run


def insert_bits(instruction: Instruction, kernel: Kernel):
    """bfi d, a, b, start, length: b with some bits from a."""
    type_ = instruction.type
    target, field, base, start, length = instruction.operands
    of, into = reader(field, type_), reader(base, type_)
    first, count = reader(start, "u32"), reader(length, "u32")

    def run(threads, mask):
        at, size = first(threads).astype(np.uint64), count(threads).astype(np.uint64)
        ones = ((np.uint64(1) << size) - np.uint64(1)) << at
        new = (of(threads).astype(np.uint64) << at) & ones
        mixed = (into(threads).astype(np.uint64) & ~ones) | new
        threads.write(target, mixed.astype(DTYPES[type_]), mask)

    return run


def count_bits(instruction: Instruction, kernel: Kernel):
    """popc, clz, brev."""
    target, value = instruction.operands
    of, bits = reader(value, instruction.type), int(instruction.type[1:])

    def run(threads, mask):
        x = of(threads)
        places = x[:, None] >> np.arange(bits, dtype=x.dtype) & x.dtype.type(1)
        if instruction.op == "popc":
            found = places.sum(1)
        elif instruction.op == "clz":
            found = np.where(places.any(1), np.argmax(places[:, ::-1], 1), bits)
        else:
            weights = x.dtype.type(1) << np.arange(bits, dtype=x.dtype)[::-1]
            threads.write(target, (places * weights).sum(1).astype(x.dtype), mask)
            return
        threads.write(target, found.astype(np.uint32), mask)

    return run


def three_inputs(instruction: Instruction, kernel: Kernel):
    """lop3: any function of three bits, given by its table of eight."""
    target, *operands, table = instruction.operands
    sources = [reader(operand, "b32") for operand in operands]
    bits = int(table, 0)

    def run(threads, mask):
        given = [read(threads) for read in sources]
        result = np.zeros(1, dtype=np.uint32)
        for row in range(8):
            if bits >> row & 1:
                terms = [x if row >> (2 - k) & 1 else ~x for k, x in enumerate(given)]
                result = result | (terms[0] & terms[1] & terms[2])
        threads.write(target, result, mask)

    return run


def funnel(instruction: Instruction, kernel: Kernel):
    """shf: 32 bits out of 64, of two registers."""
    target, low, high, amount = instruction.operands
    below, above, by = reader(low, "u32"), reader(high, "u32"), reader(amount, "u32")
    is_left, wraps = instruction.has("l"), instruction.has("wrap")

    def run(threads, mask):
        both = pack(below(threads), above(threads))
        count = by(threads) & 31 if wraps else np.minimum(by(threads), 32)
        count = count.astype(np.uint64)
        moved = (both << count) >> np.uint64(32) if is_left else both >> count
        threads.write(target, moved.astype(np.uint32), mask)

    return run


KNOWN = {
    "setp": compare,
    "selp": select,
    "shl": shift,
    "shr": shift,
    "bfe": bit_field,
    "bfi": insert_bits,
    "popc": count_bits,
    "clz": count_bits,
    "brev": count_bits,
    "lop3": three_inputs,
    "shf": funnel,
}
