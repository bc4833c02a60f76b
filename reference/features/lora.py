"""Adapters in the engine: who may run together, which rows are whose, and whose K and V may be reused.

    llm = LLM("models/tiny", enable_lora=True, max_loras=4)
    llm.generate(prompts, params, lora_request=LoRARequest("sql", 1, "models/tiny-lora-sql"))

The decoder, the cache and the kernels of attention know nothing of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import FIRST, HashBlocks
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import SwappingScheduler
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.layers import adapter_layers, with_adapter_slots
from lessons.l21_multi_lora.peft.adapters import Adapter
from lessons.l21_multi_lora.slots import AdapterSlots, AdapterStore, LoRARequest
from lessons.toolbox.model.arguments import refuse
from reference.engine.engine_args import EngineArgs

# ---------------------------------------------------------------- who may run together


class WithAdapters:
    """Mixed into a scheduler: those who run at once need no more adapters than there are slots.

    max_loras: slots. The first who waits is not overtaken by somebody whose adapter has a slot, so
    that its turn comes.
    """

    def __init__(self, *args, max_loras: int, **arguments):
        super().__init__(*args, **arguments)
        self.max_loras = max_loras

    def has_place(self, sequence: Sequence) -> bool:
        """As in preemption.py; also whether its adapter can be in a slot."""
        in_use = {running.adapter for running in self.running} | {sequence.adapter}
        return len(in_use - {None}) <= self.max_loras and super().has_place(sequence)

    def add(self, sequence: Sequence) -> None:
        """As in preemption.py; the cache learns whose adapter it is."""
        super().add(sequence)
        self.note(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """As in preemption.py."""
        super().fork(parent, child)
        self.note(child)

    def abort(self, sequence: Sequence) -> None:
        """As in preemption.py."""
        super().abort(sequence)
        self.forget(sequence)

    def leave(self) -> list[Sequence]:
        """As in preemption.py."""
        done = super().leave()
        for sequence in done:
            self.forget(sequence)
        return done

    def note(self, sequence: Sequence) -> None:
        """Its blocks are those of its adapter, for as long as it is here."""
        if isinstance(self.blocks, AdapterBlocks) and sequence.adapter is not None:
            self.blocks.adapter_of[sequence.row] = sequence.adapter

    def forget(self, sequence: Sequence) -> None:
        """It has left."""
        if isinstance(self.blocks, AdapterBlocks):
            self.blocks.adapter_of.pop(sequence.row, None)


class AdapterScheduler(WithAdapters, ChunkedScheduler):
    """Lesson 15's scheduler with adapters."""


class AdapterSwappingScheduler(WithAdapters, SwappingScheduler):
    """Lesson 15's swapping scheduler with adapters."""


# ---------------------------------------------------------------- whose K and V


class AdapterHashes(HashBlocks):
    """Lesson 13's hashes behind the number of an adapter, because with another adapter the same
    tokens have other K and V.
    """

    salt = FIRST  # of whoever asks now

    def hashes(self, tokens, count, start=0, before=FIRST) -> Iterator[bytes]:
        """As in lesson 13; the salt stands where the hash in front of the first block stood."""
        return super().hashes(tokens, count, start, self.salt if before == FIRST else before)


class AdapterBlocks(CachingBlockManager):
    """A CachingBlockManager in which sequences share blocks only with those of the same adapter."""

    cache: AdapterHashes

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size, AdapterHashes(block_size))
        self.adapter_of: dict[int, Adapter] = {}  # sequence -> its adapter

    def reuse(self, sequence: int, tokens) -> int:
        """As in lesson 13."""
        with self.behind(sequence):
            return super().reuse(sequence, tokens)

    def remember(self, sequence: int, tokens) -> None:
        """As in lesson 13."""
        with self.behind(sequence):
            super().remember(sequence, tokens)

    @contextmanager
    def behind(self, sequence: int) -> Iterator[None]:
        """Inside it all hashes are those of this sequence's adapter."""
        adapter = self.adapter_of.get(sequence)
        self.cache.salt = FIRST if adapter is None else adapter.serial.to_bytes(32, "little")
        try:
            yield
        finally:
            self.cache.salt = FIRST


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
        most = args.max_loras if args.max_cpu_loras is None else args.max_cpu_loras
        self.store = AdapterStore(linears, args.max_lora_rank, most)

    @contextmanager
    def rows_of(self, step: Step) -> Iterator[list[int]]:
        """The slot of each token of a step. Inside it no slot is given to another adapter."""
        with self.slots.held(chunk.sequence.adapter for chunk in step.chunks) as slots:
            yield [slot for slot, chunk in zip(slots, step.chunks) for _ in range(chunk.count)]

    @contextmanager
    def over(self, row_slots: list[int] | None, device: torch.device) -> Iterator[None]:
        """Inside it the model adds each row's adapter. None: nobody has one."""
        if row_slots is None or max(row_slots) < 0:
            yield
            return
        with self.context.over(AdapterBatch.of(row_slots, device)):
            yield


def take_adapter(adapters: Adapters | None, request: LoRARequest | None) -> Adapter | None:
    """The adapter that a request wants, held for it. Raises ValueError if it cannot be had."""
    if request is None:
        return None
    if adapters is None:
        refuse("lora_request", request, "None, because enable_lora is False")
    return adapters.store.take(request)
