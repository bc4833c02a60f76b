"""Pools of DeepSeek's rows of codes, and which of them serves a model.

`RowPool` works everywhere: before a layer attends, the blocks that the step's sequences own become
latents. In `RowKernelPool` single queries read the codes. A prompt expands its latents for all
heads, so there they become numbers first in both.

As in pool.py every token reads what is stored, also a token of a prompt that has just been written.
"""

from functools import cached_property, partial

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l06_mla.optimized import kernel_fits
from lessons.l12_paged_kv.kernels.latents import PagedLatentPool
from lessons.l12_paged_kv.kernels.latents import programs_of as programs_of_latents
from lessons.l19_kv_quantization.kernels.latents.naive import LatentRows, rows_of
from lessons.l19_kv_quantization.kernels.latents.optimized import (
    decode,
    fits,
    programs_of,
    write_rows,
)
from lessons.l19_kv_quantization.optimized import writes_e4m3
from lessons.l19_kv_quantization.pool import QuantizedSlots, blocks_read, rotated


class RowPool(PagedLatentPool):
    """PagedLatentPool whose slots are rows: k_slots: [layers, slots + 1, 1, row_bytes] uint8."""

    format: LatentRows
    reserve = QuantizedSlots.reserve

    def _new_slots(self, row: tuple[int, int], dtype: torch.dtype, device) -> Tensor:
        heads, width = row
        self.format = rows_of(self.config, dtype)
        return super()._new_slots(
            (heads, self.format.row_bytes if width else 0), torch.uint8, device
        )

    @cached_property
    def programs_of_split(self) -> tuple[int, int]:
        """Of the kernel that reads numbers."""
        like = self.k_slots.new_empty(0, dtype=self.format.dtype)
        return programs_of_latents(self.config.num_attention_heads, like)

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """attend(layer, q: [T, H, nope + rope], k: c_kv ‖ k_pe, v: c_kv) -> [T, H, v_dim]."""
        blocks, small = blocks_read(batch, self.block_size)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, slots = self.stored(layer, q, k, v, batch)
            rows = self.blocks(slots).index_select(0, blocks)
            return self.read(self.layer_of[layer], q, self.format.dequantize(rows), small)

        return attend

    def stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch):
        """Rotate, quantize, store. Arguments as attend's -> q, rotated, and the layer's slots."""
        q, k, _ = rotated(self.ops, q, k, v, batch, self.cos_sin_cache)
        slots = self.k_slots[self.index_of(layer)]
        self.write(slots[:, 0], k[:, 0], batch.slot_mapping)
        self.written_bytes += len(k) * self.format.row_bytes
        return q, slots

    def write(self, rows: Tensor, x: Tensor, slot_mapping: Tensor) -> None:
        """x: [T, rank + rope] into the slots slot_mapping: [T] of rows: [slots + 1, row_bytes]; −1
        is the unowned slot.
        """
        rows.index_put_((slot_mapping,), self.format.quantize(x))


class RowKernelPool(RowPool):
    """RowPool whose codes the kernels read and write. For a GPU."""

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.ops = self.ops._replace(decode=partial(decode, self.format))

    @cached_property
    def programs_of_split(self) -> tuple[int, int]:
        """Programs that read a split of a sequence, and those that an SM holds."""
        like = self.k_slots.new_empty(0, dtype=self.format.dtype)
        return programs_of(self.config.num_attention_heads, like)

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """As RowPool's."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, slots = self.stored(layer, q, k, v, batch)
            return self.read(self.layer_of[layer], q, self.blocks(slots), batch)

        return attend

    def numbers_in(self, blocks: Tensor) -> Tensor:
        """The latents of some blocks: [n, block_size, 1, row_bytes] -> [n, block_size, 1, rank +
        rope].
        """
        return self.format.dequantize(blocks)

    def write(self, rows: Tensor, x: Tensor, slot_mapping: Tensor) -> None:
        """As in RowPool, in one pass."""
        if writes_e4m3(x.device):
            write_rows(self.format, x, rows, slot_mapping)
        else:
            super().write(rows, x, slot_mapping)  # PyTorch converts on every chip


def row_pool_of(model: Decoder) -> type[RowPool]:
    """The pool of rows for this model: with kernels on a GPU whose kernels can read them."""
    rows = rows_of(model.config, model.dtype)
    like = torch.empty(0, device=model.device)
    is_read = kernel_fits(like) and fits(rows) and model.dtype.itemsize <= 4
    return RowKernelPool if is_read else RowPool
