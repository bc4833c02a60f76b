"""How evenly a router loads experts and ranks, and what a limit on their load drops.

A step ends when its busiest rank has ended. If that one has 1.5 times the mean of the ranks, the
others wait for a third of the time. Training pushes routers towards even loads (an auxiliary loss
in GShard and Switch, a bias in DeepSeek-V3), but a batch of one subject is uneven all the same.

Sources: Lepikhin et al. 2021, GShard (section 2.2: capacity); Fedus et al. 2022, Switch
Transformers (section 2.2: capacity factor).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l20_parallelism.shards.sharding import experts_of
from lessons.toolbox.model.arguments import check_positive, check_whole


@dataclass(frozen=True)
class Load:
    """Pairs of a token and an expert that each expert (or each rank) has to multiply."""

    counts: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.counts) / len(self.counts)

    @property
    def imbalance(self) -> float:
        """The busiest over the mean: 1 is even, and it is how much longer the step takes than an
        even one if time goes with pairs. 1 without any pair.
        """
        return max(self.counts) / self.mean if self.mean else 1.0

    def of_ranks(self, size: int) -> "Load":
        """The loads of `size` ranks, if these are those of experts."""
        num_experts = len(self.counts)
        places = (experts_of(num_experts, rank, size) for rank in range(size))
        return Load(tuple(sum(self.counts[own.start : own.stop]) for own in places))

    def told(self, what: str) -> str:
        """The busiest, in words. what: the counts are of, such as "rank"."""
        most = max(self.counts)
        return (
            f"{what} {self.counts.index(most)} has {most} of {sum(self.counts)} rows, "
            f"{self.imbalance:.1f} times the mean"
        )

    def dropped(self, capacity: int) -> int:
        """Pairs beyond the first `capacity` of each expert."""
        return sum(max(0, count - capacity) for count in self.counts)


def load_of(chosen: Tensor, num_experts: int) -> Load:
    """The experts' loads. chosen: [T, k]."""
    return Load(tuple(torch.bincount(chosen.flatten(), minlength=num_experts).tolist()))


def capacity_of(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Pairs that an expert takes of so many tokens: capacity_factor times the mean, rounded up."""
    check_whole(0, num_tokens=num_tokens)
    check_positive(capacity_factor=capacity_factor)
    return math.ceil(capacity_factor * num_tokens * top_k / num_experts)
