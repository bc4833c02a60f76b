"""DeepSeek's latents in blocks: one row of rank + rope values a token, found through a block table.

A single query reads the latents where they are: `paged_mla_kernel` is lesson 10's mla_split_kernel
that asks ROW_OF. Prompts expand them (lesson 6), and for that they are gathered first.

Sources: DeepSeek-V2 (2024), section 2.1.2; Kwon et al. 2023, PagedAttention, section 4.1.
"""

from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch, sequences
from lessons.l03_kv_cache.generate import Rung
from lessons.l06_mla.deepseek import MLAttention
from lessons.l06_mla.naive import LATENTS_TORCH
from lessons.l06_mla.optimized import AbsorbedPool, Tiles, kernel_fits, shared_bytes_of
from lessons.l09_flash_attention.tiles import capability
from lessons.l10_flash_decoding.mla import LATENTS_10, programs_per_sm, split_tiles
from lessons.l10_flash_decoding.splits import WorkItems, plan_splits, sms_of
from lessons.l11_cuda_graphs.naive import fused_latents
from lessons.l12_paged_kv import naive
from lessons.l12_paged_kv.kernels import stand_ins
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.kernels.arguments import check_paged_latents
from lessons.l12_paged_kv.kernels.few_heads import GROUPS, grouped_mla_kernel, is_grouped
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW, equal_split, listed_split, paged_row
from lessons.l12_paged_kv.kernels.launch import merged, room_for
from lessons.l12_paged_kv.kernels.plan import items_of_step
from lessons.toolbox.kernels.triton_ import tl, triton


