"""What the ranks of a test of placements run: a layer whose experts have copies, on tokens that are
split over the ranks or that all of them have.
"""

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts.lab.moe_ranks import CONFIGS, SIZE, new_moe
from lessons.l23_experts.ranks.dispatch import CountedDispatchMoE
from lessons.l23_experts.ranks.experts import ExpertParallelMoE, SplitTokensMoE
from lessons.l23_experts.ranks.load import load_of
from lessons.l23_experts.ranks.placed import placed
from lessons.l23_experts.ranks.placement import place

TOKENS = 24


def case_of(config: str, seed: int, size: int) -> tuple:
    """A layer in float64, its tokens [TOKENS, SIZE], and a placement by their load."""
    moe = new_moe(CONFIGS[config], seed, torch.float64)
    x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(seed)).double()
    num_experts = moe.gate.config.n_routed_experts
    loads = load_of(moe.gate(x)[1], num_experts).counts
    return moe, x, place(loads, (-(-num_experts // size) + 1) * size, size)


@torch.no_grad()
def run_placed(world: Group, configs: list[str], seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each config what this rank computes: [T, SIZE] of all tokens, and of its own by two
    forms.
    """
    results = []
    for config in configs:
        moe, x, placement = case_of(config, seed, world.size)
        twin = placed(moe, placement)
        own = x.chunk(world.size)[world.rank]
        forms = SplitTokensMoE(twin, world), CountedDispatchMoE(twin, world)
        results.append((ExpertParallelMoE(twin, world)(x), *(form(own) for form in forms)))
    return results
