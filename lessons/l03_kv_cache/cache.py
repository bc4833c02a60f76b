"""A KV cache that is written once: space reserved ahead, each step writes its rows and reads views.

Read `KVPool.attending` beside `ConcatCache.attending` in naive.py: store, then attend, without the
copy in between. What "store" and "attend" do is a table of three functions, `AttentionOps`. Every
later lesson replaces an entry of that table, and nothing else.

Source: Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.request import check_all_attend
from lessons.l02_naive_attention.rope import new_cos_sin_cache, new_local_cos_sin_cache
from lessons.l03_kv_cache.batch import Batch
from lessons.toolbox.model.arguments import check_kind, is_whole, refuse
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.placement import read_device, read_dtype

SMALLEST_BUCKET = 64  # tokens


class AttentionOps(NamedTuple):
    """What happens inside `attend`. A rung of the ladder is one row of this table.

    write(q, k, v, k_slots, v_slots, batch, cos_sin_cache) -> q, rotated (perhaps in place)
        rotates q and k to batch.positions, stores k and v at batch.slot_mapping.
        q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv]; k_slots, v_slots: [slots + 1, Hkv, …]
    prefill(q, k_cache, v_cache, batch, softmax_scale, window) -> [T, Hq, Dv]
        any number of new tokens of each sequence, in the order of batch.cu_seqlens_q.
        k_cache: [blocks, block_size, Hkv, D]; v_cache: [blocks, block_size, Hkv, Dv]
    decode(q, k_cache, v_cache, batch, softmax_scale, window) -> [B, Hq, Dv]
        the same for exactly one new token of each sequence
    """

    write: Callable
    prefill: Callable
    decode: Callable


class KVPool:
    """K and V of several sequences in two buffers: [layers, num_blocks, block_size, Hkv, D].

    Until lesson 12 a block is as long as a sequence may become, and sequence b of a batch owns
    block b. Storage and counters only: where tokens go is the batch's business, and what is done
    with them that of `ops`. Raises ValueError for no room.

    layers: those that it stores, a pipeline's stage; None: all. max_context_len: the longest
    sequence, over as many blocks as it takes; None: one block.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        ops: AttentionOps,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: range | None = None,
        max_context_len: int | None = None,
    ):
        check_kind(ModelConfig, "a ModelConfig", config=config)
        check_all_attend(config)
        check_at_least_one(num_blocks=num_blocks, block_size=block_size)
        check_kind(AttentionOps, "AttentionOps, such as LESSON_03_TORCH", ops=ops)
        if max_context_len is not None:
            check_at_least_one(max_context_len=max_context_len)
        if layers is not None:
            check_layers(layers, config.num_hidden_layers)
        dtype, device = read_dtype(dtype), read_device(device, "meta")
        self.config = config
        self.ops = ops
        if config.has_score_rules:  # what few models have is imported for them
            from lessons.l03_kv_cache.score_rules import with_rules

            self.ops = with_rules(ops, config)
        self.sinks: list[Tensor | None] = []  # of each layer, in a model whose scores have rules
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = range(config.num_hidden_layers) if layers is None else layers
        self.written_bytes = 0  # K and V of new tokens
        self.growth_copy_bytes = 0  # K and V that were copied only to make room
        longest = max_context_len or block_size
        self.cos_sin_cache = new_cos_sin_cache(config, longest, device)
        self.local_cos_sin_cache = new_local_cos_sin_cache(config, longest, device)
        k_row, v_row = self.rows(config)
        self.k_slots = self._new_slots(k_row, dtype, device)
        self.v_slots = self._new_slots(v_row, dtype, device)

    @classmethod
    def for_model(
        cls,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        ops: AttentionOps,
    ) -> "KVPool":
        """An empty pool on the model's device, in its dtype. Raises ValueError."""
        check_kind(Decoder, "a decoder", model=model)
        pool = cls(model.config, num_blocks, block_size, ops, model.dtype, model.device)
        pool.learn_layers(model)
        return pool

    def learn_layers(self, model: Decoder) -> None:
        """Keep what attention reads from the layers: their sinks, in a model whose scores have
        rules.
        """
        if self.config.has_score_rules:
            from lessons.l02_naive_attention.variants.score_rules import sinks_of

            self.sinks = sinks_of(model)

    @staticmethod
    def rows(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a token's K and V in one layer: [Hkv, D] and [Hkv, Dv]."""
        num_kv_heads = config.num_key_value_heads
        return (num_kv_heads, config.head_dim), (num_kv_heads, config.v_head_dim)

    def _new_slots(
        self, row: tuple[int, int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        # One slot more than the blocks have. It belongs to no sequence: a token at slot -1,
        # Python's last, goes there, because a write in PyTorch cannot be skipped without looking at
        # the data.
        num_slots = self.num_blocks * self.slots_per_block + 1
        # Zeros, because what a batched decode masks is multiplied by 0, and 0 · NaN is NaN.
        return torch.zeros(len(self.layers), num_slots, *row, dtype=dtype, device=device)

    def blocks(self, slots: Tensor) -> Tensor:
        """slots: [..., slots + 1, Hkv, D] as blocks: [..., num_blocks, block_size, Hkv, D]."""
        used = slots.narrow(-3, 0, self.num_blocks * self.slots_per_block)
        return used.unflatten(-3, (self.num_blocks, self.slots_per_block))

    @property
    def slots_per_block(self) -> int:
        """One for each token of a block, unless other processes have some of the tokens."""
        return self.block_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a block holds: [layers, slots + 1, Hkv, …] each. Code that copies or swaps
        blocks copies all of these; lesson 19 adds scales.
        """
        return self.k_slots, self.v_slots

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_token(self) -> int:
        return self.allocated_bytes // self.k_slots.shape[1]

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """The decoder's `attend` for one step: rotate, store, attend to everything stored.

        first_block: the block of the batch's first sequence.
        """
        ops, config = self.ops, self.config
        has_rules = config.has_score_rules
        read = ops.decode if batch.max_seqlen_q == 1 else ops.prefill
        all_k, all_v = (self.blocks(x)[:, first_block:] for x in (self.k_slots, self.v_slots))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index = self.index_of(layer)
            k_slots, v_slots = self.k_slots[index], self.v_slots[index]
            q = ops.write(q, k, v, k_slots, v_slots, batch, self.cos_sin_cache_of(layer))
            self.written_bytes += k.nbytes + v.nbytes
            window = config.sliding_window(layer)
            rules = dict(sinks=self.sinks[layer]) if has_rules else {}
            return read(q, all_k[index], all_v[index], batch, config.softmax_scale, window, **rules)

        return attend

    def index_of(self, layer: int) -> int:
        """Where `layer` is in the pool's buffers."""
        return layer - self.layers.start

    def cos_sin_cache_of(self, layer: int) -> Tensor:
        """The table by which `layer` rotates: [positions, rope_dim]."""
        is_local = self.config.has_local_rope(layer)
        return self.local_cos_sin_cache if is_local else self.cos_sin_cache

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in each block. Blocks that are too small move to larger buffers.
        Raises ValueError for less than one.

        The next power of two, so that all moves together copy less than twice what is kept.
        """
        check_at_least_one(tokens=tokens)
        if tokens <= self.block_size:
            return
        # A table for several blocks a sequence may be longer already.
        num_positions = max(bucket(tokens), len(self.cos_sin_cache))
        check_same_rotation(self.config, len(self.cos_sin_cache), num_positions)
        old_k, old_v = self.blocks(self.k_slots), self.blocks(self.v_slots)
        self.block_size = bucket(tokens)
        self.k_slots = self._in_larger_buffer(old_k)
        self.v_slots = self._in_larger_buffer(old_v)
        device = self.cos_sin_cache.device
        self.cos_sin_cache = new_cos_sin_cache(self.config, num_positions, device)
        self.local_cos_sin_cache = new_local_cos_sin_cache(self.config, num_positions, device)

    def _in_larger_buffer(self, old: Tensor) -> Tensor:
        """Slots for blocks of the new size that begin with the old blocks: [layers, num_blocks, old
        size, Hkv, D].
        """
        slots = self._new_slots(old.shape[-2:], old.dtype, old.device)
        self.blocks(slots)[:, :, : old.shape[2]] = old
        self.growth_copy_bytes += old.nbytes
        return slots

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of one block over those of another. Lesson 12 needs none of
        these copies. Raises ValueError for blocks that the pool does not have.
        """
        check_below(self.num_blocks, source=source, target=target)
        check_below(self.block_size + 1, tokens=tokens)
        for slots in self.tensors:
            blocks = self.blocks(slots)
            blocks[:, target, :tokens] = blocks[:, source, :tokens]


def check_at_least_one(**sizes: int) -> None:
    """Raise ValueError that names the first size that is no whole number, 1 or more."""
    for name, value in sizes.items():
        if not is_whole(value):
            refuse(name, value, "1 or more, below 2**31")


def check_below(limit: int, **numbers: int) -> None:
    """Raise ValueError that names the first number outside 0 to limit - 1."""
    for name, value in numbers.items():
        if not is_whole(value, 0, limit - 1):
            refuse(name, value, f"0 to {limit - 1}")


def check_layers(layers: range, num_layers: int) -> None:
    """Raise ValueError unless `layers` are some of the model's, one after the other."""
    fits = isinstance(layers, range) and layers.step == 1 and layers
    if not fits or layers.start < 0 or layers.stop > num_layers:
        refuse("layers", layers, f"None, or a range of layers within 0 to {num_layers}")


def check_same_rotation(config: ModelConfig, held: int, wanted: int) -> None:
    """Raise ValueError if a context of `wanted` tokens is rotated otherwise than one of `held`."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.is_long(held) != scaling.is_long(wanted):
        limit = scaling.original_max_position_embeddings
        raise ValueError(
            f"tokens: got a context of {wanted}; accepted: at most {limit}, because longrope "
            "rotates "
            f"a longer one otherwise from its first token on; make a cache of that size at once"
        )


def bucket(tokens: int) -> int:
    """The block to reserve for `tokens`: the next power of two, SMALLEST_BUCKET at least."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())
