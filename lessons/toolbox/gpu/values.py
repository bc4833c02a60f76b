"""What bits mean: the number types of PTX in NumPy, and how a result is rounded to them.

A register holds bits. The instruction says as what it reads them, so registers are kept as unsigned
integers of their width and viewed as the type that is asked for. bfloat16 and FP8 are no types of
NumPy: they are computed in float32, which holds each of them exactly.

Source: NVIDIA, PTX ISA 9.0, sections 5.2 (types) and 9.7 (the rounding of each instruction).
"""

import numpy as np
import torch

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
INTEGERS = {
    f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
    for kind in "bus"
    for size in UNSIGNED
}
FLOATS = {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
# What a register of this type is viewed as. bf16 stays bits until it is widened.
DTYPES = INTEGERS | FLOATS | {"bf16": np.dtype("u2"), "tf32": np.dtype("u4")}
PAIRS = {"bf16x2": "bf16", "f16x2": "f16", "f32x2": "f32"}
DTYPES |= {"bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4"), "f32x2": np.dtype("u8")}
INTEGER_PAIRS = {"s16x2": np.dtype("i2"), "u16x2": np.dtype("u2")}
DTYPES |= dict.fromkeys(INTEGER_PAIRS, np.dtype("u4"))
FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
# E2M1: a sign, two bits of exponent, one of mantissa
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
FP4 = np.concatenate([FP4, -FP4])
NAN_BF16, NAN_F32 = np.uint16(0x7FFF), np.uint32(0x7FFFFFFF)  # the NaN that PTX makes


def widen(bits: np.ndarray, type_: str) -> np.ndarray:
    """The numbers of a 16-bit float type, as float32."""
    if type_ == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def narrow(x: np.ndarray, type_: str) -> np.ndarray:
    """float32 rounded to the nearest of a 16-bit float type, to even; its bits, uint16."""
    if type_ == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> 16
    return np.where(np.isnan(x), NAN_BF16, rounded.astype(np.uint16))


def towards_zero(x: np.ndarray, type_: str) -> np.ndarray:
    """float32 cut to a 16-bit float type, as `.rz` says; its bits, uint16."""
    if type_ == "bf16":
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        return np.where(np.isnan(x), NAN_BF16, (bits >> np.uint32(16)).astype(np.uint16))
    near = x.astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(x)
    return np.where(beyond, np.nextafter(near, np.float16(0)), near).view(np.uint16)


def from_fp8(bits: np.ndarray, type_: str) -> np.ndarray:
    """The numbers of an FP8 type, float32. bits: uint8."""
    stored = torch.from_numpy(np.array(bits, dtype=np.uint8)).view(FP8[type_][0])
    return stored.float().numpy()


def from_fp4(bits: np.ndarray) -> np.ndarray:
    """[..., n] uint8 -> [..., 2n] float32: two E2M1 numbers a byte, the lower half first."""
    halves = np.stack([bits & np.uint8(15), bits >> np.uint8(4)], axis=-1)
    return FP4[halves].reshape(*bits.shape[:-1], -1)


def from_e8m0(bits: np.ndarray) -> np.ndarray:
    """2^(e − 127), float64; 255 is NaN. bits: uint8."""
    return np.where(bits == 255, np.nan, np.ldexp(1.0, bits.astype(np.int32) - 127))


def to_fp8(x: np.ndarray, type_: str) -> np.ndarray:
    """float32 rounded to the nearest of an FP8 type, at most its largest number; bits, uint8."""
    dtype, most = FP8[type_]
    held = np.where(np.isnan(x), x, np.clip(x, -most, most)).astype(np.float32)
    return torch.from_numpy(held).to(dtype).view(torch.uint8).numpy()


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of float32, rounded once.

    A product of two float32 is exact in float64. The sum is rounded there and again to float32.
    Twice is once unless the first result lies halfway between two float32: those few are moved off
    it, to the side where the exact sum lies.
    """
    product = a.astype(np.float64) * b
    total = product + c
    halfway = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if halfway.any():
        shifted = total - product  # Knuth's TwoSum: what the sum lost
        lost = (product - (total - shifted)) + (c - shifted)
        lost = np.where(halfway & np.isfinite(lost), lost, 0.0)
        total = np.where(lost == 0, total, np.nextafter(total, np.copysign(np.inf, lost)))
    return total.astype(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 whose subnormal numbers are zero, with their sign: `.ftz`."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x) if tiny.any() else x


def quieted(x: np.ndarray) -> np.ndarray:
    """float32 with the one NaN that PTX's float32 operations make."""
    isnan = np.isnan(x)
    return np.where(isnan, NAN_F32.view(np.float32), x) if isnan.any() else x


def unpack(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper half of registers."""
    half = UNSIGNED[bits.dtype.itemsize // 2]
    return bits.astype(half), (bits >> bits.dtype.type(4 * bits.dtype.itemsize)).astype(half)


def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two halves as one register."""
    whole = UNSIGNED[2 * low.dtype.itemsize]
    return low.astype(whole) | (high.astype(whole) << whole(8 * low.dtype.itemsize))


def in_halves(function, dtype: np.dtype):
    """A function of integers, for both halves of registers at once."""

    def of_pairs(*registers: np.ndarray) -> np.ndarray:
        halves = zip(*map(unpack, registers))
        return pack(*(function(*(x.view(dtype) for x in half)).view("u2") for half in halves))

    return of_pairs


def number(text: str, dtype: np.dtype) -> np.ndarray | None:
    """[1]: a constant of PTX ("-3", "0f3F800000", "0d...") in a dtype; None for a name."""
    if not (text[0].isdigit() or text[0] == "-"):  # said at once, because most operands are names
        return None
    try:
        if text[:2] in ("0f", "0F"):
            bits = np.array([int(text[2:], 16)], dtype=np.uint32)
        elif text[:2] in ("0d", "0D"):
            bits = np.array([int(text[2:], 16)], dtype=np.uint64)
        else:
            size = dtype.itemsize
            value = int(text.rstrip("U"), 0)  # a hexadecimal digit is never U
            bits = np.array([value & ((1 << 8 * size) - 1)], dtype=UNSIGNED[size])
    except ValueError:
        return None
    return bits.view(dtype)
