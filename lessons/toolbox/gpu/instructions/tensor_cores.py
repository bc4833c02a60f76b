"""Matrices: ldmatrix and stmatrix move 8 × 8 tiles between shared memory and the registers of a
warp, mma.sync multiplies what the 32 threads of a warp hold.

A fragment is how a matrix lies in a warp's registers. With g = lane / 4 and t = lane % 4, thread
(g, t) holds two neighbours of row g, columns 2t and 2t + 1 of each 8 × 8 tile, in one register.

Sums: the manual leaves the order of the additions in an mma open, and asks for at least float32.
Products are exact here; the sum is made in float32, in an order that `rounding` draws. Hopper's
sums of 8-bit floats have fewer bits than that, see `product_in_14_bits`.

Source: NVIDIA, PTX ISA 9.0, 9.7.15.4 (fragments), 9.7.15.5 (mma), 9.7.15.5.15 (ldmatrix),
9.7.15.5.16 (stmatrix).
"""

import re
from functools import cache

import numpy as np

from lessons.toolbox.gpu.instructions.memory import address_reader
from lessons.toolbox.gpu.ptx import Instruction, Kernel
from lessons.toolbox.gpu.rounding import ROUNDING
from lessons.toolbox.gpu.threads import WARP
from lessons.toolbox.gpu.values import from_fp4, from_fp8, pack, unpack, widen

LANE = np.arange(WARP)
ROW, COLUMN = LANE // 4, LANE % 4  # g and t
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f32": 32}
BITS["e2m1"] = 4


@cache
def element_order(rows: int, columns: int, bits: int, transposed: bool) -> np.ndarray:
    """[rows, columns] -> where an operand's element lies in (register, lane, part of register).

    Tiles of 8 rows and 128 bits follow each other down the rows first (registers of A: the upper
    left, lower left, upper right, lower right tile). transposed: B, whose tiles hold columns.
    """
    parts = 32 // bits  # elements a register
    width = 4 * parts  # columns of a tile
    if transposed:
        return element_order(columns, rows, bits, False).T
    row, column = np.divmod(np.arange(rows * columns), columns)
    tile = column // width * (rows // 8) + row // 8
    lane = row % 8 * 4 + column % width // parts
    return ((tile * WARP + lane) * parts + column % parts).reshape(rows, columns)


