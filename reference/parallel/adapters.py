"""Adapters where the model is in workers: which is in which slot the engine's process decides,
and each worker keeps its part of the matrices.

A matrix of the base that is cut by rows has B cut by rows. One that is cut by columns has A cut by
columns; then what an adapter adds is a partial sum as the base's product is, and one all-reduce
adds both up.
"""

import torch
from torch import nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.shards.sharding import slices_of
from lessons.l21_multi_lora.layers import NOT_ALONE
from lessons.l21_multi_lora.peft.adapters import Adapter, LayerAdapter
from lessons.l21_multi_lora.slots import AdapterSlots
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine_args import EngineArgs
from reference.features.lora import Adapters, new_store

# what stands in a part's names where a layer wraps one that talks to other ranks
WRAPPERS = (".linear", ".moe")


class RemoteSlots(AdapterSlots):
    """Lesson 21's AdapterSlots, whose matrices are in the workers."""

    def __init__(self, talk, max_loras: int, max_lora_rank: int):
        self.num_slots, self.max_rank, self.talk = max_loras, max_lora_rank, talk
        super().__init__({})

    def copy_in(self, adapter: Adapter, slot: int) -> int:
        """As in lesson 21."""
        self.talk.tell("put_adapter", slot, adapter.layers)
        self.traffic.loads += 1
        self.traffic.loaded_bytes += adapter.num_bytes
        return slot

    def clear(self, slot: int) -> None:
        self.talk.tell("put_adapter", slot, {})


class RemoteAdapters(Adapters):
    """The adapters of an engine whose model is in workers."""

    def __init__(self, talk, config: ModelConfig, args: EngineArgs):
        self.slots = RemoteSlots(talk, args.max_loras, args.max_lora_rank)
        self.store = new_store(linears_of(config), args, config)


def linears_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """{layer: (N, K)} of a whole model, for those that may have an adapter."""
    with torch.device("meta"):
        whole = decoder_class(config)(config)
    return {
        name: tuple(part.weight.shape)
        for name, part in whole.named_modules()
        if type(part) is nn.Linear
        and name != "lm_head"
        and not any(one in name for one in NOT_ALONE)
    }


class PartAdapters(Adapters):
    """A worker's part of the adapters. config: of the whole model."""

    def __init__(self, model: Decoder, args: EngineArgs, config: ModelConfig, links: Links):
        super().__init__(model, args)
        self.config, self.links = config, links

    def put(self, slot: int, layers: dict[str, LayerAdapter]) -> None:
        """This rank's part of an adapter into a slot of each of its layers. layers: whole, by the
        decoder's names.
        """
        group = self.links.tensor
        for name, layer in self.slots.layers.items():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            pair = layers.get(name)
            if pair is None:
                layer.weights.clear(slot)
                continue
            shape = len(pair.b), pair.a.shape[1]
            rows, columns = slices_of(self.config, f"{name}.weight", shape, group.rank, group.size)
            layer.weights.put(slot, pair.a[:, columns], pair.b[rows], pair.scaling)
