"""Experts that all replicas share: a rank has some of them whole, and rows of tokens travel.

Attention stays as data parallelism has it: each replica has requests, K and V of its own. Only in a
layer of experts rows go to the ranks of all replicas and come back, in a form of lesson 23. The
ranks of one replica have the same tokens. So each sends a part of them, and then they gather what
came back; otherwise each row would travel once for each shard.

An exchange takes all ranks. So does every step, and a replica without work runs one of no token
(lockstep.py).

Source: vLLM, enable_expert_parallel with data_parallel_size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Decoder
from lessons.l06_mla.gpt_oss import StackedMoE
from lessons.l06_mla.moe import MoE, Router
from lessons.l18_weight_quantization.weights import Float8Weight
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.shards.sharding import experts_of
from lessons.l23_experts.grouped import can_be_stacked, own_experts
from lessons.l23_experts.ranks.dispatch import (
    BroadcastMoE,
    CountedDispatchMoE,
    FixedSlotsMoE,
    GatherScatterMoE,
)
from lessons.l23_experts.ranks.placed import PlacedRouter
from lessons.l23_experts.ranks.placement import Placement, in_turn
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from reference.checkpoints.any_checkpoint import stored_method
from reference.checkpoints.float_layouts import is_tiled
from reference.engine.engine_args import EngineArgs
from reference.parallel.looped import LoopedExperts, OneOfStack

# all2all_backend -> a layer of experts over a group, whose ranks may have any number of tokens
FORMS = {
    "naive": BroadcastMoE,
    "allgather_reducescatter": GatherScatterMoE,
    "deepep_high_throughput": CountedDispatchMoE,
    "deepep_low_latency": FixedSlotsMoE,
}
# which send rows in FP8 to experts that would round them so
IN_FP8 = ("deepep_high_throughput", "deepep_low_latency")


def check_spread(args: EngineArgs, config: ModelConfig) -> None:
    """Raise ValueError, in one line, for what replicas that share experts cannot do."""
    moe, replicas = config.moe, args.data_parallel_size

    def apart(name: str, accepted: str) -> None:
        where = f"with enable_expert_parallel and data_parallel_size {replicas}"
        refuse(name, getattr(args, name), f"{accepted} {where}")

    if args.distributed_executor_backend == "ray":
        apart("distributed_executor_backend", "None or mp")
    is_plain = not moe.are_stacked and (args.quantization or stored_method(args.model)) is None
    if args.enable_eplb and not is_plain:
        apart("enable_eplb", f"False for experts that are no plain MLPs, as those of {args.model},")
    if args.enable_lora and moe.shared_width:
        apart("enable_lora", "False for a model with shared experts")
    copies = args.eplb_config.num_redundant_experts if args.enable_eplb else 0
    ranks, slots = args.tensor_parallel_size * replicas, moe.n_routed_experts + copies
    if slots % ranks or moe.n_routed_experts < ranks:
        beside = f" and {copies} copies" if copies else ""
        accepted = f"replicas whose {ranks} ranks divide {moe.n_routed_experts} experts{beside}"
        refuse("data_parallel_size", replicas, accepted)


class CountedRouter(nn.Module):
    """A router that counts what its tokens chose. counts: [E], since the start."""

    def __init__(self, router: Router):
        super().__init__()
        self.router, self.config = router, router.config
        num_experts, device = router.config.n_routed_experts, router.weight.device
        self.counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As Router: x: [T, hidden_size] -> ([T, k], [T, k] int64)."""
        weights, chosen = self.router(x)
        pairs = chosen.flatten()
        self.counts.index_add_(0, pairs, torch.ones_like(pairs))
        return weights, chosen

    @property
    def weight(self) -> Tensor:  # [E, hidden_size]
        return self.router.weight


class LayerParts(NamedTuple):
    """What a form asks of a layer. experts: of this rank's slots."""

    gate: nn.Module
    experts: nn.ModuleList | LoopedExperts
    shared_experts: nn.Module | None


def parts_of(moe: MoE | StackedMoE, router: nn.Module, own: range) -> LayerParts:
    """Of a layer of which these experts are here."""
    if isinstance(moe, StackedMoE):
        looped = LoopedExperts([OneOfStack(moe.experts, index) for index in range(len(own))])
        return LayerParts(router, looped, None)
    held = own_experts(moe, own)
    experts = held if can_be_stacked(held) else LoopedExperts(held)
    return LayerParts(router, experts, moe.shared_experts)


