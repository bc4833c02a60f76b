"""Makes Triton's interpreter compute what a GPU computes.

The interpreter runs a kernel's programs one after another in NumPy. NumPy has no bfloat16 and no
float8, so the interpreter keeps them as unsigned integers, and several operations then work on the
bit patterns instead of the values. Elsewhere it is kinder than a GPU: it accepts what the compiler
rejects, and reads zeros where a GPU reads garbage. A kernel that passes its tests there could still
be wrong.

Each function under `@mends` is a patch: it replaces one function of the interpreter, and its
docstring states the rule that it restores. `patches` says how they are installed;
`lessons.toolbox.kernels.triton_` calls `make_faithful()` wherever kernels are interpreted. Checked
with Triton 3.6 and 3.7.

What stays different: programs run one after another, in an order that `order` may draw, float32
sums are added in another order, exp and friends are correctly rounded, no inline assembly, no
bfloat16 atomics, no Gluon (`lessons.toolbox.gpu` runs it).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from lessons.toolbox.kernels.patches import (
    PATCHES,
    InterpreterMoved,
    Patch,
    make_faithful,
    mends,
    without,
)

__all__ = ["PATCHES", "InterpreterMoved", "Patch", "convert", "make_faithful", "without"]

# ---------------------------------------------------------------- converting values

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
# how the interpreter stores them
_BITS = {tl.float8e4nv: np.uint8, tl.float8e5: np.uint8, tl.bfloat16: np.uint16}


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """Convert between two float types as a GPU does, any shape: to nearest, ties to even; float8
    saturates (cvt.rn.satfinite).
    """
    if source == tl.float64 and target not in (tl.float64, tl.float32):
        data, source = _round_to_odd(data), tl.float32
    values = torch.from_numpy(np.array(data, order="C"))
    if source in _BITS:
        values = values.view(_TORCH[source])
    if target in (tl.float8e4nv, tl.float8e5):
        largest = torch.finfo(_TORCH[target]).max
        values = values.float().clamp(-largest, largest)  # infinities too; NaN stays
    values = values.to(_TORCH[target])
    if target in _BITS:
        values = values.reshape(-1).view(torch.uint8).numpy().view(_BITS[target])
        return values.reshape(np.shape(data))
    return values.numpy().reshape(np.shape(data))


def _round_to_odd(data: np.ndarray) -> np.ndarray:
    """float64 -> float32 such that rounding once more, to fewer bits, gives what one rounding would
    have given.
    """
    with np.errstate(over="ignore"):
        nearest = np.asarray(data, np.float64).astype(np.float32)
    toward_zero = np.where(
        np.abs(nearest) > np.abs(data), np.nextafter(nearest, np.float32(0)), nearest
    )
    inexact = (toward_zero != data) & np.isfinite(data)
    return (toward_zero.view(np.uint32) | inexact).astype(np.uint32).view(np.float32)


def _is(handle: object, *types: tl.dtype) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar in types


def _widen(handle: TensorHandle) -> TensorHandle:
    """float32 in place of bfloat16 or float8, whose values it holds exactly; anything else
    unchanged.
    """
    if not _is(handle, *_BITS):
        return handle
    return TensorHandle(convert(handle.data, handle.dtype.scalar, tl.float32), tl.float32)


def _narrow(result: TensorHandle, like: TensorHandle) -> TensorHandle:
    """Round a float32 result back to the type of `like`. The Booleans of a comparison stay."""
    if not _is(like, *_BITS) or result.data.dtype == np.bool_:
        return result
    target = like.dtype.scalar
    return TensorHandle(convert(np.asarray(result.data, np.float32), tl.float32, target), target)


# ---------------------------------------------------------------- bfloat16 and float8


@mends("InterpreterBuilder", "cast_impl", "self src dst_type")
def casts(original):
    """Casts round to nearest even, float8 saturates, integers go through float32."""

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or not (source in _BITS or target in _BITS):
            return original(self, src, dst_type)
        if source in _TORCH and target in _TORCH:
            return TensorHandle(convert(src.data, source, target), target)
        if source in _BITS:
            return original(self, _widen(src), dst_type)
        return TensorHandle(convert(src.data.astype(np.float32), tl.float32, target), target)

    return cast_impl


@mends("InterpreterBuilder", "create_fp_to_fp", "self src dst_type rounding_mode")
def float8_casts(original):
    """Float8 casts keep carry, saturation and NaN."""

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        source, target = src.dtype.scalar, dst_type.scalar
        # the interpreter truncates correctly
        toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        if toward_zero or not (source in _TORCH and target in _TORCH):
            return original(self, src, dst_type, rounding_mode)
        return TensorHandle(convert(src.data, source, target), target)

    return create_fp_to_fp


@mends("InterpreterBuilder", "binary_op", "self lhs rhs op")
def arithmetic(original):
    """Bfloat16 arithmetic and comparisons work on values, rounded once."""

    def binary_op(self, lhs, rhs, op):
        return _narrow(original(self, _widen(lhs), _widen(rhs), op), lhs)

    return binary_op


@mends("InterpreterBuilder", "create_fma", "self x y z")
def fma(original):
    """A fused multiply-add rounds once, after the sum."""

    def create_fma(self, x, y, z):
        # a float32 product is exact in float64
        wide = [np.asarray(_widen(handle).data, np.float64) for handle in (x, y, z)]
        exact = wide[0] * wide[1] + wide[2]
        return TensorHandle(convert(exact, tl.float64, z.dtype.scalar), z.dtype.scalar)

    return create_fma


@mends("InterpreterBuilder", "get_bf16", "")
def constants(original):
    """A bfloat16 constant can be made."""

    def get_bf16(self, value):
        return TensorHandle(
            convert(np.array([value], np.float32), tl.float32, tl.bfloat16), tl.bfloat16
        )

    return get_bf16


@mends("ReduceOps", "apply_impl", "self input")
def reductions(original):
    """Bfloat16 reductions compare and add values."""
    return lambda self, input: _over_values(self, input, original)


@mends("ScanOps", "apply_impl", "self input")
def scans(original):
    """Bfloat16 scans add and multiply values."""
    return lambda self, input: _over_values(self, input, original)


def _over_values(self, inputs: tuple, original: Callable):
    """Reduce or scan float32 copies of bfloat16 inputs, and round the results. A GPU rounds after
    every step of its own order.
    """
    if not any(_is(tensor.handle, *_BITS) for tensor in inputs):
        return original(self, inputs)
    wide = tuple(
        tl.tensor(handle := _widen(t.handle), _retype(t.type, handle.dtype)) for t in inputs
    )
    results = original(self, wide)
    results = results if isinstance(results, (list, tuple)) else (results,)
    narrow = [_narrow(result.handle, tensor.handle) for result, tensor in zip(results, inputs)]
    return tuple(
        tl.tensor(handle, _retype(result.type, handle.dtype))
        for handle, result in zip(narrow, results)
    )


def _retype(type_: tl.dtype, scalar: tl.dtype) -> tl.dtype:
    return tl.block_type(scalar, list(type_.shape)) if type_.is_block() else scalar


# ---------------------------------------------------------------- as strict as a GPU


@mends("InterpreterBuilder", "create_dot", "self a b d input_precision max_num_imprecise_acc")
def dot(original):
    """A dot multiplies values; it sees float32 as tf32 unless input_precision="ieee"; its inner
    dimension is 16 or more.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        # min_dot_size in triton/backends/nvidia/compiler.py
        smallest = 32 if a.dtype.primitive_bitwidth == 8 else 16
        if a.data.shape[-1] < smallest:
            raise ValueError(
                f"tl.dot: the inner dimension is {a.data.shape[-1]}, the compiler accepts "
                f"{smallest} or more"
            )
        if input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            a, b = _tf32(a), _tf32(b)
        return original(self, _widen(a), _widen(b), d, input_precision, max_num_imprecise_acc)

    return create_dot