class PagedLatentPool(AbsorbedPool):
    """AbsorbedPool whose sequences own blocks of a table, not the block of their own number."""

    @cached_property
    def programs_of_split(self) -> tuple[int, int]:
        """`programs_of` for the model's heads."""
        # The last of them, because the scales of a cache of codes have the model's dtype.
        return programs_of(self.config.num_attention_heads, self.tensors[-1])

    def read(self, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        """Prompts expand their latents, single queries before them read theirs as they are.
        latents: [num_blocks, block_size, 1, rank + rope], q: [T, H, nope + rope] -> [T, H, v_dim].
        """
        single = partial(super().read, mla)
        if batch.max_seqlen_q == 1:
            return single(q, latents, batch)

        def prompts(q: Tensor, part: Batch) -> Tensor:
            outs = [
                self.read_expanded(mla, q[rows], latents, part, b, length)
                for b, (rows, length) in enumerate(sequences(part))
            ]
            return torch.cat(outs)

        if batch.work_list is not None:  # a CPU's, and of the whole step
            return prompts(q, batch)
        return apart(q, batch, lambda q, part: single(q, latents, part), prompts)

    def read_expanded(
        self, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch, b: int, length: int
    ) -> Tensor:
        """Sequence b alone, because expanded its `length` latents take many times their room. q:
        [Tq, H, nope + rope] -> [Tq, H, v_dim].
        """
        table = batch.block_table[b, : -(-length // self.block_size)].long()
        rows = self.rows_of(latents, table)[None, :length]
        widths = [self.config.mla.kv_lora_rank, self.config.mla.qk_rope_head_dim]
        k, v = mla.expand(*rows.split(widths, dim=-1))
        one = replace(
            batch,
            cu_seqlens_q=batch.cu_seqlens_q.new_tensor([0, len(q)]),
            context_lens=batch.context_lens[b : b + 1],
            max_seqlen_q=len(q),
            max_context_len=length,
            block_table=None,
            lengths=((len(q), length),),
        )
        return self.ops.prefill(q, k, v, one, self.config.softmax_scale, None)

    def rows_of(self, latents: Tensor, table: Tensor) -> Tensor:
        """The tokens of these blocks, in their order: [len(table) · block_size, 1, rank + rope]."""
        return self.numbers_in(latents[table]).flatten(0, 1)

    def numbers_in(self, blocks: Tensor) -> Tensor:
        """Latents of some blocks, [n, block_size, 1, rank + rope]: as stored, but for codes."""
        return blocks


@triton.jit
def paged_mla_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    context_lens_ptr,
    block_table_ptr,
    scale_log2e,
    num_heads,
    window,
    split_size,
    stride_qb,
    stride_qh,
    stride_kblock,
    stride_kn,
    stride_table,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_OF: tl.constexpr = paged_row,
    SPLIT_OF: tl.constexpr = equal_split,
):
    """One program per block of heads and split: every row is key (RANK + ROPE values) and value
    (the first RANK).
    """
    sequence, length, begin, end, place = SPLIT_OF(
        items_ptr, context_lens_ptr, window, split_size, num_heads, BLOCK_N
    )
    if items_ptr is not None and sequence < 0:  # an idle item of the list
        return
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    latent, rope, step = tl.arange(0, RANK), RANK + tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    q_row = q_ptr + sequence * stride_qb + head[:, None] * stride_qh
    q_latent = tl.load(q_row + latent[None, :], mask=is_head[:, None], other=0.0)
    q_pe = tl.load(q_row + rope[None, :], mask=is_head[:, None], other=0.0)
    table_ptr = block_table_ptr + sequence * stride_table

    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + step
        in_split = key < end
        page, row = ROW_OF(table_ptr, sequence, key, in_split, PAGE_SIZE)
        kv_row = kv_ptr + (page * stride_kblock + row * stride_kn)[:, None]
        # key and value, loaded once
        c_kv = tl.load(kv_row + latent[None, :], mask=in_split[:, None], other=0.0)
        k_pe = tl.load(kv_row + rope[None, :], mask=in_split[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(c_kv), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee")
        scores = tl.where(in_split[None, :], scores * scale_log2e, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(c_kv.dtype), c_kv, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new

    out = tl.where(begin < length, acc / l_i[:, None], 0.0)
    partial = place + head * tl.num_programs(1)
    out_at = out_ptr + partial[:, None] * RANK + latent[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
    tl.store(lse_ptr + partial, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=is_head)  # ln 2


def paged_tiles(num_heads: int, itemsize: int, shared_bytes: int, chip: int | None) -> Tiles:
    """Lesson 10's tiles with two stages more, because the table is loaded before the latents, and
    the compiler counts that load's wait as stages. With 5 it keeps two tiles under way, as in
    lesson 10 with 3. Not in float32, for proofs, nor for many heads on 10.0, where that spills.
    """
    tiles = split_tiles(num_heads, itemsize, shared_bytes, chip)
    spills = chip is not None and chip >= 100 and tiles.block_h == 64
    if itemsize == 4 or spills:
        return tiles
    return tiles._replace(num_stages=tiles.num_stages + 2)


def tiles_of(num_heads: int, like: Tensor) -> Tiles:
    """`paged_tiles` on the chip of `like`, a tensor of any shape in q's dtype."""
    itemsize, chip = like.element_size(), capability(like.device)
    return paged_tiles(num_heads, itemsize, shared_bytes_of(like), chip)


def programs_of(num_heads: int, like: Tensor) -> tuple[int, int]:
    """Programs that read a split of a sequence, one for each block of heads, and those that an SM
    holds. like: as in `tiles_of`.
    """
    blocks = triton.cdiv(num_heads, tiles_of(num_heads, like).block_h)
    return blocks, programs_per_sm(num_heads, shared_bytes_of(like))


def paged_mla_decode(q: Tensor, latents: Tensor, block_table: Tensor, *args, **how) -> Tensor:
    """The first of what `paged_mla_states` returns, of its arguments: [B, H, rank]."""
    return paged_mla_states(q, latents, block_table, *args, **how)[0]


def paged_mla_states(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    tiles: Tiles | None = None,
    items: WorkItems | None = None,
) -> tuple[Tensor, Tensor]:
    """One absorbed query per sequence over its blocks of latents. q: [B, H, rank + rope]; latents:
    [num_blocks, block_size, rank + rope] -> out: [B, H, rank], and lse: [B, H] float32, the
    log-sum-exp of a query's scores.

    block_table, context_lens, items: as in `paged_decode`; the rest as in lesson 10's
    `mla_flash_decode`. Raises ValueError.
    """
    splits = num_splits, split_size, max_context_len
    check_paged_latents(q, latents, block_table, context_lens, kv_lora_rank, splits, items)
    capacity = block_table.shape[1] * latents.shape[1]
    num_sequences, num_heads, dim = q.shape
    tiles, per_sm = tiles or tiles_of(num_heads, q), programs_per_sm(num_heads, shared_bytes_of(q))
    head_blocks = triton.cdiv(num_heads, tiles.block_h)
    if items is None:
        longest = capacity if max_context_len is None else max_context_len
        slots, programs = sms_of(q.device) * per_sm, num_sequences * head_blocks
        num_splits = plan_splits(programs, longest, tiles.block_n, slots, num_splits, split_size)
    partial_out, partial_lse = room_for(q, num_splits, kv_lora_rank, items)
    kernel, more, rope = paged_mla_kernel, {}, dim - kv_lora_rank
    if is_grouped(num_heads, kv_lora_rank, rope, q.element_size(), tiles.num_warps):
        kernel, more = grouped_mla_kernel, {"GROUPS": GROUPS}
    if partial_out.numel():
        kernel[head_blocks, partial_out.shape[2], len(partial_out)](
            q,
            latents,
            partial_out,
            partial_lse,
            None if items is None else items.items,
            context_lens,
            block_table,
            softmax_scale * 1.4426950408889634,
            num_heads,
            NO_WINDOW,
            split_size or 0,
            *q.stride()[:2],
            *latents.stride()[:2],
            block_table.stride(0),
            RANK=kv_lora_rank,
            ROPE=rope,
            PAGE_SIZE=latents.shape[1],
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            SPLIT_OF=equal_split if items is None else listed_split,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **more,
        )
    return merged(partial_out, partial_lse, items, q.dtype)


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """The kernel above, where it fits. q: [B, H, rank + rope], absorbed; k_cache: [num_blocks,
    block_size, 1, rank + rope]; v_cache: its first `rank` values -> [B, H, rank].
    """
    if not kernel_fits(q):
        return naive.attend(q, k_cache, v_cache, batch, softmax_scale, window)
    return decode_states(q, k_cache, v_cache, batch, softmax_scale)[0]


def decode_states(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """The same by the kernel, with what `paged_mla_states` returns."""
    blocks, per_sm = programs_of(q.shape[1], q)
    block_n = tiles_of(q.shape[1], q).block_n
    return paged_mla_states(
        q,
        k_cache[:, :, 0],
        batch.block_table,
        batch.context_lens,
        softmax_scale,
        v_cache.shape[-1],
        max_context_len=batch.max_context_len,
        items=items_of_step(batch, blocks, block_n, None, per_sm),
    )


LATENTS_12 = LATENTS_10._replace(decode=decode)
LATENTS_12_TORCH = LATENTS_TORCH._replace(decode=stand_ins.decode)


PAGED_LATENTS = Rung(
    "paged cache", LATENTS_12, LATENTS_12_TORCH, prepare=fused_latents, cache=PagedLatentPool
)
