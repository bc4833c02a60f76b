"""Codes of 4 bits in the order in which a tensor core wants them, for tensor_cores.cu.

`GroupedInt` stores a matrix row by row, so that a reader finds everything. The lanes of a warp want
something else: each one codes of its own two rows and of its own columns, as one load of 16 bytes.
Marlin (Frantar et al. 2024) therefore reorders the codes once, when a model is loaded. So does
`to_fragments`. tensor_cores.cu says which lane multiplies what.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import GroupedInt, QuantizedWeight, pack, unpack

OUTPUTS = 16  # of a tile, the rows of mma.sync
UNIT = 64  # inputs whose codes a lane loads at once: 4 products of 16
STRETCH = 256  # inputs that a warp takes at once; rows are filled up to a multiple


@dataclass(frozen=True)
class Fragments(QuantizedWeight):
    """A matrix of 4-bit codes, [N, K], for tensor cores.

    codes: [tiles, units, 32 lanes, 4] int32: tiles = ⌈N / 16⌉, a unit is 64 inputs. Word s of lane
    4g + t holds inputs 16t + 4s … 16t + 4s + 3 of outputs g and g + 8. scales: [tiles, groups, 8,
    2] float16, output g and g + 8 side by side. zeros: the same in uint8, or None. What fills up
    the last tile and the last 256 inputs is 0.
    arrived: [tiles] int32, 0 between launches: how many pieces of a tile's sum are there. So only
    one launch at a time may read a matrix.
    order: as in GroupedInt.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    shape: tuple[int, int]
    arrived: Tensor
    order: Tensor | None = None

    def dequantize(self) -> Tensor:
        return to_grouped(self).dequantize()


def to_fragments(weight: GroupedInt) -> Fragments:
    """The same codes in the other order. Raises ValueError for other formats, scales and groups."""
    check_groups(weight)
    (rows, columns), tiles = weight.shape, -(-weight.shape[0] // OUTPUTS)
    codes = unpack(weight.codes, 4, weight.group_size).flatten(1).int()
    codes = torch.nn.functional.pad(codes, (0, -columns % STRETCH))
    # axes: tile, upper or lower 8 outputs, g, unit, t, s, pair of inputs, first or second
    codes = tiled(codes, tiles).view(tiles, 2, 8, -1, 4, 4, 2, 2)
    shifts = torch.tensor([[[0, 16], [8, 24]], [[4, 20], [12, 28]]], dtype=torch.int32)
    shifted = codes << shifts.to(codes.device)[:, None, None, None, None]
    # each code has bits of its own, so a sum is an or
    words = shifted.sum((1, 6, 7), dtype=torch.int64).to(torch.int32)  # [tiles, g, units, t, s]
    words = words.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()
    groups = -(-words.shape[1] * UNIT // weight.group_size)
    zeros = None
    if weight.zeros is not None:
        zeros = by_lanes(weight.zeros, tiles, groups)
    scales = by_lanes(weight.scales, tiles, groups)
    arrived = torch.zeros(tiles, dtype=torch.int32, device=words.device)
    shape = rows, columns
    return Fragments(words, scales, zeros, weight.group_size, shape, arrived, weight.order)


def to_grouped(weight: Fragments) -> GroupedInt:
    """The inverse of `to_fragments`."""
    rows, columns = weight.shape
    words = weight.codes.unflatten(2, (8, 4))  # [tiles, units, g, t, s]
    shifts = torch.tensor([[[0, 16], [8, 24]], [[4, 20], [12, 28]]], device=words.device)
    codes = words[..., None, None, None] >> shifts & 15  # …, upper or lower, pair, which
    codes = codes.permute(0, 5, 2, 1, 3, 4, 6, 7).reshape(16 * len(words), -1)[:rows, :columns]
    codes = codes.to(torch.uint8)
    codes = pack(codes.unflatten(1, (-1, weight.group_size)), 4)
    zeros = None if weight.zeros is None else by_rows(weight.zeros, weight.shape, weight.group_size)
    scales = by_rows(weight.scales, weight.shape, weight.group_size)
    return GroupedInt(codes, scales, zeros, 4, weight.group_size, weight.order)


def tiled(rows: Tensor, tiles: int) -> Tensor:
    """[N, …] -> [tiles · 16, …], filled up with zeros."""
    missing = tiles * OUTPUTS - len(rows)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))


def by_lanes(values: Tensor, tiles: int, groups: int) -> Tensor:
    """[N, …] -> [tiles, groups, 8, 2]: output g beside output g + 8."""
    values = torch.nn.functional.pad(values, (0, groups - values.shape[1]))
    return tiled(values, tiles).view(tiles, 2, 8, -1).permute(0, 3, 2, 1).contiguous()


def by_rows(values: Tensor, shape: tuple[int, int], group_size: int) -> Tensor:
    """The inverse of `by_lanes`."""
    rows, columns = shape
    values = values.permute(0, 3, 2, 1).reshape(-1, values.shape[1])
    return values[:rows, : columns // group_size].contiguous()


def group_shift(group_size: int, columns: int) -> int | None:
    """How often 64 is doubled in a group; 31, so that all are in group 0, where one group is a row;
    None for groups that tensor_cores.cu does not read.
    """
    if group_size >= columns:
        return 31
    units = group_size // UNIT
    is_power = group_size % UNIT == 0 and units & (units - 1) == 0 and units > 0
    return units.bit_length() - 1 if is_power else None


def check_groups(weight: GroupedInt) -> None:
    """Raise ValueError unless the matrix has 4 bits, float16 scales, rows of whole units, and
    groups of 64, 128, 256 … inputs, or one a row.
    """
    if not isinstance(weight, GroupedInt) or weight.bits != 4:
        got = type(weight).__name__ + (
            f" of {weight.bits} bits" if isinstance(weight, GroupedInt) else ""
        )
        raise ValueError(f"weight: got {got}; accepted: GroupedInt of 4 bits")
    if weight.scales.dtype != torch.float16:
        raise ValueError(f"weight: got {weight.scales.dtype} scales; accepted: torch.float16")
    columns = weight.shape[1]
    if columns % UNIT or group_shift(weight.group_size, columns) is None:
        raise ValueError(
            f"weight: got {columns} columns in groups of {weight.group_size}; accepted: multiples "
            f"of {UNIT}, and groups of {UNIT} times a power of two or one a row"
        )
