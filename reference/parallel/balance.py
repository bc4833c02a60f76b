"""enable_eplb: experts that replicas share are placed by their loads, with copies of busy ones.

Lesson 23's placements, in an engine that serves. Every step_interval steps the loads of the last
window_size steps decide anew who has which experts. A rank reads those that it lacks from the
checkpoint, between two steps. vLLM sends them from rank to rank, and can do so beside steps.

The engine's process decides, and tells all replicas before the same round. So a router never meets
experts that are elsewhere by now.
"""

from typing import NamedTuple

import torch

from lessons.l02_naive_attention.decoder import MLP, Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.l23_experts.ranks.load import Load
from lessons.l23_experts.ranks.placement import Placement, in_order, place, renumbered
from lessons.toolbox.model.checkpoint import find_weights, load_config, read_tensors
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.stored import catalog
from reference.engine.engine_args import EngineArgs
from reference.engine.expert_arguments import EPLBConfig
from reference.parallel.experts import shared_layers

Placements = dict[int, Placement]  # of each layer of experts


# ---------------------------------------------------------------- in the engine's process


def first_placements(args: EngineArgs, config: ModelConfig) -> Placements:
    """While no loads are known: in order, or as if all experts had the same."""
    num_experts, ranks = config.moe.n_routed_experts, args.tensor_parallel_size
    ranks, copies = ranks * args.data_parallel_size, 0
    if args.enable_eplb:
        copies = args.eplb_config.num_redundant_experts
    first = in_order(num_experts, ranks)
    if copies:
        first = place([1.0] * num_experts, num_experts + copies, ranks)
    layers = range(config.num_hidden_layers)
    return {layer: first for layer in layers if config.moe.has_experts(layer)}


class Balance(NamedTuple):
    """The loads of each layer's experts when the window began."""

    config: EPLBConfig
    before: dict[int, Load]

    def next_placements(self, now: dict[int, Load], placements: Placements) -> Placements:
        """By what has come since then. A layer without a token stays as it is."""
        found = dict(placements)
        for layer, load in now.items():
            old = placements[layer]
            before = self.before[layer].counts if layer in self.before else [0] * len(load.counts)
            window = [total - less for total, less in zip(load.counts, before)]
            if any(window):
                found[layer] = renumbered(old, place(window, len(old.experts), old.size))
        return found


# ---------------------------------------------------------------- in a worker


def place_experts(model: Decoder, args: EngineArgs, placements: Placements) -> None:
    """Give each of a part's layers the experts of this rank's slots. Those that the rank lacks are
    read from the checkpoint. Raises CheckpointError.
    """
    layers = shared_layers(model)
    missing = {}
    for layer in layers:
        wanted = set(placements[layer.index].of_rank(layer.group.rank))
        missing[layer.index] = wanted - layer.mlps.keys()
    weight = model.norm.weight
    read = read_experts(args.model, missing, weight.device, layers[0].dtype) if layers else {}
    for layer in layers:
        layer.place(placements[layer.index], layer.mlps | read[layer.index])


def read_experts(
    name_or_path: str, wanted: dict[int, set[int]], device: torch.device, dtype: torch.dtype
) -> dict[int, dict[int, MLP]]:
    """{layer: {expert: its MLP}} of a checkpoint, of which nothing else is read. Raises
    CheckpointError.
    """
    config = load_config(name_or_path)
    with torch.device("meta"):
        whole = decoder_class(config)(config)
    places = {
        f"layers.{layer}.mlp.experts.{expert}.": whole.layers[layer].mlp.experts[expert]
        for layer, experts in wanted.items()
        for expert in experts
    }
    parts = {
        prefix + name: tuple(slice(0, length) for length in weight.shape)
        for prefix, mlp in places.items()
        for name, weight in mlp.state_dict().items()
    }
    folder = find_weights(name_or_path, config)
    weights = read_tensors(whole, folder, catalog(folder), {}, device, dtype, parts)
    for prefix, mlp in places.items():
        own = {name: weights[prefix + name] for name in mlp.state_dict()}
        mlp.load_state_dict(own, assign=True)
    mlps = {layer: whole.layers[layer].mlp.experts for layer in wanted}
    return {
        layer: {expert: mlps[layer][expert].requires_grad_(False) for expert in experts}
        for layer, experts in wanted.items()
    }
