"""Pools of codes: what `formats.py` makes of K and V, and the scales beside them.

`QuantizedPool` works with every operation of lesson 12, and with models whose scores have rules of
their own. Before a layer attends, it copies the blocks that the step's sequences own to a small
cache of plain numbers. `KernelPool` writes and reads codes by the kernels of optimized.py.

Every token reads codes, also those of a prompt that has just written them. So a token sees the same
K and V whether its prompt ran in one piece or in chunks, or came out of the prefix cache.
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps, KVPool
from lessons.l05_gqa.tiles import has_matrix_units
from lessons.l06_mla.deepseek import MLAttention
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.kernels.latents import PagedLatentPool
from lessons.l19_kv_quantization.formats import RowFormat
from lessons.l19_kv_quantization.kernels.launch import crowding, items_for
from lessons.l19_kv_quantization.optimized import (
    quantize_rows,
    quantized_decode,
    quantized_prefill,
    writes_e4m3,
)
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig


class QuantizedSlots:
    """What a pool of codes has in the place of KVPool's storage.

    format: of formats.py; other arguments are KVPool's. k_slots, v_slots: codes, [layers, slots +
    1, Hkv, bytes of a row] uint8. k_scales, v_scales: [layers, slots + 1, Hkv, scales of a row] in
    the dtype that K and V would have. Raises ValueError for 4 bits and a head of odd size.
    """

    def __init__(self, format: RowFormat, config: ModelConfig, *args, **arguments):
        self.format = format
        super().__init__(config, *args, **arguments)
        self.k_scales, self.v_scales = map(self._new_scales, (self.k_slots, self.v_slots))

    def rows(self, config: ModelConfig) -> tuple[tuple[int, int], ...]:
        """The shapes of a token's codes in one layer: (Hkv, bytes) of K and of V."""
        rows = super().rows(config)
        if any(width * self.format.bits % 8 for _, width in rows):
            refuse("kv_cache_dtype", self.format.name, "8 bits, because a head has an odd size")
        return tuple((heads, width * self.format.bits // 8) for heads, width in rows)

    def _new_slots(self, row: tuple[int, int], dtype: torch.dtype, device) -> Tensor:
        # Kept, because it is asked for K and V, and scales have the dtype that K and V would have.
        self.dtype = dtype
        return super()._new_slots(row, torch.uint8, device)

    def _new_scales(self, slots: Tensor) -> Tensor:
        """Scales for codes: [layers, slots + 1, Hkv, …]. In memory the slots of a head are side by
        side, because a kernel's program reads one head.
        """
        layers, num_slots, heads, width = slots.shape
        each = self.format.scales_per_row if width else 0
        # An even number of slots, because a kernel loads the scales of two slots as one word.
        shape = layers, heads, num_slots + num_slots % 2, each
        scales = torch.ones(shape, dtype=self.dtype, device=slots.device)
        return scales[:, :, :num_slots].transpose(1, 2)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes and scales: [layers, slots + 1, Hkv, …] each."""
        return self.k_slots, self.v_slots, self.k_scales, self.v_scales

    def reserve(self, tokens: int) -> None:
        """Blocks of codes do not grow, because a paged pool never asks for it. Raises
        ValueError.
        """
        if tokens > self.block_size:
            refuse("tokens", tokens, f"at most {self.block_size}, a block of this pool")

    def store(self, codes: Tensor, scales: Tensor, x: Tensor, slot_mapping: Tensor) -> None:
        """x: [T, Hkv, D] into the slots slot_mapping: [T] of one layer; −1 is the unowned slot."""
        new_codes, new_scales = self.format.quantize(x)
        codes.index_put_((slot_mapping,), new_codes)
        scales.index_put_((slot_mapping,), new_scales)
        self.written_bytes += new_codes.nbytes + new_scales.nbytes

    def numbers(self, codes: Tensor, scales: Tensor, blocks: Tensor) -> Tensor:
        """The chosen blocks of a layer as numbers again: [len(blocks), block_size, Hkv, D]."""
        chosen = (self.blocks(x).index_select(0, blocks) for x in (codes, scales))
        return self.format.dequantize(*chosen)


class QuantizedPool(QuantizedSlots, KVPool):
    """KVPool of codes. `ops` are lesson 12's, over plain caches."""

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """The decoder's `attend` for one step: rotate, quantize, store, attend to everything
        stored.

        batch: with a block table. first_block: 0, because tables name blocks.
        """
        read = self.reading(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = rotated(self.ops, q, k, v, batch, self.cos_sin_cache_of(layer))
            index = self.index_of(layer)
            k_codes, v_codes, k_scales, v_scales = (x[index] for x in self.tensors)
            self.store(k_codes, k_scales, k, batch.slot_mapping)
            self.store(v_codes, v_scales, v, batch.slot_mapping)
            return read(layer, q, (k_codes, k_scales), (v_codes, v_scales))

        return attend

    def reading(self, batch: Batch):
        """read(layer, q: [T, Hq, D], (codes, scales) of K, of V) -> [T, Hq, Dv] for this step."""
        in_use = blocks_read(batch, self.block_size)

        def read(layer: int, q: Tensor, keys: tuple, values: tuple) -> Tensor:
            return read_codes(self, layer, q, keys, values, batch, in_use)

        return read


def read_codes(
    pool: QuantizedPool,
    layer: int,
    q: Tensor,
    keys: tuple,
    values: tuple,
    batch: Batch,
    in_use: tuple[Tensor, Batch],
) -> Tensor:
    """Attention of a step over the codes of a layer: they become numbers first. keys, values: codes
    and scales, [slots + 1, Hkv, …] each; in_use: as `blocks_read`. q: [T, Hq, D] -> [T, Hq, Dv].
    """
    config, (blocks, small) = pool.config, in_use
    attend = pool.ops.decode if batch.max_seqlen_q == 1 else pool.ops.prefill
    k_cache, v_cache = (pool.numbers(*stored, blocks) for stored in (keys, values))
    window = config.sliding_window(layer)
    rules = dict(sinks=pool.sinks[layer]) if config.has_score_rules else {}
    return attend(q, k_cache, v_cache, small, config.softmax_scale, window, **rules)


class QuantizedLatentPool(QuantizedSlots, PagedLatentPool):
    """PagedLatentPool of codes: a token's latent is one row, and has one scale."""

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """attend(layer, q: [T, H, nope + rope], k: c_kv ‖ k_pe, v: c_kv) -> [T, H, v_dim]."""
        blocks, small = blocks_read(batch, self.block_size)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, _ = rotated(self.ops, q, k, v, batch, self.cos_sin_cache)
            index = layer - self.layers.start
            codes, scales = self.k_slots[index], self.k_scales[index]
            self.store(codes, scales, k, batch.slot_mapping)
            mla: MLAttention = self.layer_of[layer]
            return self.read(mla, q, self.numbers(codes, scales, blocks), small)

        return attend


class KernelPool(QuantizedPool):
    """QuantizedPool whose codes the kernels write and read. For a GPU, and for models whose scores
    have no rules of their own.
    """

    @cached_property
    def programs_of_split(self) -> tuple[int, int]:
        """Programs that read a split of a sequence, and those that an SM holds."""
        config = self.config
        heads, widest = self.k_slots.shape[-2], config.head_dim
        group = config.num_attention_heads // heads
        return heads, crowding(self.format.bits, group, widest, has_matrix_units(self.k_scales))[0]

    def store(self, codes: Tensor, scales: Tensor, x: Tensor, slot_mapping: Tensor) -> None:
        """As in QuantizedPool, in one pass."""
        if self.format.name == "fp8" and not writes_e4m3(x.device):
            super().store(codes, scales, x, slot_mapping)  # PyTorch converts on every chip
            return
        quantize_rows(self.format, x, codes, scales, slot_mapping)
        row = codes[0].nbytes + scales[0].nbytes
        self.written_bytes += len(x) * row

    def reading(self, batch: Batch):
        """read(layer, q: [T, Hq, D], (codes, scales) of K, of V) -> [T, Hq, Dv] for this step.
        These kernels know no token trees (lesson 17), so for a step with trees codes become numbers
        first.
        """
        if batch.tree is not None:
            return super().reading(batch)
        config = self.config

        def read(layer: int, q: Tensor, keys: tuple, values: tuple) -> Tensor:
            k_codes, k_scales, v_codes, v_scales = map(self.blocks, (*keys, *values))
            codes = k_codes, v_codes, k_scales, v_scales
            options = self.format, config.softmax_scale, config.sliding_window(layer)

            def decode(q: Tensor, part: Batch) -> Tensor:
                pages, most = (*codes, part.block_table), part.max_context_len
                items = items_for(part, self.format, q, k_codes, v_codes, options[2])
                lens = part.context_lens
                return quantized_decode(
                    q, *pages, lens, *options, max_context_len=most, items=items
                )

            def prefill(q: Tensor, part: Batch) -> Tensor:
                return self.prompts(q, codes, part, *options[1:])

            return decode(q, batch) if batch.max_seqlen_q == 1 else apart(q, batch, decode, prefill)

        return read

    def prompts(
        self, q: Tensor, codes: tuple, part: Batch, softmax_scale: float, window: int | None
    ) -> Tensor:
        """Sequences that run several tokens. q: [T, Hq, D], codes: as in `quantized_prefill` ->
        [T, Hq, Dv].
        """
        lens, most = (part.cu_seqlens_q, part.context_lens), part.max_seqlen_q
        how = self.format, softmax_scale, window
        return quantized_prefill(q, *codes, part.block_table, *lens, *how, max_seqlen_q=most)


def rotated(
    ops: AttentionOps, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as `ops.write` would store them, in scratch of their own: [T, H, D] each.

    K is quantized after its rotation. Before it, a code would have to be turned into a number and
    rotated again at each reading.
    """
    count = len(k)
    # After the last is the unowned slot, as in a pool.
    k_rows, v_rows = (x.new_empty(count + 1, *x.shape[1:]) for x in (k, v))
    own = replace(batch, slot_mapping=torch.arange(count, device=k.device))
    q = ops.write(q, k, v, k_rows, v_rows, own, cos_sin_cache)
    return q, k_rows[:count], v_rows[:count]


def blocks_read(batch: Batch, block_size: int) -> tuple[Tensor, Batch]:
    """The blocks that a step's sequences own: [U] int64, each once; and the step with tables that
    name a block by its place among these.
    """
    counts = -(-batch.context_lens // block_size)
    place = torch.arange(batch.block_table.shape[1], device=counts.device)
    in_use = place < counts[:, None]
    blocks, places = batch.block_table[in_use].long().unique(return_inverse=True)
    table = torch.zeros_like(batch.block_table)
    table[in_use] = places.to(table.dtype)
    work = batch.work_list
    if work is not None:
        work = replace(work, blocks=torch.searchsorted(blocks, work.blocks), known={})
    return blocks, replace(batch, block_table=table, work_list=work)