class SharedExperts(nn.Module):
    """A layer of experts of all replicas, behind the interface of one that is here. kind: makes one
    of FORMS. group: the ranks that share them. tensor: those that have the same tokens. index: of
    the layer. mlps: {expert: its MLP} of plain ones that are here; their weights are views of the
    form's.
    """

    waits_for_values = True  # of counts, and of other replicas, so no CUDA graph records it

    def __init__(
        self, moe: MoE | StackedMoE, kind: Callable, group: Group, tensor: Group, index: int
    ):
        super().__init__()
        self.kind, self.group, self.tensor, self.index = kind, group, tensor, index
        self.router = CountedRouter(moe.router if isinstance(moe, StackedMoE) else moe.gate)
        own = experts_of(self.router.config.n_routed_experts, group.rank, group.size)
        parts = parts_of(moe, self.router, own)
        self.form = kind(parts, group)
        is_plain = isinstance(parts.experts, nn.ModuleList)
        self.mlps = dict(zip(own, parts.experts)) if is_plain else {}

    def place(self, placement: Placement, mlps: dict[int, MLP]) -> None:
        """Have the experts of this rank's slots from now on. mlps: at least these."""
        own = placement.of_rank(self.group.rank)
        self.mlps = {expert: mlps[expert] for expert in own}
        experts = nn.ModuleList(self.mlps[expert] for expert in own)
        router = PlacedRouter(self.router, placement, in_turn)
        parts = LayerParts(router, experts, self.form.shared_experts)
        self.form = self.kind(parts, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H], the same on the ranks of `tensor` -> the same. T may differ between replicas.
        Raises RuntimeError if a replica does not take part.
        """
        size, share = self.tensor.size, -(-len(x) // self.tensor.size)
        own = x[self.tensor.rank * share :][:share]
        try:
            out = self.form(own)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"layer {self.index}'s exchange of experts: {error}") from None
        if size == 1 or not share:
            return out
        even = out.new_zeros(share, out.shape[1])  # the last rank may have fewer tokens
        even[: len(out)] = out
        return self.tensor.all_gather(even, dim=0)[: len(x)]

    @property
    def counts(self) -> Tensor:
        """How often this rank's tokens chose each expert: [E]."""
        return self.router.counts

    @property
    def dtype(self) -> torch.dtype:
        return self.form.experts.down.dtype


def spread(part: Decoder, links: Links, args: EngineArgs) -> None:
    """Let the layers of experts of a rank's part exchange rows with all ranks of their stage."""
    kind = FORMS[args.all2all_backend]
    if kind is FixedSlotsMoE:  # the only one that has to know how many tokens a rank may have
        kind = partial(kind, max_tokens=-(-args.max_num_batched_tokens // links.tensor.size))
    for index in part.stage_layers:
        layer = part.layers[index]
        if isinstance(layer.mlp, (MoE, StackedMoE)):
            how = partial(kind, form=wire_of(args.all2all_backend, layer.mlp))
            layer.mlp = SharedExperts(layer.mlp, how, links.experts, links.tensor, index)


def wire_of(backend: str, moe: MoE | StackedMoE) -> Plain | Float8:
    """What a row is on the way to the experts of a layer: in FP8 by DeepEP's kernels, if all
    matrices of the experts are FP8 with a scale for each 128 × 128 numbers.

    Source: vLLM, fused_moe/all2all_utils.py (use_fp8_dispatch), which has no argument for it.
    """
    parts = []
    if backend in IN_FP8 and isinstance(moe, MoE):
        parts = [part for expert in moe.experts for part in expert.modules()]
    matrices = [part.quantized for part in parts if hasattr(part, "quantized")]
    has_blocks = all(isinstance(each, Float8Weight) and is_tiled(each) for each in matrices)
    return Float8() if matrices and has_blocks else Plain()


def shared_layers(model: Decoder) -> list[SharedExperts]:
    """A part's layers of experts, in their order."""
    mlps = [model.layers[index].mlp for index in model.stage_layers]
    return [mlp for mlp in mlps if isinstance(mlp, SharedExperts)]


@torch.inference_mode()
def run_experts_alone(model: Decoder) -> None:
    """What a step of no token is: the exchanges, with no row of this rank's own."""
    weight = model.norm.weight  # every stage has it, and it knows the dtype and the device
    for layer in shared_layers(model):
        layer(weight.new_empty(0, model.config.hidden_size))
