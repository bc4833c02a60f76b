"""The GGUF container: a header, metadata by key, a table of tensors, and their bytes.

    file = read_gguf("model.gguf")                 the header; no tensor is read yet
    file.metadata["llama.block_count"]             Python numbers, strings, booleans and lists
    file.tensors["blk.0.attn_q.weight"]            its format, its shape, where it lies
    file.read("blk.0.attn_q.weight")               its bytes, copied out of the mapped file
    write_gguf("model.gguf", metadata, tensors)

Byte by byte, all numbers little-endian:

    "GGUF"  version u32  number of tensors u64  number of metadata entries u64
    metadata:   key string, type u32, value        string: length u64, UTF-8
                an array is: type of its elements u32, length u64, elements
    tensors:    name string, number of dimensions u32, dimensions u64 (the fastest first),
                format u32, offset u64 from the start of the data
    padding to a multiple of general.alignment, then the data

A file comes from the internet. So each length is compared with the bytes that are left before
anything of that length is read or allocated. Nothing in the format is code, and nothing is
unpickled.

Source: ggml/docs/gguf.md; gguf.cpp of llama.cpp. Versions 2 and 3 are the same for little-endian
files.
"""

import math
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS, GgufWeight
from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config_json import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMENSIONS = 4
LONGEST_NAME = 2**16 - 1  # of a key; longer ones are refused by llama.cpp, too
# numbers by the type's number in the file: how struct and NumPy call them
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
UINT32, INT32, FLOAT32, BOOL, UINT64, INT64 = 4, 5, 6, 7, 10, 11
FORMAT_OF = {kind.number: name for name, kind in FORMATS.items()}


class TensorInfo(NamedTuple):
    """shape: as PyTorch has it, the slowest dimension first. offset: in the file. size: bytes."""

    format: str
    shape: list[int]
    offset: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says. The tensors' bytes stay in the file until `read` asks for them."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @cached_property
    def _bytes(self) -> np.memmap:
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def read(self, name: str) -> GgufWeight:
        """A tensor of one or two dimensions, as its blocks: [N, bytes of a row]; a vector is one
        row.

        Copied, because a view would change or crash with the file.
        """
        info = self.tensors[name]
        stored = self._bytes[info.offset : info.offset + info.size]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return GgufWeight(torch.from_numpy(stored.copy()).reshape(rows, -1), info.format)


# ---------------------------------------------------------------- reading


class _Cursor:
    """Reads one thing after the other and never beyond the end."""

    def __init__(self, data: np.ndarray):
        self.data, self.at = data, 0

    def take(self, count: int, what: str) -> bytes:
        left = len(self.data) - self.at
        if count > left:
            raise CheckpointError(f"the file ends within {what}: {count} bytes wanted, {left} left")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def number(self, kind: int, what: str) -> int | float | bool:
        return self.numbers(kind, 1, what)[0]

    def numbers(self, kind: int, count: int, what: str) -> list:
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

    def string(self, what: str) -> str:
        length = self.number(UINT64, what)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{what} is not UTF-8") from None

    def counted(self, least: int, what: str) -> int:
        """A count of things that have at least so many bytes each. Refused if they cannot all
        follow.
        """
        count, left = self.number(UINT64, what), len(self.data) - self.at
        if count * least > left:
            raise CheckpointError(
                f"{what}: {count}, more than the {left} bytes that follow can hold"
            )
        return count

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            return self.number(_scalar(kind, what), what)
        kind = self.number(UINT32, what)
        if kind == STRING:
            count = self.counted(8, f"the length of {what}")
            return [self.string(what) for _ in range(count)]
        size = np.dtype(SCALARS[_scalar(kind, what)]).itemsize
        return self.numbers(kind, self.counted(size, f"the length of {what}"), what)


def _scalar(kind: int, what: str) -> int:
    if kind not in SCALARS:
        raise CheckpointError(
            f"{what} has the type {kind}; accepted: 0 to 12, arrays of those but 9"
        )
    return kind


