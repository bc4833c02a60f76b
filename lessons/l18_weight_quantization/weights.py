"""A quantized matrix: small codes, the scales that belong to them, and the way back to numbers.

Each format is a dataclass that stands for one matrix of a linear layer, [N, K]: N outputs, K inputs,
as nn.Linear stores it. All formats have the same four members, so a layer, a file or a plot need not
know which one it holds:

    weight.shape            (N, K)
    weight.dequantize()     [N, K] float32: what the codes mean
    weight.nbytes           all that has to be read for one product
    weight.to(device)       the same on another device

A format stores what its kernel reads, so nothing is repacked when a model runs.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


class QuantizedWeight:
    """What all formats share. A subclass is a frozen dataclass whose tensor fields are its storage."""

    shape: tuple[int, int]  # N, K

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same matrix on another device."""
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales and all, for each number of the matrix."""
        rows, columns = self.shape
        return 8 * self.nbytes / (rows * columns)


@dataclass(frozen=True)
class GroupedInt(QuantizedWeight):
    """Whole numbers of 4 or 8 bits; each group of neighbouring inputs has a scale of its own.

        w[n, k] = (code[n, k] − zero[n, group of k]) · scale[n, group of k]

    codes: [N, K · bits / 8] uint8. With 4 bits a byte holds two codes of one group: byte i of a group
    holds its column i in the low half and its column i + group_size / 2 in the high half, so a
    kernel that masks or shifts a run of bytes has a run of columns. scales: [N, K / group_size],
    floating. zeros: the same shape, uint8; None: 2^(bits − 1), the symmetric format. group_size: K
    for one scale a row. order: [K] int64 or None: stored column j is column order[j] of the matrix,
    because GPTQ may quantize the important columns first.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    def dequantize(self) -> Tensor:
        codes = unpack(self.codes, self.bits, self.group_size).float()
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[..., None].float()
        stored = ((codes - zeros) * self.scales[..., None].float()).flatten(1)
        if self.order is None:
            return stored
        weight = torch.empty_like(stored)
        weight[:, self.order] = stored
        return weight


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes: [N, groups, group_size] uint8, each below 2^bits -> [N, groups · group_size · bits / 8]
    uint8, in the order that GroupedInt describes. bits: 4 or 8.
    """
    if bits == 4:
        low, high = codes.chunk(2, dim=-1)
        codes = low | high << 4
    return codes.flatten(1)


def unpack(packed: Tensor, bits: int, group_size: int) -> Tensor:
    """The inverse of `pack`: [N, bytes] uint8 -> [N, groups, group_size] uint8."""
    groups = packed.unflatten(-1, (-1, group_size * bits // 8))
    return torch.cat([groups & 15, groups >> 4], dim=-1) if bits == 4 else groups
