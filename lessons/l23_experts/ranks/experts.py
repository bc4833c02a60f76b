"""Experts on several ranks: each rank holds some of them, whole.

Tensor parallelism would cut every expert into slices, and a slice of a small expert is too narrow
to multiply quickly. Expert parallelism gives a rank whole experts. Which form fits depends on where
tokens are:

    ExpertParallelMoE   every rank has all tokens, as inside tensor parallelism. Each rank runs its
                        own experts; one all-reduce adds up. No row travels, but T · H values are
                        summed.
    SplitTokensMoE      every rank has tokens of its own. Rows travel to the ranks of their experts
                        and back, in two all-to-alls. The ranks exchange counts before, and Python
                        waits for them.
    CapacityMoE         the same with a fixed number of places for each expert. All shapes are
                        known, so nothing is exchanged before and nothing waits. Pairs without a
                        place are dropped.

dispatch.py has the forms that are served. In all of them the router runs where the token is, so
every rank has the router's matrix.

A part that lesson 20 makes has the first form by lesson 6's loop (shards/layers.py: OwnExperts,
SummedExperts), and `grouped` replaces the loop by kernels. ExpertParallelMoE is the same for a
layer that each rank has whole.

Sources: Lepikhin et al. 2021, GShard (section 2.2); Fedus et al. 2022, Switch Transformers (section
2.2); vLLM's enable_expert_parallel.
"""

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lessons.l02_naive_attention.decoder import MLP
from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.shards.sharding import experts_of
from lessons.l23_experts.grouped import GroupedMoE, ops_for, own_experts, stacked
from lessons.l23_experts.ranks.load import capacity_of
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.model.arguments import check_positive

# ---------------------------------------------------------------- tokens on every rank


class ExpertParallelMoE(nn.Module):
    """Of all tokens the shares of this rank's experts, then an all-reduce. Shared experts are cut
    into slices, one a rank, whose outputs add up as well. So one all-reduce serves both.

    Ranks must choose the same experts for a token. They do, because they compute the same router on
    the same values: an all-reduce leaves the same bits on every rank.
    """

    def __init__(self, moe: MoE, group: Group):
        super().__init__()
        config = moe.gate.config
        own = experts_of(config.n_routed_experts, group.rank, group.size)
        self.group, self.part = group, GroupedMoE(moe, own)
        if config.shared_width:
            self.part.shared_experts = slice_of(moe.shared_experts, config.shared_width, group)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size], the same on all ranks -> the same
        return self.group.all_reduce(self.part(x))


