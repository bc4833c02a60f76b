"""cvt: a number as another type.

Source: NVIDIA, PTX ISA 9.0, 9.7.9.21 (cvt). Without a rounding the value must fit; `.rn` rounds to
the nearest even, `.rz` cuts; to integers `.rni`, `.rzi`, `.rmi`, `.rpi`. An integer that a float
does not fit becomes the nearest one that there is; NaN becomes 0.
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.threads import reader
from lessons.toolbox.gpu.values import (
    DTYPES,
    flushed,
    from_fp8,
    narrow,
    pack,
    quieted,
    to_fp8,
    towards_zero,
    unpack,
    widen,
)

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
HALF = ("bf16", "f16")
WORDS = ("rn", "rz", "rna", "ftz", "sat")


def convert(instruction: Instruction, kernel: Kernel):
    """The conversion that the last two modifiers name: to, from."""
    to, of = instruction.modifiers[-2:]
    if to.endswith("x2"):
        return to_pair(instruction, to, of)
    if not ({*TO_INTEGER, *WORDS} | DTYPES.keys()).issuperset(instruction.modifiers):
        raise ValueError(instruction.text)
    target, operand = instruction.operands
    source = reader(operand, of)
    width = kernel.width(target) // 8
    change = converter(instruction, to, of)

    def run(threads, mask):
        result = change(source(threads))
        if result.dtype.itemsize < width:  # a register wider than the type: extended by its sign
            result = result.astype(f"{result.dtype.kind}{width}")
        threads.write(target, result, mask)

    return run


def converter(instruction: Instruction, to: str, of: str):
    """The function from numbers of one type to those of another."""
    are_integers = to[0] in "usb" and of[0] in "usb"
    if instruction.has("rna") != (to == "tf32") or (instruction.has("sat") and not are_integers):
        raise ValueError(instruction.text)
    if to in HALF:
        cut = towards_zero if instruction.has("rz") else narrow
        return lambda x: cut(as_float32(x, of), to)
    if to == "tf32":
        return to_tf32
    if are_integers:
        return saturating(to) if instruction.has("sat") else lambda x: x.astype(DTYPES[to])
    if to[0] in "usb":
        rounding = next(TO_INTEGER[word] for word in instruction.modifiers if word in TO_INTEGER)
        return lambda x: to_integer(rounding(as_float32(x, of)), to)
    if instruction.has(*TO_INTEGER):  # a float without its fraction
        rounding = next(TO_INTEGER[word] for word in instruction.modifiers if word in TO_INTEGER)
        flush = flushed if instruction.has("ftz") and to == "f32" else lambda x: x
        return lambda x: rounding(flush(x)).astype(DTYPES[to])
    if instruction.has("rz") and to == "f32" and of != "f16":
        raise ValueError("float32 by cutting")
    ftz = instruction.has("ftz")

    def to_float(x):
        wide = as_float32(x, of) if of in HALF else x.astype(DTYPES[to])
        wide = flushed(wide) if ftz and to == "f32" else wide
        return quieted(wide) if to == "f32" and of not in ("f64", *HALF) else wide

    return to_float


def as_float32(x: np.ndarray, of: str) -> np.ndarray:
    """Numbers of any type in float32 (or float64, where they are)."""
    if of in HALF:
        return widen(x, of)
    return x if x.dtype.kind == "f" else x.astype(np.float32)


def to_integer(x: np.ndarray, to: str) -> np.ndarray:
    """Whole numbers in a float, as an integer type that holds the nearest."""
    info = np.iinfo(DTYPES[to])
    wide = np.where(np.isnan(x), 0, x).astype(np.float64)
    inside = np.clip(wide, float(info.min), float(info.max))
    whole = np.where(inside >= float(info.max), 0, inside).astype(DTYPES[to])
    return np.where(inside >= float(info.max), DTYPES[to].type(info.max), whole)


def saturating(to: str):
    info = np.iinfo(DTYPES[to])
    return lambda x: np.clip(x.astype(np.int64), info.min, info.max).astype(DTYPES[to])


def to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 with 10 bits behind the point, ties away from zero (.rna)."""
    bits = x.view(np.uint32)
    return (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def to_pair(instruction: Instruction, to: str, of: str):
    """Two numbers in one register; the first operand becomes the upper half."""
    target, *operands = instruction.operands
    to_one, of_one = to[:-2], of.removesuffix("x2")
    sources = [reader(operand, pair_as_bits(of)) for operand in operands]

    def narrowed(x):
        if to_one in HALF:
            cut = towards_zero if instruction.has("rz") else narrow
            return cut(np.maximum(x, 0) if instruction.has("relu") else x, to_one)
        return to_fp8(x, to_one)

    def run(threads, mask):
        if len(sources) == 2:
            high, low = (read(threads) for read in sources)
        else:
            low, high = unpack(sources[0](threads))
        if of_one in HALF:
            low, high = widen(low, of_one), widen(high, of_one)
        elif of_one != "f32":
            low, high = from_fp8(low, of_one), from_fp8(high, of_one)
        low, high = np.broadcast_arrays(low, high)
        threads.write(target, pack(narrowed(low), narrowed(high)), mask)

    return run


def pair_as_bits(of: str) -> str:
    """The register that holds a pair: 16 bits for two of FP8, 32 for two halves."""
    if not of.endswith("x2"):
        return of
    return "b16" if of.startswith("e") else "b32"


KNOWN = {"cvt": convert}
