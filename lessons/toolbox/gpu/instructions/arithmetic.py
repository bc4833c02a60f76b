"""Integers and floats: what a thread computes alone.

Source: NVIDIA, PTX ISA 9.0, 9.7.1 (integers), 9.7.3 (floating point), 9.7.4 (half precision). What
an approximation may be off by stands beside it.
"""

from functools import reduce

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.rounding import ROUNDING
from lessons.toolbox.gpu.threads import predicate_reader, reader
from lessons.toolbox.gpu.values import (
    DTYPES,
    INTEGER_PAIRS,
    PAIRS,
    flushed,
    fused,
    in_halves,
    narrow,
    pack,
    quieted,
    unpack,
    widen,
)

# ---------------------------------------------------------------- what it computes

INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "cnot": lambda x: (x == 0).astype(x.dtype),
    "mad": lambda a, b, c: a * b + c,
}
FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "copysign": lambda sign, value: np.copysign(value, sign),  # in this order in PTX
    "fma": fused,
    "mad": fused,
    "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
# Relative error of the approximations, in units of 2^-23: the manual's largest.
ERROR = {
    "ex2": 2.0,  # 2^-22
    "lg2": 2.0,
    "rcp": 1.0,
    "rsqrt": 1.1,  # 2^-22.9
    "sqrt": 2.0,
    "div": 2.0,  # div.full: 2 units in the last place
    "sin": 5.7,  # 2^-20.5
    "cos": 5.7,
    "tanh": 4096.0,  # 2^-11
}
WORDS = {"rn", "ftz", "sat", "approx"}
SOME_WORDS = {"mul": {"lo", "hi", "wide"}, "mad": {"lo", "hi", "wide"}, "div": {"full"}}
SOME_WORDS |= {"min": {"NaN"}, "max": {"NaN"}}


def smaller_or_larger(instruction: Instruction):
    """min and max of floats: NaN only if all are, or with .NaN if one is. Blackwell takes three."""
    table = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
    function = table[instruction.op][instruction.has("NaN")]
    return lambda *numbers: reduce(function, numbers)


# ---------------------------------------------------------------- decoders


def compute(instruction: Instruction, kernel: Kernel):
    """An operation on numbers of one type."""
    if instruction.type == "pred":
        return logic(instruction)
    if instruction.type in PAIRS or instruction.type in ("bf16", "f16"):
        return half_precision(instruction)
    if instruction.type[0] == "f":
        return floating(instruction)
    return integer(instruction)


def logic(instruction: Instruction):
    """and, or, xor, not of predicates."""
    function = {
        "and": np.logical_and,
        "or": np.logical_or,
        "xor": np.logical_xor,
        "not": np.logical_not,
    }[instruction.op]
    target, *operands = instruction.operands
    sources = list(map(predicate_reader, operands))

    def run(threads, mask):
        threads.write(target, function(*(read(threads) for read in sources)), mask)

    return run


def integer(instruction: Instruction):
    """Integers wrap around, unless the instruction asks for a wider result or its upper half."""
    op, type_ = instruction.op, instruction.type
    if op in ("mul", "mad") and instruction.has("wide", "hi"):
        return wide_product(instruction)
    function = divided if op == "div" else remainder if op == "rem" else INTEGER[op]
    if type_ in INTEGER_PAIRS:
        function = in_halves(function, INTEGER_PAIRS[type_])
    target, *operands = instruction.operands
    sources = [reader(operand, type_) for operand in operands]

    def run(threads, mask):
        threads.write(target, function(*(read(threads) for read in sources)), mask)

    return run


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero. By zero: all bits, as NVIDIA's GPUs give; the manual leaves it open."""
    quotient = a - np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype))
    quotient = quotient // np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """With the sign of a. By zero: a."""
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype)))


def wide_product(instruction: Instruction):
    """mul.wide, mad.wide: twice as many bits. mul.hi: the upper half of them."""
    type_ = instruction.type
    bits = int(type_[1:])
    target, *operands = instruction.operands
    first, second, *added = operands
    left, right = reader(first, type_), reader(second, type_)
    if bits == 64:
        return upper_half_of_64(instruction, left, right)
    double = f"{type_[0]}{2 * bits}"
    plus = [reader(operand, double if instruction.has("wide") else type_) for operand in added]
    dtype, is_wide = DTYPES[double], instruction.has("wide")

    def run(threads, mask):
        product = left(threads).astype(dtype) * right(threads).astype(dtype)
        if not is_wide:
            product = (product >> dtype.type(bits)).astype(DTYPES[type_])
        for read in plus:
            product = product + read(threads)
        threads.write(target, product, mask)

    return run