def read_gguf(path: str | os.PathLike) -> GgufFile:
    """The header of a file. Raises CheckpointError, one line that names the file: another magic or
    version, a file that ends too early, counts that it cannot hold, unknown types, tensors that lie
    outside of it or have the same name.
    """
    path = Path(path).expanduser()
    try:
        size = path.stat().st_size
        data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _read(path, _Cursor(data))
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not a complete GGUF file: {error}") from None


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    magic = cursor.take(4, "the magic number")
    if magic != MAGIC:
        raise CheckpointError(f"it begins with {magic!r}, not with {MAGIC!r}")
    version = cursor.number(UINT32, "the version")
    if version & 0xFFFF == 0:
        raise CheckpointError("its numbers are big-endian; accepted: little-endian")
    if version not in VERSIONS:
        raise CheckpointError(f"its version is {version}; accepted: 2, 3")
    # a tensor's entry: name's length, dimensions, one dimension, format, offset
    num_tensors = cursor.counted(8 + 4 + 8 + 4 + 8, "the number of tensors")
    num_entries = cursor.counted(8 + 4 + 1, "the number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string("a metadata key")
        if not key or len(key) > LONGEST_NAME or key in metadata:
            raise CheckpointError(
                f"the metadata key {shown(key)} is empty, too long, or there twice"
            )
        kind = cursor.number(UINT32, f"the type of {shown(key)}")
        metadata[key] = cursor.value(kind, f"the metadata value {shown(key)}")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment is {shown(alignment)}; accepted: a power of two")
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    start = _padded(cursor.at, alignment)
    tensors: dict[str, TensorInfo] = {}
    for name, info in entries:
        if name in tensors:
            raise CheckpointError(f"the tensor {shown(name)} is there twice")
        room = max(len(cursor.data) - start, 0)
        if info.offset % alignment or info.offset + info.size > room:
            raise CheckpointError(
                f"the tensor {shown(name)} lies at offset {info.offset} and has {info.size} bytes; "
                f"accepted: a multiple of {alignment}, within the {room} bytes of data"
            )
        tensors[name] = info._replace(offset=start + info.offset)
    return GgufFile(path, version, metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, TensorInfo]:
    """A tensor's name, and what is known of it; its offset is still that within the data."""
    name = cursor.string("a tensor's name")
    what = f"the entry of the tensor {shown(name)}"
    num_dimensions = cursor.number(UINT32, what)
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise CheckpointError(f"{what} has {num_dimensions} dimensions; accepted: 1 to 4")
    shape = cursor.numbers(UINT64, num_dimensions, what)[::-1]
    number = cursor.number(UINT32, what)
    offset = cursor.number(UINT64, what)
    if number not in FORMAT_OF:
        supported = ", ".join(FORMATS)
        raise CheckpointError(f"{what} has the format {number}; supported: {supported}")
    kind = FORMATS[FORMAT_OF[number]]
    if 0 in shape or shape[-1] % kind.values:
        block = f"positive, the last one a multiple of {kind.values}"
        raise CheckpointError(f"{what} has the shape {shape}; accepted: {block}")
    size = math.prod(shape) // kind.values * kind.bytes
    return name, TensorInfo(FORMAT_OF[number], shape, offset, size)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


# ---------------------------------------------------------------- writing


def write_gguf(
    path: str | os.PathLike,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[GgufWeight, list[int]]],
) -> None:
    """A file of version 3. tensors: {name: (blocks, shape)}, written in this order.

    Types follow from the values: int -> u32 (i64 if it is negative, u64 if it needs it), float ->
    f32, bool, str, and a list -> an array of i32, f32, bool or strings. Raises ValueError for
    others.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, content = _typed(key, value)
        parts += [_string(key), struct.pack("<I", kind), content]
    alignment, offset = metadata.get("general.alignment", ALIGNMENT), 0
    for name, (weight, shape) in tensors.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        place = struct.pack("<IQ", FORMATS[weight.format].number, offset)
        parts += [_string(name), dimensions, place]
        offset += _padded(weight.nbytes, alignment)
    with open(path, "wb") as file:
        for content in (b"".join(parts), *(weight.blocks for weight, _ in tensors.values())):
            if isinstance(content, Tensor):
                content = content.cpu().contiguous().numpy().tobytes()
            file.write(content.ljust(_padded(len(content), alignment), b"\0"))


def _typed(key: str, value: Any) -> tuple[int, bytes]:
    """A metadata value's type and bytes."""
    if isinstance(value, list) and value:
        kind = {int: INT32, float: FLOAT32, bool: BOOL, str: STRING}.get(type(value[0]))
        if kind and all(type(item) is type(value[0]) for item in value):
            body = b"".join(map(_string, value)) if kind == STRING else _numbers(kind, value)
            return ARRAY, struct.pack("<IQ", kind, len(value)) + body
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, bool):
        return BOOL, _numbers(BOOL, [value])
    if isinstance(value, float):
        return FLOAT32, _numbers(FLOAT32, [value])
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        kind = INT64 if value < 0 else UINT32 if value < 2**32 else UINT64
        return kind, _numbers(kind, [value])
    raise ValueError(
        f"metadata: got {shown(value)} for {shown(key)}; accepted: str, bool, float, an int of 64 "
        f"bits, or a list of one of these types"
    )


def _numbers(kind: int, values: list) -> bytes:
    return np.array(values, dtype=SCALARS[kind]).tobytes()


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded
