"""Adapters in the engine: who may run together, which rows are whose, and whose K and V may be
reused.

    llm = LLM("models/tiny", enable_lora=True, max_loras=4)
    llm.generate(prompts, params, lora_request=LoRARequest("sql", 1, "models/tiny-lora-sql"))

The decoder, the cache and the kernels of attention know nothing of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l14_continuous_batching.sequence import Step
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.layers import adapter_layers, with_adapter_slots
from lessons.l21_multi_lora.slots import AdapterSlots, AdapterStore, LoRARequest
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine_args import EngineArgs

__all__ = ["Adapters", "LoRARequest", "at_most"]

# ---------------------------------------------------------------- who may run together


def at_most(max_loras: int):
    """The scheduler's rule: those who run at once need no more adapters than there are slots. The
    first who waits is not overtaken, so its turn comes.
    """

    def may_join(sequence, running) -> bool:
        in_use = {one.adapter for one in running} | {sequence.adapter}
        return len(in_use - {None}) <= max_loras

    return may_join


# ---------------------------------------------------------------- which rows are whose


class Adapters:
    """The adapters of an engine, on the host and in the model's slots.

    model: the twin with room for them, which the runner has to run.
    """

    def __init__(self, model: Decoder, args: EngineArgs):
        self.context = AdapterContext()
        self.model = with_adapter_slots(model, self.context, args.max_loras, args.max_lora_rank)
        layers = adapter_layers(self.model)
        self.slots = AdapterSlots(layers)
        linears = {name: (part.out_features, part.in_features) for name, part in layers.items()}
        self.store = new_store(linears, args, model.config)

    @contextmanager
    def rows_of(self, step: Step) -> Iterator[list[int]]:
        """The slot of each token of a step. Inside it no slot is given to another adapter."""
        adapters = [chunk.sequence.adapter for chunk in step.chunks]
        with self.slots_of(adapters, [chunk.count for chunk in step.chunks]) as row_slots:
            yield row_slots

    @contextmanager
    def slots_of(self, adapters: list, counts: list[int]) -> Iterator[list[int]]:
        """The same for counts[b] tokens that have adapters[b], or None."""
        with self.slots.held(adapters) as slots:
            yield [slot for slot, count in zip(slots, counts) for _ in range(count)]

    @contextmanager
    def over(self, row_slots: list[int] | None, device: torch.device) -> Iterator[None]:
        """Inside it the model adds each row's adapter. None: no row has one."""
        if row_slots is None or max(row_slots) < 0:
            yield
            return
        with self.context.over(AdapterBatch.of(row_slots, device)):
            yield


def new_store(
    linears: dict[str, tuple[int, int]], args: EngineArgs, config: ModelConfig
) -> AdapterStore:
    """Where adapters are kept on the host. linears: {layer: (N, K)} of the whole model."""
    most = args.max_loras if args.max_cpu_loras is None else args.max_cpu_loras
    return AdapterStore(linears, args.max_lora_rank, most, config=config)
