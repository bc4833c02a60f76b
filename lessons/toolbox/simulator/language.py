"""What a simulated kernel finds under the name `gl`: Gluon's language on torch tensors.

A tensor of the kernel is a torch tensor, a number known at run time an Int or a float. Layouts say
which thread holds which element; they change no value, so they are None, and a conversion between
two of them gives its argument back.
"""

import builtins
import operator
from collections.abc import Iterator

import torch
from torch import Tensor

from lessons.toolbox.simulator.machine import program, refuse
from lessons.toolbox.simulator.memory import allocate_shared_memory

__all__ = ["allocate_shared_memory"]

float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
constexpr = object


def __getattr__(name: str):
    if name.endswith("Layout"):
        return lambda *args, **options: None
    raise AttributeError(f"gl.{name} is not simulated; add it to {__name__}")


# ---------------------------------------------------------------- numbers


class Int(int):
    """An integer of the kernel: division rounds toward zero and the remainder has the dividend's
    sign, as on a GPU (-1 % 2 is -1).
    """

    def _with(function):
        def method(self, other):
            result = function(int(self), other)
            return Int(result) if type(result) is int else result

        return method

    __add__ = __radd__ = _with(operator.add)
    __mul__ = __rmul__ = _with(operator.mul)
    __and__ = __rand__ = _with(operator.and_)
    __or__ = __ror__ = _with(operator.or_)
    __xor__ = __rxor__ = _with(operator.xor)
    __sub__ = _with(operator.sub)
    __rsub__ = _with(lambda x, y: y - x)
    __floordiv__ = _with(lambda x, y: _quotient(x, y))
    __rfloordiv__ = _with(lambda x, y: _quotient(y, x))
    __mod__ = _with(lambda x, y: x - y * _quotient(x, y))
    __rmod__ = _with(lambda x, y: y - x * _quotient(y, x))
    __lshift__ = _with(operator.lshift)
    __rshift__ = _with(operator.rshift)

    def to(self, dtype) -> "Int":
        """An integer stays one."""
        return self


def _quotient(x: int, y: int):
    if isinstance(y, Tensor):
        return torch.div(x, y, rounding_mode="trunc")
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def range_(*bounds: int) -> Iterator[Int]:
    """What a kernel finds under the name `range`."""
    return (Int(i) for i in builtins.range(*bounds))


static_range = builtins.range


def program_id(axis: int) -> Int:
    """This program's place in the grid."""
    return Int(program().index[axis])


def num_programs(axis: int) -> Int:
    """The grid's size."""
    return Int(program().grid[axis])


def cdiv(x, div):
    """x / div, rounded up."""
    return (x + div - 1) // div


# ---------------------------------------------------------------- tensors


def arange(start, end, layout=None) -> Tensor:
    """[end - start] int32."""
    return torch.arange(start, end, dtype=torch.int32)


def full(shape, value, dtype, layout=None) -> Tensor:
    """A tensor [*shape] of one value."""
    return torch.full(list(shape), value, dtype=dtype)


def zeros(shape, dtype, layout=None) -> Tensor:
    """A tensor [*shape] of zeros."""
    return torch.zeros(list(shape), dtype=dtype)


def convert_layout(value: Tensor, layout=None, assert_trivial=False) -> Tensor:
    """value: [...], as it is."""
    return value


def expand_dims(x: Tensor, axis: int) -> Tensor:
    """x: [...] with a dimension of 1 more."""
    return x.unsqueeze(axis)


def where(condition: Tensor, x, y) -> Tensor:
    """Elementwise choice."""
    return torch.where(condition, x, y)


def exp2(x: Tensor) -> Tensor:
    """Elementwise 2^x."""
    return torch.exp2(x)


def exp(x: Tensor) -> Tensor:
    """Elementwise e^x."""
    return torch.exp(x)


def log2(x: Tensor) -> Tensor:
    """Elementwise, base 2."""
    return torch.log2(x)


def log(x: Tensor) -> Tensor:
    """Elementwise, base e."""
    return torch.log(x)


def maximum(x, y):
    """The number where the other is NaN, as max.f32 gives it. Elementwise."""
    return _of_two(x, y, builtins.max, torch.fmax)


def minimum(x, y):
    """The number where the other is NaN, as min.f32 gives it. Elementwise."""
    return _of_two(x, y, builtins.min, torch.fmin)


def _of_two(x, y, of_numbers, of_tensors):
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        result = of_numbers(x, y)
        return Int(result) if isinstance(result, int) else result
    return of_tensors(torch.as_tensor(x), torch.as_tensor(y))


def max(x: Tensor, axis: int) -> Tensor:
    """The largest number along one axis, [...] without it; NaN where there is none."""
    largest = x.masked_fill(x.isnan(), float("-inf")).amax(axis)
    return torch.where(x.isnan().all(axis), float("nan"), largest)


def sum(x: Tensor, axis: int) -> Tensor:
    """The sum along one axis, [...] without it."""
    return x.sum(axis)


# ---------------------------------------------------------------- global memory


class Pointer:
    """base: the tensor's elements, all of its storage; offset: an Int or a tensor of elements."""

    def __init__(self, base: Tensor, offset):
        self.base, self.offset = base, offset

    def __add__(self, step) -> "Pointer":
        return Pointer(self.base, self.offset + step)

    def inside(self, mask) -> tuple[Tensor, Tensor]:
        """The offsets, [...], and which of them are meant. Raises Hazard for one out of bounds."""
        offset = torch.as_tensor(self.offset)
        meant = torch.ones_like(offset, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        offset, meant = torch.broadcast_tensors(offset.long(), meant)
        outside = offset[meant & ((offset < 0) | (offset >= len(self.base)))]
        if outside.numel():
            raise refuse(f"element {outside[0]} of a tensor of {len(self.base)}")
        return offset, meant


def pointer_to(x: Tensor) -> Pointer:
    """The pointer to a tensor's first element, of any shape."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return Pointer(storage, x.storage_offset())


def store(pointer: Pointer, value, mask=None) -> None:
    """Write elementwise where the mask holds, [...]."""
    offset, meant = pointer.inside(mask)
    value = torch.as_tensor(value).to(pointer.base.dtype).broadcast_to(offset.shape)
    pointer.base[offset[meant]] = value[meant]


def load(pointer: Pointer, mask=None, other=None) -> Tensor:
    """Elementwise [...]: what is masked is `other`, or garbage (NaN) without it."""
    offset, meant = pointer.inside(mask)
    values = torch.empty(offset.shape, dtype=pointer.base.dtype)
    values[meant] = pointer.base[offset[meant]]
    values[~meant] = float("nan") if other is None else other
    return values


# ---------------------------------------------------------------- partitions


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Run every (function, arguments) in a partition of its own, to the end of all. -> the result
    of the first.
    """
    if len(worker_num_warps) != len(functions_and_args) - 1:
        workers = len(functions_and_args) - 1
        raise refuse(f"warp_specialize: {len(worker_num_warps)} counts of warps, {workers} workers")
    here = program()
    partitions = [
        here.spawn(f"partition {number}, {function.__name__}", lambda f=function, a=args: f(*a))
        for number, (function, args) in enumerate(functions_and_args)
    ]
    here.pause(lambda: all(partition.ended for partition in partitions))
    return partitions[0].result
