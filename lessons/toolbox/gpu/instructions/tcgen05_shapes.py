"""tcgen05.mma: what its instruction descriptor says, a register of 32 bits. Types, sizes, which
operands are transposed; with block scaling also of which type the scales are, and which bytes of a
column hold them.

    without scales    4-5 the type of d   7-9, 10-12 those of a, b   15, 16 transposed   17-22 N / 8
                      24-28 M / 16
    .block_scale      4-5 id of b's scales   7-12 types   17-22 N / 8   23 scales are UE8M0
                      27-28 M / 128   29-30 id of a's scales

Source: NVIDIA, PTX ISA 9.0, 9.7.16.4.2 (instruction descriptor), 9.7.16.10.7 (block scaling).
"""

from dataclasses import dataclass

import numpy as np

from lessons.toolbox.gpu.faults import UnknownInstruction
from lessons.toolbox.gpu.instructions.tensor_cores import BITS

# kind -> the types that an instruction descriptor may name
TYPES = {
    "kind_f16": {0: "f16", 1: "bf16"},
    "kind_tf32": {2: "tf32"},
    "kind_f8f6f4": {0: "e4m3", 1: "e5m2"},
    "kind_mxf8f6f4": {0: "e4m3", 1: "e5m2"},
    "kind_mxf4": {1: "e2m1"},
    "kind_mxf4nvf4": {1: "e2m1"},
}
# kind, scales of a row in one instruction -> the types of scales; the first pair is the default
SCALES = {
    ("kind_mxf8f6f4", 1): ("ue8m0",),
    ("kind_mxf4", 2): ("ue8m0",),
    ("kind_mxf4nvf4", 2): ("ue8m0",),
    ("kind_mxf4nvf4", 4): ("ue8m0", "ue4m3"),
}
PLACES = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}  # scales of a row -> where in a column they begin
ROW_BYTES = 32  # of an operand: the K of one instruction
# sparsity, saturation, signs, shifts; and for block scaling also transposes, a K of 96
OTHER_FIELDS = 0b1110_0000_1000_0000_0110_0000_0100_1111
OTHER_FIELDS_SCALED = 0b1000_0111_0000_0001_1110_0000_0100_1111


@dataclass(frozen=True)
class Shape:
    """What an instruction multiplies. turned: A and B have a row in memory for each k; scales: of a
    row, of that type, 0 for none.
    """

    rows: int
    columns: int
    depth: int
    types: tuple[str, str]
    turned: tuple[bool, bool] = (False, False)
    scales: int = 0
    scale_type: str = ""


def scales_of(kind: str, modifiers: tuple[str, ...]) -> int:
    """Scales of a row in one instruction, as `.scale_vec::4X` or `.block16` says; 0 without block
    scaling. Raises ValueError for what does not exist.
    """
    if "block_scale" not in modifiers:
        if any(kind == scaled for scaled, _ in SCALES):
            raise ValueError(f"{kind} without scales")
        return 0
    default = next(count for scaled, count in SCALES if scaled == kind)
    named = {"scale_vec_1X": 1, "scale_vec_2X": 2, "scale_vec_4X": 4, "block16": 4}
    named["block32"] = default  # both kinds of 4-bit numbers have two such blocks, 8-bit ones one
    asked = [named[word] for word in modifiers if word in named] or [default]
    if len(asked) > 1 or (kind, asked[0]) not in SCALES:
        raise ValueError(f"{kind} with {asked} scales of a row")
    return asked[0]


def shape_of(threads, kind: str, scales: int, what: np.ndarray) -> tuple[Shape, tuple[int, int]]:
    """(the shape, in which byte of a column the scales of A and of B begin). Raises
    UnknownInstruction for what the machine does not compute.
    """
    bits = int(what[0])
    shape, places = (scaled_shape if scales else plain_shape)(kind, scales, bits)
    if (what != bits).any() or shape is None:
        text = threads.kernel.instructions[threads.pc].text
        raise UnknownInstruction(
            f"{threads.kernel.name}, {threads.line_of(threads.pc)}: the machine does not know the "
            f"instruction descriptor {bits:#x} of {text!r}"
        )
    return shape, places


def types_of(kind: str, bits: int) -> tuple:
    return tuple(TYPES[kind].get(bits >> first & 7) for first in (7, 10))


def plain_shape(kind: str, scales: int, bits: int) -> tuple[Shape | None, tuple[int, int]]:
    types = types_of(kind, bits)
    if bits & OTHER_FIELDS or bits >> 4 & 3 != 1 or None in types:
        return None, (0, 0)
    turned = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    depth = 8 * ROW_BYTES // BITS[types[0]]
    return Shape((bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8, depth, types, turned), (0, 0)


def scaled_shape(kind: str, scales: int, bits: int) -> tuple[Shape | None, tuple[int, int]]:
    types, places = types_of(kind, bits), (bits >> 29 & 3, bits >> 4 & 3)
    scale_type = "ue8m0" if bits >> 23 & 1 else "ue4m3"
    known = scale_type in SCALES[kind, scales] and all(at in PLACES[scales] for at in places)
    rows, columns = (bits >> 27 & 3) * 128, (bits >> 17 & 63) * 8
    known &= rows == 128 and 8 <= columns <= 256  # 256 rows are of two programs
    if bits & OTHER_FIELDS_SCALED or None in types or not known:
        return None, (0, 0)
    depth = 8 * ROW_BYTES // BITS[types[0]]
    return Shape(rows, columns, depth, types, scales=scales, scale_type=scale_type), places