def _tf32(handle: TensorHandle) -> TensorHandle:
    """What a tensor core sees of a float32: the low 13 bits are ignored (Triton's PTX hands them
    over unrounded).
    """
    if not _is(handle, tl.float32):
        return handle
    bits = np.ascontiguousarray(handle.data).view(np.uint32) & np.uint32(0xFFFFE000)
    return TensorHandle(bits.view(np.float32), tl.float32)


@mends(
    "InterpreterBuilder",
    "create_masked_load",
    "self ptrs mask other cache_modifier eviction_policy is_volatile",
)
def garbage(original):
    """A masked load without `other` reads garbage, not zeros."""

    def create_masked_load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile):
        if other is None and not np.all(mask.data):
            dtype = ptrs.get_element_ty()
            other = TensorHandle(np.full(np.shape(ptrs.data), _garbage_value(dtype)), dtype)
        return original(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    return create_masked_load


def _garbage_value(dtype: tl.dtype) -> np.generic:
    """NaN for a float, a large odd number for an integer: what no test mistakes for a result."""
    if dtype in _TORCH:
        return convert(np.array(math.nan, np.float32), tl.float32, dtype)[()]
    numpy_type = interpreter._get_np_dtype(dtype)
    return (
        numpy_type.type(True)
        if numpy_type == np.bool_
        else np.array(0x5A5A5A5A5A5A5A5A, np.int64).astype(numpy_type)[()]
    )


@mends("InterpreterBuilder", "create_maxnumf", "self lhs rhs")
def maximum(original):
    """Maximum gives the number where the other is NaN (max.f32)."""
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)


@mends("InterpreterBuilder", "create_minnumf", "self lhs rhs")
def minimum(original):
    """Minimum gives the number where the other is NaN (min.f32)."""
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


# ---------------------------------------------------------------- NumPy


@mends("", "_patch_lang_tensor", "tensor scope")
def index(original):
    """A loop over range(0, n) takes an n that is known only at run time (Triton 3.6 with NumPy 2.4
    raises TypeError).
    """

    def _patch_lang_tensor(tensor, scope):
        original(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        )

    return _patch_lang_tensor
