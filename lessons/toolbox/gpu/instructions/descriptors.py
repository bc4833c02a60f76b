"""Matrix descriptors: where an operand of wgmma or tcgen05.mma lies in shared memory.

A descriptor is 64 bits: the address, two strides, and the swizzle: which 16-byte chunks of a row
change places, so that the 8 rows of a core matrix lie in different banks. Hopper's and Blackwell's
differ in the bits of the swizzle alone.

Source: NVIDIA, PTX ISA 9.0, 9.7.15.5.1 (wgmma: core matrices, swizzles, descriptor), 9.7.16.4
(tcgen05: descriptor, canonical layouts).
"""

import numpy as np

from lessons.toolbox.gpu.instructions.tensor_cores import BITS, numbers


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Where a 16-byte chunk lies: bits 4 to 6 of its address, changed by bits 7 to 9."""
    mask = {128: 7, 64: 3, 32: 1, 0: 0}[width]
    return address ^ ((address >> 7) & mask) << 4


def swizzle_field(descriptor: np.ndarray, first: int) -> int:
    """The bits from `first` on, the same in all descriptors of an instruction."""
    fields = np.unique(descriptor.astype(np.uint64) >> np.uint64(first))
    if len(fields) > 1:
        raise ValueError("descriptors with different swizzles")
    return int(fields[0])


def operand_chunks(descriptor, width: int, rows: int, depth: int, type_: str, turned: bool):
    """`chunks` of an operand of rows x depth numbers. turned: memory has a row for each k."""
    bits = BITS[type_]
    shape = (depth, rows * bits // 8) if turned else (rows, depth * bits // 8)
    return chunks(descriptor, width, *shape, across=turned)


def chunks(descriptor, width: int, rows: int, row_bytes: int, across: bool) -> np.ndarray:
    """The addresses of a matrix's 16-byte chunks: [descriptors, rows, row_bytes / 16]. width: bytes
    of a swizzled row, 0 for none.

    across: the rows that lie in memory are those of k (the operand is transposed): `rows` is then K
    and row_bytes the bytes of M or N.
    """
    field = descriptor.astype(np.uint64)

    def bytes_of(first):
        return ((field >> np.uint64(first)) & np.uint64(0x3FFF)).astype(np.int64)[
            :, None, None
        ] * 16

    start, leading, stride = bytes_of(0), bytes_of(16), bytes_of(32)
    row, chunk = np.arange(rows)[None, :, None], np.arange(row_bytes // 16)[None, None, :]
    inner, outer = row % 8, row // 8
    if across:
        if width:
            wide = chunk * 16
            offset = wide // width * leading + outer * stride + inner * width + wide % width
        else:
            offset = chunk * stride + outer * leading + inner * 16
    elif width:
        offset = outer * stride + inner * width + chunk * 16
    else:
        offset = outer * stride + chunk * leading + inner * 16
    return swizzled(start + offset, width)


def operand_numbers(threads, where: np.ndarray, lanes, type_: str, turned: bool) -> np.ndarray:
    """[lanes, rows, depth]: what lies in an operand's chunks."""
    shared, size = threads.shared, max(1, BITS[type_] // 8)
    each = np.repeat(lanes, where[0].size)
    places = shared.places(threads, where.reshape(-1), 16, each)
    stored = shared.bytes.reshape(-1, 16)[places // 16].reshape(*where.shape[:2], -1)
    found = numbers(np.ascontiguousarray(stored).view(f"u{size}"), type_)
    return found.swapaxes(1, 2) if turned else found
