"""How a launch's arguments reach the machine: tensors as buffers, numbers as bytes."""

import ctypes
import os
import random
from dataclasses import dataclass

import numpy as np
import torch

from lessons.toolbox.gpu.global_memory import Buffer, GlobalMemory
from lessons.toolbox.gpu.instructions.tensormap import TensorMap
from lessons.toolbox.gpu.ptx import Kernel
from lessons.toolbox.gpu.written import written_parameters

# Of programs, warps and copies, apart from the tests' own random numbers. A fault names the seed of
# its launch; VARIABLE gives every launch one.
ORDER, VARIABLE = random.Random(), "LADDER_ORDER"
WATCHERS: list = []  # called with each Launch


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor of the host with what the compiler decided about it."""

    tensor: torch.Tensor
    shape: list[int]
    strides: list[int]
    box: list[int]
    swizzle: int  # bytes


def order_seed() -> int:
    """The seed of a launch's order."""
    given = os.environ.get(VARIABLE, "")
    return int(given) if given.isdigit() else ORDER.getrandbits(31)


def bind(kernel: Kernel, given: list[tuple[str, object]]) -> tuple[list[Buffer], list, dict]:
    """The storages of the tensors, each once; the values of all parameters; {parameter: tensor
    map}.
    """
    writes = written_parameters(kernel)
    buffers: dict[int, Buffer] = {}
    values, maps = [], {}

    def address_of(name: str, tensor: torch.Tensor, is_written: bool) -> int:
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(storage)
        if key not in buffers:
            buffers[key] = Buffer(bytes_of(storage), name, False, tensor.dtype)
        buffers[key].watched |= is_written
        offset = tensor.storage_offset() * tensor.element_size()
        return GlobalMemory.address(list(buffers).index(key), offset)

    for (name, value), (parameter, _, _) in zip(given, kernel.parameters):
        if isinstance(value, Descriptor):
            size = value.tensor.element_size()
            maps[parameter] = TensorMap(
                address_of(name, value.tensor, parameter in writes),
                tuple(value.shape),
                tuple(stride * size for stride in value.strides),
                tuple(value.box),
                size,
                value.swizzle,
            )
            value = 0
        elif isinstance(value, torch.Tensor):
            value = address_of(name, value, parameter in writes)
        values.append(value)
    return list(buffers.values()), values, maps


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    """The storage itself, not a copy."""
    if not storage.nbytes():
        return np.zeros(0, dtype=np.uint8)
    data = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(data, dtype=np.uint8)


def as_bytes(value, type_: str, size: int) -> bytes:
    """A parameter's value as its type lies in memory."""
    if value is None:
        value = 0
    if type_ in ("f32", "f64", "f16"):
        return np.array(value, dtype=f"f{size}").tobytes()
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