def slice_of(mlp: MLP, whole: int, group: Group) -> MLP:
    """Of an MLP's inner values this rank's, so that the ranks' outputs add up to the MLP's. whole:
    inner values of the MLP; one that has fewer was cut while it was loaded.
    """
    if mlp.down_proj.in_features != whole:
        return mlp
    own = slice(whole * group.rank // group.size, whole * (group.rank + 1) // group.size)
    part = copy.copy(mlp)
    part._modules = dict(mlp._modules)
    for name in ("gate_proj", "up_proj"):
        setattr(part, name, linear_of(getattr(mlp, name).weight[own]))
    part.down_proj = linear_of(mlp.down_proj.weight[:, own])
    return part


def linear_of(weight: Tensor) -> nn.Linear:
    """A Linear without bias around a weight: [N, K]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


# ---------------------------------------------------------------- tokens split over the ranks


class SplitTokensMoE(nn.Module):
    """Rows of this rank's tokens go to the ranks of their experts and come back. Ranks may have
    different numbers of tokens, none included. Nothing is dropped, however uneven the load.
    """

    def __init__(self, moe: MoE, group: Group):
        super().__init__()
        num_experts = moe.gate.config.n_routed_experts
        self.group, self.gate, self.shared_experts = group, moe.gate, moe.shared_experts
        places = [experts_of(num_experts, rank, group.size) for rank in range(group.size)]
        self.own, self.num_experts = places[group.rank], num_experts
        self.experts_of_each = [len(place) for place in places]
        own = own_experts(moe, self.own)
        # the reference has experts that cannot be stacked, and another way to run them
        self.experts = own if hasattr(own, "rows") else stacked(own)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size], of this rank -> the same
        weights, chosen = self.gate(x)
        out = self.routed(x, weights, chosen)
        # each rank runs the shared experts for its own tokens, and adds them once
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the routed experts add: [T, H] -> [T, H]. weights, chosen: [T, k]."""
        y = self.visit(x, chosen)
        return ops_for(x).weighted_sum(y, weights, chosen, self.num_experts)

    def visit(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What the experts make of x: [T, H] -> [T · k, H], pair t · k + j being chosen[t, j]:
        [T, k].
        """
        order = chosen.flatten().argsort(stable=True)  # pairs by expert, and so by rank
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        # First the counts, because a rank must know how much it will receive: [senders, own
        # experts].
        num_own, size = len(self.own), self.group.size
        received = self.group.all_to_all(counts, self.experts_of_each, [num_own] * size)
        received = received.view(size, num_own)
        to_each = [int(part.sum()) for part in counts.split(self.experts_of_each)]
        from_each = received.sum(1).tolist()

        rows = self.group.all_to_all(x[order // chosen.shape[1]], to_each, from_each)
        # They are sorted by sender, and each sender's by expert.
        expert = torch.arange(num_own, device=x.device).repeat(size)
        expert = expert.repeat_interleave(received.flatten())
        results = self.experts.rows(rows, expert[:, None])
        results = self.group.all_to_all(results, from_each, to_each)
        return torch.empty_like(results).index_copy_(0, order, results)


class PlacesMoE(SplitTokensMoE):
    """Forms in which each expert has a fixed number of places for the pairs of a rank."""

    def visit_places(
        self, x: Tensor, pairs: Tensor, top_k: int, expert: Tensor, form: Plain | Float8
    ) -> Tensor:
        """As visit, [T, H] -> [T · k, H]; rows of pairs without a place are 0.

        pairs: [E, places], the pair in each place of this rank, T · k in empty ones; expert:
        [senders · own · places], which own expert runs each place that comes here.
        """
        num_pairs = len(x) * top_k
        places = [count * pairs.shape[1] for count in self.experts_of_each]
        own_places = [places[self.group.rank]] * self.group.size
        # An empty place carries the last token, and what comes back for it is thrown away.
        token = (pairs.flatten() // top_k).clamp(max=len(x) - 1)
        rows = x[token] if len(x) else x.new_zeros(len(token), x.shape[1])
        rows = self.group.all_to_all(form.pack(rows), places, own_places)
        results = self.experts.rows(form.unpack(rows, x), expert[:, None])
        results = self.group.all_to_all(results, own_places, places)
        # "no pair" is T · k, so what came back for empty places goes into the row after the last
        # pair
        y = x.new_zeros(num_pairs + 1, x.shape[1])
        return y.index_copy_(0, pairs.flatten(), results)[:num_pairs]


class CapacityMoE(PlacesMoE):
    """As SplitTokensMoE, but each expert takes at most capacity_factor times the mean of a rank's
    pairs. All ranks must have equally many tokens.

    Of an expert's pairs the first ones get its places. The others are dropped: their token goes on
    without that share, and the weights of its other experts stay as they are. `dropped` and
    `num_routed` count pairs since the start. A pass that drops also warns where looking costs
    nothing, on the CPU.
    """

    def __init__(self, moe: MoE, group: Group, capacity_factor: float):
        super().__init__(moe, group)
        check_positive(capacity_factor=capacity_factor)
        self.capacity_factor, self.num_routed = capacity_factor, 0
        device = moe.gate.weight.device
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)

    def visit(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As SplitTokensMoE.visit, [T, H] -> [T · k, H]; rows of dropped pairs are 0."""
        (num_tokens, top_k), num_pairs = chosen.shape, chosen.numel()
        capacity = capacity_of(num_tokens, top_k, self.num_experts, self.capacity_factor)
        pairs = first_pairs(chosen, self.num_experts, capacity)  # [E, capacity]
        self.count(num_pairs, (pairs < num_pairs).sum())
        expert = torch.arange(len(self.own), device=x.device).repeat_interleave(capacity)
        return self.visit_places(x, pairs, top_k, expert.repeat(self.group.size), Plain())

    def count(self, num_pairs: int, num_kept: Tensor) -> None:
        """Add a pass to the counts, and tell of its drops where this waits for nothing.
        num_kept: [].
        """
        dropped = num_pairs - num_kept
        self.num_routed += num_pairs
        self.dropped += dropped
        if dropped.is_cpu and dropped:
            warnings.warn(
                f"dropped {int(dropped)} of {num_pairs} pairs of a token and an expert at capacity "
                f"factor {self.capacity_factor:g}",
                stacklevel=2,
            )


def first_pairs(chosen: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The first pairs of each expert: [E, capacity], T · k in places that are left. chosen: [T,
    k].
    """
    expert, order = chosen.flatten().sort(stable=True)
    edges = torch.searchsorted(expert, torch.arange(num_experts + 1, device=chosen.device))
    place = edges[:-1, None] + torch.arange(capacity, device=chosen.device)
    is_pair = place < edges[1:, None]
    order = pad(order, (0, 1))  # because there may be no pair at all
    return torch.where(is_pair, order[place.clamp(max=len(expert))], len(expert))
