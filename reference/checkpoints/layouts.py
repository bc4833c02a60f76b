"""How checkpoints store one quantized matrix: the tensors that stand for it, read and written.

A matrix [N, K] is stored under a few names that end differently, for example

    layers.0.mlp.up_proj.qweight   layers.0.mlp.up_proj.scales   layers.0.mlp.up_proj.qzeros

A Layout turns these tensors into a QuantizedWeight and back, without losing a bit: no code is
computed anew, codes only move. Its `marker` tells a quantized layer from one that was left alone.

    name                 codes                                  zeros stored as
    gptq                 int32 along K, [K · bits / 32, N]      zero − 1, [K / group, N · bits / 32]
    gptq_v2              the same                               zero
    awq                  int32 along N, interleaved, [K, N / 8] zero, interleaved, [K / group, N /
                         8]
    pack-quantized       int32 along K, [N, K / 8]              zero, [N / 8, K / group]
    int-quantized        int8, [N, K], also for 4 bits          int8, [N, K / group], or none
    float-quantized      float8, [N, K]                         none
    bitsandbytes, int8   int8, [N, K]                           none
    bitsandbytes, nf4    uint8, two a byte, [N · K / 2, 1]      none

float_layouts.py holds the last three, and MXFP4; nvfp4_layouts.py NVFP4. Sources: AutoGPTQ,
qlinear_cuda_old.py, pack and forward; AutoAWQ, modules/linear/gemm.py, from_linear;
compressed-tensors, pack_quantized/helpers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import GroupedInt, QuantizedWeight, pack, unpack
from reference.checkpoints.words import from_words, to_words

Parts = dict[str, Tensor]  # the tensors of one matrix by the ends of their names
ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_zero_point")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each nibble of AutoAWQ's int32 holds


@dataclass(frozen=True)
class Layout:
    """One way to store a matrix.

    marker: the end of a name that only quantized layers have. ends: of all names that may stand for
    a matrix. read(parts, (N, K)): the matrix; raises ValueError for parts that do not fit. write:
    the opposite; None for a layout that is only read. unread: ends of tensors that do not change
    the matrix (scales of activations, a copy of the shape).
    """

    name: str
    marker: str
    ends: tuple[str, ...]
    read: Callable[[Parts, tuple[int, int]], QuantizedWeight]
    write: Callable[[QuantizedWeight], Parts] | None = None
    unread: tuple[str, ...] = ()


# ---------------------------------------------------------------- parts


def expect(parts: Parts, end: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """The part `end`. Raises ValueError, in one line, if it is missing, or of another shape or
    kind.
    """
    if end not in parts:
        raise ValueError(f"{end} is missing; accepted: a tensor of shape {list(shape)}")
    tensor = parts[end]
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{end}: got {got} {list(tensor.shape)}; accepted: {kinds} {list(shape)}, because the "
            f"layout and the other tensors ask for it"
        )
    return tensor


def groups_of(columns: int, group_size: int) -> int:
    """How many groups a row has. Raises ValueError for a group size that does not divide."""
    if group_size < 1 or columns % group_size:
        raise ValueError(
            f"group_size: got {group_size}; accepted: a divisor of the layer's {columns} columns"
        )
    return columns // group_size


def natural_codes(weight: GroupedInt) -> Tensor:
    """[N, K] uint8: the codes, each column at its own place, as files keep them."""
    stored = unpack(weight.codes, weight.bits, weight.group_size).flatten(1)
    if weight.order is None:
        return stored
    codes = torch.empty_like(stored)
    codes[:, weight.order] = stored
    return codes


def zeros_of(weight: GroupedInt) -> Tensor:
    """[N, groups] uint8, also for a symmetric format, whose zeros are all the same."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.uint8)


def grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, order: Tensor | None = None
) -> GroupedInt:
    """codes: [N, K] in their natural columns; scales, zeros: [N, groups] -> GroupedInt. Zeros that
    all are the symmetric ones are left out. Codes of 2 and 3 bits are kept as codes of 4.
    """
    if bits < 4:
        lag = 8 - 2 ** (bits - 1)  # so that the symmetric zero is that of 4 bits
        codes, zeros, bits = codes + lag, None if zeros is None else zeros + lag, 4
    if order is not None:
        codes = codes[:, order]
    groups = codes.unflatten(1, (scales.shape[1], -1))
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    return GroupedInt(
        pack(groups, bits).contiguous(),
        scales.contiguous(),
        None if zeros is None else zeros.contiguous(),
        bits,
        groups.shape[-1],
        order,
    )


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


# ---------------------------------------------------------------- GPTQ


def gptq(bits: int, group_size: int, zeros_less_one: bool = True) -> Layout:
    """AutoGPTQ's and GPTQModel's, of 2, 3, 4 or 8 bits; 4 and 8 are also written. group_size: -1
    for one group a row. zeros_less_one: the first form of the format stores zero − 1, "gptq_v2"
    stores zero.
    """
    lag, name = int(zeros_less_one), "gptq" if zeros_less_one else "gptq_v2"

    def read(parts: Parts, shape: tuple[int, int]) -> GroupedInt:
        rows, columns = shape
        size = columns if group_size == -1 else group_size
        count = groups_of(columns, size)
        check_words(rows, columns, bits, name)
        qweight = expect(parts, "qweight", (columns * bits // 32, rows), torch.int32)
        qzeros = expect(parts, "qzeros", (count, rows * bits // 32), torch.int32)
        scales = expect(parts, "scales", (count, rows), *FLOATS)
        codes = from_words(qweight.T.contiguous(), bits)  # [N, K]
        # & because a zero of 0 is stored as the largest number, which comes before 0 in a circle
        zeros = (from_words(qzeros, bits).int() + lag & 2**bits - 1).to(torch.uint8)
        order = None
        if "g_idx" in parts:
            order = order_of(expect(parts, "g_idx", (columns,), torch.int32, torch.int64), size)
        return grouped(codes, scales.T, zeros.T, bits, order)

    def write(weight: GroupedInt) -> Parts:
        check_written(weight, bits, name)
        codes, zeros = natural_codes(weight), zeros_of(weight).int() - lag & 2**bits - 1
        groups = torch.arange(codes.shape[1], device=codes.device) // weight.group_size
        g_idx = groups
        if weight.order is not None:
            g_idx = torch.empty_like(groups)
            g_idx[weight.order] = groups
        return {
            "qweight": to_words(codes, bits).T.contiguous(),
            "qzeros": to_words(zeros.T, bits).contiguous(),
            "scales": weight.scales.T.contiguous(),
            "g_idx": g_idx.int(),
        }

    return Layout(name, "qweight", ("qweight", "qzeros", "scales", "g_idx"), read, write)


def order_of(g_idx: Tensor, group_size: int) -> Tensor | None:
    """g_idx: [K], the group of each column -> [K] int64, the column of each stored place; None if
    the groups already are neighbours. Raises ValueError unless every group has group_size columns.
    """
    groups = len(g_idx) // group_size
    if bool((g_idx < 0).any()) or bool((g_idx >= groups).any()):
        raise ValueError(
            f"g_idx: got a group {int(g_idx.max())}, or one below 0; accepted: 0 to {groups - 1}"
        )
    counts = torch.bincount(g_idx.long(), minlength=groups)
    if bool((counts != group_size).any()):
        raise ValueError(
            f"g_idx: got a group of {int(counts.max())} columns; accepted: {group_size} in each"
        )
    order = g_idx.long().argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def check_written(weight: QuantizedWeight, bits: int, name: str) -> tuple[int, int]:
    """The matrix's shape. Raises ValueError for one that does not fill words of 32 bits."""
    check_bits(weight, bits, name)
    check_words(*weight.shape, bits, name)
    return weight.shape


def check_bits(weight: QuantizedWeight, bits: int, name: str) -> None:
    """Raise ValueError for another format, or for whole numbers of other bits."""
    if not isinstance(weight, GroupedInt) or weight.bits != bits:
        bits_of = f"{weight.bits} bits" if isinstance(weight, GroupedInt) else "no whole numbers"
        raise ValueError(f"{name}: got {type(weight).__name__}, {bits_of}; accepted: {bits} bits")


def check_words(rows: int, columns: int, bits: int, name: str) -> None:
    """Raise ValueError for a matrix whose rows or columns do not fill whole words."""
    words = bits if 32 % bits else 1
    each = 32 * words // bits
    if rows % each or columns % each:
        raise ValueError(
            f"{name}: got a matrix {[rows, columns]}; accepted: multiples of {each}, because "
            f"{words} int32 hold {each} codes"
        )


# ---------------------------------------------------------------- AWQ


def awq(group_size: int) -> Layout:
    """AutoAWQ's, version "gemm", 4 bits. group_size: -1 for one group a row."""
    to_nibbles = torch.tensor(AWQ_ORDER)
    to_columns = to_nibbles.argsort()

    def columns_of(words: Tensor) -> Tensor:  # [rows, words] -> [rows, words · 8]
        return from_words(words, 4).unflatten(-1, (-1, 8))[..., to_columns].flatten(-2)

    def words_of(codes: Tensor) -> Tensor:
        return to_words(codes.unflatten(-1, (-1, 8))[..., to_nibbles].flatten(-2), 4).contiguous()

    def read(parts: Parts, shape: tuple[int, int]) -> GroupedInt:
        rows, columns = shape
        count = groups_of(columns, columns if group_size == -1 else group_size)
        qweight = expect(parts, "qweight", (columns, rows // 8), torch.int32)
        qzeros = expect(parts, "qzeros", (count, rows // 8), torch.int32)
        scales = expect(parts, "scales", (count, rows), *FLOATS)
        return grouped(columns_of(qweight).T, scales.T, columns_of(qzeros).T, 4)

    def write(weight: GroupedInt) -> Parts:
        check_written(weight, 4, "awq")
        return {
            "qweight": words_of(natural_codes(weight).T),
            "qzeros": words_of(zeros_of(weight).T),
            "scales": weight.scales.T.contiguous(),
        }

    return Layout("awq", "qweight", ("qweight", "qzeros", "scales"), read, write)


# ---------------------------------------------------------------- compressed-tensors, packed


def pack_quantized(bits: int, group_size: int | None, symmetric: bool = True) -> Layout:
    """compressed-tensors' "pack-quantized", 4 or 8 bits. group_size: None for one group a row.
    symmetric: whether to write no zeros; reading looks for them.
    """
    each = 32 // bits
    ends = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    unread = ("weight_shape", *ACTIVATION_SCALES)

    def read(parts: Parts, shape: tuple[int, int]) -> GroupedInt:
        rows, columns = shape
        size = columns if group_size is None else group_size
        count = groups_of(columns, size)
        if columns % each:
            raise ValueError(f"weight_packed: got {columns} columns; accepted: multiples of {each}")
        packed = expect(parts, "weight_packed", (rows, columns // each), torch.int32)
        scales = expect(parts, "weight_scale", (rows, count), *FLOATS)
        zeros = order = None
        if "weight_zero_point" in parts:
            words = expect(parts, "weight_zero_point", (-(-rows // each), count), torch.int32)
            zeros = from_words(words.T.contiguous(), bits).T[:rows]  # packed along N
        if "weight_g_idx" in parts:
            g_idx = expect(parts, "weight_g_idx", (columns,), torch.int32, torch.int64)
            order = order_of(g_idx, size)
        return grouped(from_words(packed, bits), scales, zeros, bits, order)

    def write(weight: GroupedInt) -> Parts:
        rows, columns = check_written(weight, bits, "pack-quantized")
        if weight.order is not None:
            raise ValueError(
                "pack-quantized: got columns in another order; accepted: GPTQ without act-order, "
                "because compressed-tensors reads no such order any more"
            )
        parts = {
            "weight_packed": to_words(natural_codes(weight), bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            zeros = zeros_of(weight)  # [N, groups], packed along N
            parts["weight_zero_point"] = to_words(zeros.T, bits).T.contiguous()
        return parts

    return Layout("pack-quantized", "weight_packed", ends, read, write, unread)
