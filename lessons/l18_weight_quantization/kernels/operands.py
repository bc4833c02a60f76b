"""What `quantized_matmul_kernel` is given for each format: its bytes, its scales, and its hook."""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l18_weight_quantization.kernels import unpack
from lessons.l18_weight_quantization.weights import (
    MXFP4_BLOCK,
    NF4_BLOCK,
    NF4_VALUES,
    NVFP4_BLOCK,
    TILE,
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    Nvfp4Weight,
    QuantizedWeight,
    table_on,
)

FLOAT8_HOOKS = {torch.float8_e4m3fn: unpack.e4m3, torch.float8_e5m2: unpack.e5m2}


class Operand(NamedTuple):
    """A quantized matrix, [N, K], as the kernel takes it.

    codes: [N, bytes of a row] uint8. scales: [N / scale_rows, groups]; zeros: the same, or None. In
    a group of group_bytes bytes, byte i holds column i of the group in its low half and column i +
    group_bytes in its high half; with one code a byte, column i. arrange: puts the columns of x:
    [M, K] into the order in which the matrix stores them.
    """

    codes: Tensor
    scales: Tensor
    group_bytes: int
    hook: object
    codes_a_byte: int = 2
    zeros: Tensor | None = None
    middle: int = 0  # the zero point that the hook subtracts
    scale_rows: int = 1
    table: Tensor | None = None  # float32
    tensor_scale: Tensor | None = None  # [1] float32, for the whole matrix
    arrange: object = None


def operand_of(weight: QuantizedWeight) -> Operand | None:
    """The kernel's view of a matrix, without a copy of its codes; None for a format or a shape that
    it does not read: rows must be whole 32-bit words, and a group short or made of whole steps.
    """
    make = OPERANDS.get(type(weight))
    found = make(weight) if make else None
    if found is None or step_bytes(found) is None:
        return None
    aligned = found.codes.data_ptr() % 4 == 0 and found.codes.stride(0) % 4 == 0
    return found if aligned and found.codes.stride(1) == 1 else None


def of_grouped_int(weight: GroupedInt) -> Operand:
    """[N, K] whole numbers: the bytes as they are, and act-order as an order of x's columns."""
    columns = weight.order
    return Operand(
        codes=weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        group_bytes=weight.group_size * weight.bits // 8,
        hook=unpack.int4 if weight.bits == 4 else unpack.int8,
        codes_a_byte=8 // weight.bits,
        middle=2 ** (weight.bits - 1),
        arrange=None if columns is None else lambda x: x.index_select(1, columns),
    )


def of_float8(weight: Float8Weight) -> Operand | None:
    """[N, K] 8-bit floats: a group is a whole row, or the 128 columns of a tile."""
    (rows, columns), scales = weight.shape, weight.scales
    is_tiled = scales.shape[1] > 1 or scales.shape[0] not in (1, rows)
    if weight.values.dtype not in FLOAT8_HOOKS:
        return None
    return Operand(
        codes=weight.values.view(torch.uint8),
        scales=scales if is_tiled else scales.expand(rows, 1),
        group_bytes=TILE if is_tiled else columns,
        hook=FLOAT8_HOOKS[weight.values.dtype],
        codes_a_byte=1,
        scale_rows=TILE if is_tiled else 1,
    )


def of_nf4(weight: Nf4Weight) -> Operand | None:
    """With double quantization the scales are unpacked first, by PyTorch, as bitsandbytes does."""
    rows, columns = weight.shape
    if columns % NF4_BLOCK:  # a block would belong to two rows
        return None
    return Operand(
        codes=weight.codes.view(rows, columns // 2),
        scales=weight.block_absmax().view(rows, columns // NF4_BLOCK),
        group_bytes=NF4_BLOCK // 2,
        hook=unpack.nf4,
        table=table_on(NF4_VALUES, weight.codes.device),
        # the second of two neighbours is the low half of their byte
        arrange=lambda x: neighbours_apart(x, NF4_BLOCK).flip(2).flatten(1),
    )


def of_mxfp4(weight: Mxfp4Weight) -> Operand:
    """[N, K] in MXFP4. Its bytes hold neighbours, so x's even columns come before its odd ones."""
    return Operand(
        codes=weight.codes,
        scales=weight.exponents,
        group_bytes=MXFP4_BLOCK // 2,
        hook=unpack.e2m1,
        arrange=lambda x: neighbours_apart(x, MXFP4_BLOCK).flatten(1),
    )


def of_nvfp4(weight: Nvfp4Weight) -> Operand:
    """[N, K] in NVFP4: MXFP4's bytes. A code times its block's scale has at most 6 significant
    bits, so it is exact in 16 bits, and the scale of the matrix waits for the float32 sum.
    """
    return Operand(
        codes=weight.codes,
        scales=weight.scales.view(torch.int8),
        group_bytes=NVFP4_BLOCK // 2,
        hook=unpack.e2m1,
        tensor_scale=weight.tensor_scale,
        arrange=lambda x: neighbours_apart(x, NVFP4_BLOCK).flatten(1),
    )


def neighbours_apart(x: Tensor, group_size: int) -> Tensor:
    """Columns 0, 2, 4 … of each group, then 1, 3, 5 …. x: [M, K] -> [M, groups, 2, group_size /
    2].
    """
    return x.unflatten(1, (-1, group_size // 2, 2)).transpose(2, 3)


OPERANDS = {
    GroupedInt: of_grouped_int,
    Float8Weight: of_float8,
    Nf4Weight: of_nf4,
    Mxfp4Weight: of_mxfp4,
    Nvfp4Weight: of_nvfp4,
}

# ---------------------------------------------------------------- steps

LONGEST_STEP = {1: 128, 2: 64}  # bytes, by codes a byte: 128 weights
SHORTEST_STEP = (
    32  # bytes, because half of them are the 16 numbers that a matrix unit takes at least
)


def step_bytes(operand: Operand, longest: int | None = None) -> int | None:
    """Bytes of a row that the kernel takes at a time; None where no number of them will do.

    The largest power of two that divides a group, so that a step has one scale. A group that is too
    short for that must be a power of two itself, of 4 bytes or more, so that a step has whole
    groups.
    """
    longest = longest or LONGEST_STEP[operand.codes_a_byte]
    row, group = operand.codes.shape[1], operand.group_bytes
    if row % 4 or not row:
        return None
    if group >= row:
        return longest
    power = group & -group  # the largest power of two that divides it
    if power >= SHORTEST_STEP:
        return min(power, longest)
    return longest if group == power and group >= 4 else None


def is_one_group(operand: Operand, step: int) -> bool:
    """Whether every step lies in one group."""
    return operand.group_bytes >= operand.codes.shape[1] or operand.group_bytes % step == 0
