"""A layer whose experts are where a placement says, copies included.

    placed(moe, placement)                            # lesson 6's layer, with slots for experts
    ExpertParallelMoE(placed(moe, placement), group)  # each rank holds its own slots
    SplitTokensMoE(placed(moe, placement), group)

To the rest of the lesson a slot is an expert. So all that is needed is a router that chooses slots,
and a list with an expert for each slot. The three forms in experts.py, and the kernels, stay as
they are. The router's scores and weights stay as they are, too: which expert a token gets, and how
much of it, is decided before.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l06_mla.moe import MoE, Router
from lessons.l23_experts.ranks.placement import Copies, Placement, in_turn
from lessons.toolbox.model.arguments import refuse

Choose = Callable[[Tensor, Copies], Tensor]  # placement.in_turn or placement.by_number


class PlacedRouter(nn.Module):
    """A router whose experts are slots: x: [T, hidden_size] -> ([T, k], [T, k] int64)."""

    def __init__(self, gate: Router, placement: Placement, choose: Choose):
        super().__init__()
        self.gate, self.choose = gate, choose
        # Groups of experts are the inner router's affair.
        self.config = replace(
            gate.config,
            n_routed_experts=len(placement.experts),
            n_group=1,
            topk_group=1,
            topk_method="greedy",
        )
        copies = placement.copies(gate.weight.device)
        self.register_buffer("slots", copies.slots, persistent=False)
        self.register_buffer("counts", copies.counts, persistent=False)

    @property
    def weight(self) -> Tensor:  # [experts, hidden_size]
        return self.gate.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x)
        return weights, self.choose(chosen, Copies(self.slots, self.counts))


def placed(moe: MoE, placement: Placement, choose: Choose = in_turn) -> MoE:
    """A twin of the layer with an expert in each slot. No weight is copied here: copies appear when
    ranks stack their own experts. Raises ValueError if it has other experts.
    """
    if len(placement.slots_of) != len(moe.experts):
        refuse(
            "placement", f"{len(placement.slots_of)} experts", f"{len(moe.experts)}, the layer's"
        )
    twin = copy.copy(moe)
    # A dictionary of its own, because a shallow copy would share it with the original.
    twin._modules = dict(moe._modules)
    twin.gate = PlacedRouter(moe.gate, placement, choose)
    twin.experts = nn.ModuleList(moe.experts[expert] for expert in placement.experts)
    return twin


def placed_model(model: Decoder, placements: list[Placement], choose: Choose = in_turn) -> Decoder:
    """A twin of a model, with a placement for each of its layers of experts, first layer first."""
    following = iter(placements)
    return swap(model, {MoE: lambda moe: placed(moe, next(following), choose)})
