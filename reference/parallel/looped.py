"""Experts that cannot be stacked, behind the interface of lesson 23's GroupedExperts: quantized
ones, and gpt-oss', which have biases. They run one after the other, as in lesson 6, and Python
waits for the router.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lessons.l06_mla.gpt_oss import StackedExperts


class LoopedExperts(nn.Module):
    """experts: of this rank, in their order."""

    def __init__(self, experts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(experts)

    def __len__(self) -> int:
        return len(self.parts)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As GroupedExperts: x: [T, H], weights, chosen: [T, k] -> [T, H]."""
        rows = self.rows(x, chosen).view(*chosen.shape, x.shape[1])
        return (rows * weights[..., None]).sum(1).to(x.dtype)

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As GroupedExperts.rows: a row for each of chosen, [T · k, H]; zeros where the expert is
        none of these.
        """
        expert, top_k = chosen.flatten(), chosen.shape[1]
        out = x.new_zeros(len(expert), x.shape[1])
        for index, part in enumerate(self.parts):
            [pair] = torch.where(expert == index)
            if len(pair):
                out[pair] = part(x[pair // top_k])
        return out


class OneOfStack(nn.Module):
    """One of gpt-oss' experts as a layer."""

    def __init__(self, stack: StackedExperts, index: int):
        super().__init__()
        self.stack, self.index = stack, index

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.stack(x, self.index)