def upper_half_of_64(instruction: Instruction, left, right):
    """mul.hi of 64 bits, in Python's whole numbers: rare, and NumPy has no 128 bits."""
    dtype = DTYPES[instruction.type]

    def run(threads, mask):
        a, b = left(threads).astype(object), right(threads).astype(object)
        upper = np.array([int(x) >> 64 for x in np.atleast_1d(a * b)], dtype=object)
        threads.write(
            instruction.operands[0], (upper & (2**64 - 1)).astype(np.uint64).view(dtype), mask
        )

    return run


def floating(instruction: Instruction):
    """float32 and float64."""
    op, type_ = instruction.op, instruction.type
    target, *operands = instruction.operands
    sources = [reader(operand, type_) for operand in operands]
    function = smaller_or_larger(instruction) if op in ("min", "max") else FLOAT[op]
    units = ERROR[op] if instruction.has("approx", "full") else 0.0
    flush = flushed if instruction.has("ftz") else None
    if type_ == "f64" and op in ("fma", "mad"):
        raise ValueError("fused products of float64 are not in NumPy")
    saturate = instruction.has("sat")
    keeps_bits = op in ("neg", "abs", "copysign")

    def run(threads, mask):
        given = [read(threads) for read in sources]
        if flush:
            given = [flush(x) for x in given]
        if units:
            exact = function(*(x.astype(np.float64) for x in given))
            near = ROUNDING.approximated(exact, units)
            # 2^0 and cos 0 are 1 by the manual's tables, and kernels rely on it
            result = np.where(given[0] == 0, exact.astype(np.float32), near)
        else:
            result = function(*given)
        if flush:
            result = flush(result)
        if saturate:
            result = np.where(np.isnan(result), np.float32(0), np.clip(result, 0, 1))
        if not keeps_bits and type_ == "f32":
            result = quieted(result)
        threads.write(target, result, mask)

    return run


def half_precision(instruction: Instruction):
    """16-bit floats, one or two in a register: computed in float32, where a product of two is
    exact, and rounded. Pairs of float32 (Blackwell) go the same way, without rounding.
    """
    op, type_ = instruction.op, instruction.type
    single = PAIRS.get(type_, type_)
    target, *operands = instruction.operands
    sources = [reader(operand, type_) for operand in operands]
    function = smaller_or_larger(instruction) if op in ("min", "max") else FLOAT[op]
    if op == "fma" and single != "f32":
        function = fused_to_half(single)

    def of(bits):
        return bits.view(np.float32) if single == "f32" else widen(bits, single)

    def back(x):
        return x.view(np.uint32) if single == "f32" else narrow(x, single)

    def run(threads, mask):
        given = [read(threads) for read in sources]
        if type_ in PAIRS:
            halves = zip(*(unpack(x.view(f"u{x.dtype.itemsize}")) for x in given))
            result = pack(*(back(function(*map(of, half))) for half in halves))
        else:
            result = back(function(*(of(x) for x in given)))
        threads.write(target, result, mask)

    return run


def fused_to_half(single: str):
    """a · b + c rounded once to 16 bits. float64 holds the exact sum of bfloat16 and float16 in all
    but extreme cases; the step to float32 is made odd, so that the next one rounds rightly.
    """

    def function(a, b, c):
        exact = a.astype(np.float64) * b + c
        near = exact.astype(np.float32)
        bits = near.view(np.uint32)
        toward = np.where(
            np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near
        )  # cut
        inexact = np.isfinite(exact) & (toward.astype(np.float64) != exact)
        odd = (toward.view(np.uint32) | np.uint32(1)).view(np.float32)
        return np.where(inexact & (bits != 0), odd, near)

    return function


def mixed(instruction: Instruction):
    """Blackwell's add, sub and fma of float32 with 16-bit operands: fma.rn.f32.bf16 d, a, b, c."""
    *_, wide, half = instruction.modifiers
    target, *operands = instruction.operands
    sources = [reader(operand, half) for operand in operands[:-1]]
    last = reader(operands[-1], wide)
    function = FLOAT[instruction.op]

    def run(threads, mask):
        given = [widen(read(threads), half) for read in sources]
        threads.write(target, quieted(function(*given, last(threads))), mask)

    return run


def any_arithmetic(instruction: Instruction, kernel: Kernel):
    """Of one type, or of two. What a word would change and nothing here does is not known."""
    modifiers = instruction.modifiers
    known = WORDS | SOME_WORDS.get(instruction.op, set()) | DTYPES.keys() | {"pred"}
    is_single = instruction.type in ("f32", "f64")
    if not known.issuperset(modifiers) or (not is_single and instruction.has("sat", "ftz")):
        raise ValueError(instruction.text)
    takes = (3, 4) if instruction.type == "f32" else (3,)
    if instruction.op in ("min", "max") and len(instruction.operands) not in takes:
        raise ValueError(instruction.text)
    if len(modifiers) > 1 and modifiers[-2] == "f32" and modifiers[-1] in ("bf16", "f16"):
        return mixed(instruction)
    return compute(instruction, kernel)


KNOWN = dict.fromkeys({*INTEGER, *FLOAT, "rem"}, any_arithmetic)