@cache
def accumulator_order(rows: int, columns: int) -> np.ndarray:
    """[rows, columns] -> where an element of C or D lies in (register, lane): registers 0 and 1
    hold row g, 2 and 3 row g + 8, then the next 8 columns follow.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    register = column // 8 * 2 * (rows // 8) + row // 8 * 2 + column % 2
    lane = row % 8 * 4 + column % 8 // 2
    return (register * WARP + lane).reshape(rows, columns)


def operand_matrix(threads, names, rows: int, columns: int, type_: str, transposed: bool):
    """[warps, rows, columns] of the numbers in some registers: float32, or int64 for integers."""
    registers = [threads.spread(threads.registers[name]) for name in names]
    bits = BITS[type_]
    whole = np.stack([x.reshape(-1, WARP) for x in registers], axis=1)  # [warps, register, lane]
    parts = np.ascontiguousarray(whole).view(f"u{bits // 8}").reshape(len(whole), -1)
    order = element_order(rows, columns, bits, transposed)
    return numbers(parts[:, order.reshape(-1)], type_).reshape(len(whole), rows, columns)


def numbers(bits: np.ndarray, type_: str) -> np.ndarray:
    """What the bits of an operand mean. A byte holds two numbers of 4 bits: the last axis grows."""
    if type_ in ("f16", "bf16"):
        return widen(bits, type_)
    if type_ == "tf32":  # the lower 13 bits do not count
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if type_ in ("s8", "u8"):
        return bits.view(np.int8 if type_ == "s8" else np.uint8).astype(np.int64)
    return from_fp4(bits) if type_ == "e2m1" else from_fp8(bits, type_).reshape(bits.shape)


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c. Of floats: products are exact, added in float32 in groups of a drawn order."""
    if a.dtype == np.int64:
        return (a @ b + c).astype(np.int32)
    order = ROUNDING.sum_order(a.shape[-1])
    a, b = a[..., order].astype(np.float64), b[..., order, :].astype(np.float64)
    half = max(a.shape[-1] // 2, 1)
    total = c.astype(np.float32)
    for first in range(0, a.shape[-1], half):
        part = a[..., first : first + half] @ b[..., first : first + half, :]
        total = (total + part).astype(np.float32)
    return total


FRACTION = 13  # bits after the point, and one before it
SMALLEST = {"e4m3": -6, "e5m2": -14}  # exponents: smaller numbers have it, too, and fewer bits
ZERO = -1000  # as an exponent: below all others


def product_in_14_bits(a: np.ndarray, b: np.ndarray, c: np.ndarray, types) -> np.ndarray:
    """a · b + c as Hopper's wgmma adds products of 8-bit floats, bit for bit as it was found on an
    H100. a: [..., M, K], b: [..., K, N], c: [..., M, N] float32; types: of a and b.

    All products of a sum, and c, are shifted to the largest exponent among them. What is then
    beyond 13 bits after the point is cut off. The sum of the rest is exact, and it is cut to 13
    bits, too. DeepSeek-V3 (2024, section 3.5.2) describes the cut; Xie et al. 2025, MMA-Sim, tested
    it.
    """
    of_a, of_b = (exponents(x, SMALLEST[type_]) for x, type_ in zip((a, b), types))
    largest = exponents(c, -126)
    depth = range(a.shape[-1])
    for k in depth:
        np.maximum(largest, of_a[..., k, None] + of_b[..., None, k, :], out=largest)
    largest = np.where(largest <= ZERO // 2, 0, largest)  # nothing but zeros
    unit = np.ldexp(np.float32(1), largest - FRACTION)
    total = np.trunc(c / unit)
    for k in depth:
        total += np.trunc(a[..., k, None] * b[..., None, k, :] / unit)
    result = np.ascontiguousarray((total * unit).astype(np.float32))
    cut = np.uint32(0xFFFFFFFF << (23 - FRACTION) & 0xFFFFFFFF)
    return (result.view(np.uint32) & cut).view(np.float32)


def exponents(x: np.ndarray, smallest: int) -> np.ndarray:
    """int32: e of 1.… · 2^e, ZERO of 0."""
    found = np.maximum(np.frexp(x)[1] - 1, smallest)
    return np.where(x == 0, ZERO, found).astype(np.int32)


def multiply(instruction: Instruction, kernel: Kernel):
    """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c."""
    shape = next(word for word in instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", word))
    rows, columns, depth = map(int, re.findall(r"\d+", shape))
    to, of_a, of_b, of_c = instruction.modifiers[-4:]
    if not instruction.has("row") or not instruction.has("col") or (to, of_c) not in SUMS:
        raise ValueError(instruction.text)
    d, a_names, b_names, c_names = instruction.operands
    out, size = accumulator_order(rows, columns), SUMS[to, of_c]
    inverse = np.argsort(out.reshape(-1))
    for names, each in (
        (a_names, rows * depth * BITS[of_a]),
        (b_names, columns * depth * BITS[of_b]),
    ):
        if len(names) * WARP * 32 != each:
            raise ValueError(instruction.text)

    def run(threads, mask):
        whole_warps(threads, mask)
        a = operand_matrix(threads, a_names, rows, depth, of_a, False)
        b = operand_matrix(threads, b_names, depth, columns, of_b, True)
        sums = [threads.spread(threads.registers[name]).reshape(-1, WARP) for name in c_names]
        c = np.ascontiguousarray(np.stack(sums, axis=1)).view(size).reshape(len(a), -1)
        result = product(a, b, c[:, out.reshape(-1)].reshape(len(a), rows, columns))
        held = result.reshape(len(a), -1)[:, inverse].reshape(len(a), -1, WARP)
        for k, name in enumerate(d):
            threads.write(name, np.ascontiguousarray(held[:, k]).reshape(-1), mask)

    return run


SUMS = {("f32", "f32"): np.dtype("f4"), ("s32", "s32"): np.dtype("i4")}


def whole_warps(threads, mask) -> None:
    """Raises Fault if a part of a warp is elsewhere."""
    if mask is None:
        return
    here = mask.reshape(-1, WARP)
    torn = here.any(1) & ~here.all(1)
    if torn.any():
        threads.fail(
            "only a part of the warp takes part", np.flatnonzero(np.repeat(torn, WARP) & mask)
        )


def tiles_of(instruction: Instruction) -> int:
    return int(next(word for word in instruction.modifiers if re.fullmatch(r"x[124]", word))[1:])


def row_addresses(threads, address: np.ndarray, mask, tiles: int):
    """(lanes that name a row: 8 a tile, their addresses)."""
    whole_warps(threads, mask)
    lanes = threads.active(mask)
    lanes = lanes[threads.lane[lanes] < 8 * tiles]
    return lanes, address[lanes]


def load_matrix(instruction: Instruction, kernel: Kernel):
    """ldmatrix: lane 8i + j gives the address of row j of tile i, 16 bytes each."""
    if not instruction.has("m8n8") or instruction.type != "b16":
        raise ValueError(instruction.text)
    tiles, transposed = tiles_of(instruction), instruction.has("trans")
    target, source = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    address = address_reader(source, kernel, "shared")

    def run(threads, mask):
        lanes, where = row_addresses(threads, address(threads), mask, tiles)
        found = threads.shared.load(threads, where, 8, 2, lanes)
        rows = np.ascontiguousarray(np.stack(found, axis=1)).view(np.uint16)
        tile = rows.reshape(-1, tiles, 8, 8)  # [warps, tiles, row, column]
        if transposed:
            tile = tile.swapaxes(2, 3)
        low, high = tile[:, :, ROW, 2 * COLUMN], tile[:, :, ROW, 2 * COLUMN + 1]
        both = pack(low, high)
        for k, name in enumerate(targets):
            whole = np.zeros(threads.count, dtype=np.uint32)
            whole.reshape(-1, WARP)[np.unique(lanes // WARP)] = both[:, k]
            threads.write(name, whole, mask)

    return run


def store_matrix(instruction: Instruction, kernel: Kernel):
    """stmatrix: the reverse of ldmatrix (Hopper)."""
    if not instruction.has("m8n8") or instruction.type != "b16":
        raise ValueError(instruction.text)
    tiles, transposed = tiles_of(instruction), instruction.has("trans")
    target, source = instruction.operands
    names = source if isinstance(source, tuple) else (source,)
    address = address_reader(target, kernel, "shared")

    def run(threads, mask):
        lanes, where = row_addresses(threads, address(threads), mask, tiles)
        warps = np.unique(lanes // WARP)
        tile = np.zeros((len(warps), tiles, 8, 8), dtype=np.uint16)
        for k, name in enumerate(names):
            register = threads.spread(threads.registers[name]).reshape(-1, WARP)[warps]
            low, high = unpack(register)
            tile[:, k, ROW, 2 * COLUMN], tile[:, k, ROW, 2 * COLUMN + 1] = low, high
        if transposed:
            tile = tile.swapaxes(2, 3)
        rows = np.ascontiguousarray(tile).reshape(-1, 8).view(np.uint64)
        threads.shared.store(threads, where, 8, [rows[:, 0], rows[:, 1]], lanes)

    return run


KNOWN = {"mma": multiply, "ldmatrix": load_matrix, "stmatrix": store_matrix}
