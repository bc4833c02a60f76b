"""K and V of the layers that attend, and beside them the states of the others.

    pool = HybridPool.for_model(model, 1, 64, LESSON_03_TORCH)   # one sequence of 64 tokens
    hidden = model(batch.tokens, pool.attending(batch))

A block of it costs what the layers that attend keep of its tokens, and a slot what the others keep
of a sequence, however long that is.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps, KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l12_paged_kv.runner import PAGED
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.pool import QuantizedPool
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from reference.features.states.layers import StatePool, conv_weights, new_state_step
from reference.features.states.slots import SlotTable


def attention_alone(config: ModelConfig) -> ModelConfig:
    """The shape of a model of the layers that attend."""
    return replace(config, num_hidden_layers=len(config.state.attention_layers), state=None)


class HybridPool(KVPool):
    """A KVPool of the layers that attend; `states`, once `hold` has made them, of the others.
    Arguments: KVPool's. Raises ValueError for a model whose layers all attend, or a stage of one.
    """

    def __init__(self, config: ModelConfig, *args, layers: range | None = None, **arguments):
        if config.state is None:
            accepted = "one with layers that keep a state (others: KVPool)"
            raise ValueError(f"config: got model_type {config.model_type!r}; accepted: {accepted}")
        if layers is not None and len(layers) != config.num_hidden_layers:
            refuse("layers", layers, "None, or all, because a stage has no states")
        super().__init__(attention_alone(config), *args, **arguments)
        self.at = {layer: index for index, layer in enumerate(config.state.attention_layers)}
        self.state_config = config.state
        self.states: StatePool | None = None

    @classmethod
    def for_model(
        cls, model: Decoder, num_blocks: int, block_size: int, ops: AttentionOps
    ) -> "HybridPool":
        """As KVPool's; sequence b has block b and slot b."""
        pool = super().for_model(model, num_blocks, block_size, ops)
        pool.hold(num_blocks)
        return pool

    def learn_layers(self, model: Decoder) -> None:
        """As KVPool's, and the weights of the convolutions."""
        super().learn_layers(model)
        self.weights, self.dtype = conv_weights(model), model.dtype

    def hold(self, num_slots: int, of_matrices: torch.dtype | None = None) -> None:
        """Make room for the states of so many sequences. of_matrices: as StatePool's."""
        where = num_slots, self.dtype, self.k_slots.device
        self.states = StatePool(self.state_config, self.weights, *where, of_matrices)

    @property
    def allocated_bytes(self) -> int:
        """Of K and V, and of the states."""
        held = 0 if self.states is None else self.states.nbytes
        return super().allocated_bytes + held

    @property
    def bytes_per_token(self) -> int:
        """Of K and V alone, because a state does not grow."""
        return super().allocated_bytes // self.k_slots.shape[1]

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """As KVPool's for layers that attend; the others read and write the states of the batch's
        sequences.
        """
        return self.beside_states(super().attending(batch, first_block), batch)

    def beside_states(self, attend_here: Attend, batch: Batch) -> Attend:
        """`attend` of all layers. attend_here: of those that attend, by their numbers in this
        pool.
        """
        step = batch.states or self.in_order(batch)

        def attend(layer: int, *inputs: torch.Tensor) -> torch.Tensor:
            if layer in self.at:
                return attend_here(self.at[layer], *inputs)
            return self.states.attend(layer, *inputs, step=step)

        return attend

    def in_order(self, batch: Batch):
        """The slots of a batch without tables: sequence b has slot b. Raises ValueError for one
        with tables, whose slots `with_slots` has to tell.
        """
        if batch.block_table is not None:
            refuse("batch.states", None, "those of with_slots, for a batch with block tables")
        starts, lens = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        held = [length - new for length, new in zip(lens, lengths)]
        return new_state_step(lengths, held, range(len(lens)), self.k_slots.device)


class QuantizedHybridPool(QuantizedPool, HybridPool):
    """K and V as codes of lesson 19; states as they are. format: its first argument."""

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """As HybridPool's."""
        return self.beside_states(QuantizedPool.attending(self, batch, first_block), batch)


def hybrid_rung(kv_cache_dtype: str = "auto") -> Rung:
    """Lesson 12's rung over a HybridPool. kv_cache_dtype: "auto", or a format of lesson 19 for K
    and V.
    """
    pool = HybridPool
    if kv_cache_dtype != "auto":
        pool = partial(QuantizedHybridPool, FORMATS[kv_cache_dtype])
    return replace(PAGED, name="paged cache and states", cache=pool)


def with_slots(batch: Batch, chunks: list[tuple[list[int], int]], tables: list) -> Batch:
    """The batch of a step that knows each sequence's slot. chunks: of each its new tokens, and how
    many it holds; tables: SlotTables.
    """
    if strange := [type(table).__name__ for table in tables if not isinstance(table, SlotTable)]:
        refuse("tables", strange[0], "SlotTables, because a sequence has a slot for its state")
    lengths, held = [len(new) for new, _ in chunks], [before for _, before in chunks]
    slots, device = [table.slot for table in tables], batch.tokens.device
    step = new_state_step(lengths, held, slots, device)
    if any(may_go_back := [table.spare is not None for table in tables]):
        rows = torch.tensor(may_go_back).repeat_interleave(torch.tensor(lengths)).nonzero()[:, 0]
        step = replace(step, drafted=rows.to(device))
    return replace(batch, states=step)
