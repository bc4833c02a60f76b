"""A mixture of experts whose matrices are in two tensors and run together: lesson 6's MoE, without
its loop.

    model = grouped(load_decoder("a-mixtral"))     # the same tokens; a GPU can capture its steps

Lesson 6 asks the router which experts to run, and launches them one by one. Here the router's
choice stays on the device. The grid of every launch follows from shapes, so nothing waits, and a
CUDA graph (lesson 11) records the layer like any other.

The weights are stacked once, and not held twice: the matrices of the model that was given become
views of the stacks.
"""

from types import ModuleType

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.shards.layers import OwnExperts
from lessons.l23_experts import optimized, stand_ins
from lessons.l23_experts.more import wide

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def ops_for(x: Tensor, num_pairs: int = 0, num_experts: int = 1) -> ModuleType:
    """The kernels where they are compiled and have the dtype of x: [T, H], those with wide tiles
    where so many pairs fill them; PyTorch where they would be interpreted, or for float64.
    """
    if wide.pays(x, num_pairs, num_experts):
        return wide
    return optimized if x.is_cuda and x.dtype in DECODE_DTYPES else stand_ins


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What GroupedExperts computes, [T, H] -> [T, H]. A solved exercise 23.1 takes its place."""
    return ops_for(x, chosen.numel(), len(down)).experts(x, weights, chosen, gate_up, down)


class GroupedExperts(nn.Module):
    """E experts in two tensors. gate_up: [E, 2I, H], gate's rows and then up's; down: [E, H, I]."""

    def __init__(self, gate_up: Tensor, down: Tensor):
        super().__init__()
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x: [T, H], weights, chosen: [T, k] -> [T, H]; experts outside of 0 … E - 1 add
        nothing.
        """
        return experts(x, weights, chosen, self.gate_up, self.down)

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Without the router's weights, a row for each of chosen: [T · k, H]."""
        ops = ops_for(x, chosen.numel(), len(self.down))
        return ops.expert_rows(x, chosen, self.gate_up, self.down)


@torch.no_grad()
def stacked(experts: nn.ModuleList) -> GroupedExperts:
    """The matrices of experts in two tensors, of which they become views. Raises ValueError for
    experts that are no plain MLPs.
    """
    if not can_be_stacked(experts):
        raise ValueError(
            f"experts: got {described(experts)}; accepted: one or more MLPs of plain Linears "
            "without bias"
        )
    inner, size = experts[0].gate_proj.weight.shape
    new = experts[0].gate_proj.weight.new_empty
    gate_up, down = new(len(experts), 2 * inner, size), new(len(experts), size, inner)
    for index, expert in enumerate(experts):
        places = *gate_up[index].chunk(2), down[index]
        for name, place in zip(PROJECTIONS, places):
            weight = getattr(expert, name).weight
            place.copy_(weight)
            weight.data = place  # frees what it held
    return GroupedExperts(gate_up, down)


def can_be_stacked(experts: nn.ModuleList) -> bool:
    """Whether experts are MLPs whose matrices are ordinary tensors."""
    linears = [getattr(expert, name, None) for expert in experts for name in PROJECTIONS]
    return bool(linears) and all(type(x) is nn.Linear and x.bias is None for x in linears)


def described(experts: nn.ModuleList) -> str:
    """Experts for an error, in few words."""
    if not len(experts):
        return "none"
    parts = {type(getattr(expert, "gate_proj", expert)).__name__ for expert in experts}
    return f"{len(experts)} of {', '.join(sorted(parts))}"


def own_experts(moe: nn.Module, own: range) -> nn.ModuleList:
    """Some neighbours of a layer's experts. moe: with all of its experts, or with these alone, as a
    loader that reads no others leaves it. Raises ValueError.
    """
    found, num_experts = len(moe.experts), moe.gate.config.n_routed_experts
    if found not in (num_experts, len(own)):
        raise ValueError(
            f"moe.experts: got {found}; accepted: all {num_experts}, or this rank's own {len(own)}"
        )
    return moe.experts[own.start : own.stop] if found == num_experts else moe.experts


class GroupedMoE(nn.Module):
    """A layer of experts with its router, its shared experts and its weights.

    own: the routed experts that are here, None for all. Others add nothing, so the result is then a
    partial sum (ranks/experts.py adds those of all ranks).
    """

    def __init__(self, moe: MoE | OwnExperts, own: range | None = None):
        super().__init__()
        self.gate, self.shared_experts = moe.gate, moe.shared_experts
        self.own = range(moe.gate.config.n_routed_experts) if own is None else own
        self.experts = stacked(own_experts(moe, self.own))

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        weights, chosen = self.gate(x)
        if self.own.start:
            chosen = chosen - self.own.start  # the first expert that is here is number 0
        out = self.experts(x, weights, chosen)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))


def grouped(model: Decoder) -> Decoder:
    """A twin of `model`, or of a rank's part of one, whose layers of experts are GroupedMoEs, for
    inference. What cannot be stacked (quantized experts, gpt-oss') stays as it is, and so does a
    model without experts.
    """
    return swap(model, {MoE: group_where_possible, OwnExperts: group_where_possible})


def group_where_possible(moe: MoE | OwnExperts) -> nn.Module:
    """A GroupedMoE of experts that can be stacked, else the layer itself."""
    own = getattr(moe, "own", range(moe.gate.config.n_routed_experts))
    if isinstance(moe.experts, nn.ModuleList) and can_be_stacked(own_experts(moe, own)):
        return GroupedMoE(moe, own)
    return moe
