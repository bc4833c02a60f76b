"""The adapters of one layer, stacked: what all versions of the product take."""

from typing import NamedTuple

import torch
from torch import Tensor


class SlotWeights(NamedTuple):
    """S slots of one layer, each with room for an adapter of rank R at most.

    a: [S, R, K] and b: [S, R, N], both with a row for each rank, so that loads are wide in both
    products. scaling: [S] float32, alpha / r as PEFT defines it. ranks: [S] int32, how many rows
    count; 0: the adapter in this slot leaves the layer alone. Rows beyond a slot's rank are zeros;
    the kernels never read them.
    """

    a: Tensor
    b: Tensor
    scaling: Tensor
    ranks: Tensor

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "SlotWeights":
        """No adapter in any slot."""
        return cls(
            torch.zeros(num_slots, max_rank, in_features, dtype=dtype, device=device),
            torch.zeros(num_slots, max_rank, out_features, dtype=dtype, device=device),
            torch.zeros(num_slots, dtype=torch.float32, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
        )

    def put(self, slot: int, a: Tensor, b: Tensor, scaling: float) -> None:
        """An adapter's matrices, as PEFT stores them, into a slot. a: [r, K], b: [N, r]."""
        rank = len(a)
        self.clear(slot)
        self.a[slot, :rank].copy_(a)
        self.b[slot, :rank].copy_(b.T)
        self.scaling[slot] = scaling
        self.ranks[slot] = rank

    def clear(self, slot: int) -> None:
        """An empty slot: the stand-ins multiply by all of its rows, so they become zeros."""
        for tensor in self:
            tensor[slot] = 0

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots, used or not."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self)
