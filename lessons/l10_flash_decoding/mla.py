"""Multi-head latent attention in splits: one KV head for 128 query heads, so without splits one
sequence is a program or two.

`mla_split_kernel` is lesson 6's mla_decode_kernel over a part of the rows; what merges its splits
is the same combine_kernel.

Sources: DeepSeek-V2 (2024), section 2.1.2 (absorption); Dao et al. 2023, Flash-Decoding.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_powers_of_two
from lessons.l03_kv_cache.batch import Batch
from lessons.l06_mla.optimized import (
    LATENTS_06,
    SMALLEST_TILE,
    Tiles,
    check_latent_inputs,
    kernel_fits,
    shared_bytes_of,
    tiles_for,
)
from lessons.l09_flash_attention.optimized import LESSON_09
from lessons.l09_flash_attention.tiles import capability
from lessons.l10_flash_decoding.arguments import check_splits
from lessons.l10_flash_decoding.optimized import combine, keys_of_split
from lessons.l10_flash_decoding.splits import plan_splits, sms_of
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def mla_split_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    lse_ptr,
    context_lens_ptr,
    softmax_scale,
    num_heads,
    capacity,
    split_size,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kn,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of heads, split and sequence: every row is key (RANK + ROPE values) and
    value (the first RANK).
    """
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(1)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    latent, rope, step = tl.arange(0, RANK), RANK + tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    q_row = q_ptr + sequence * stride_qb + head[:, None] * stride_qh
    q_latent = tl.load(q_row + latent[None, :], mask=is_head[:, None], other=0.0)
    q_pe = tl.load(q_row + rope[None, :], mask=is_head[:, None], other=0.0)
    kv_ptr += sequence * stride_kb

    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    begin, end = keys_of_split(split, num_splits, split_size, length, capacity, BLOCK_N)

    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + step
        kv_row = kv_ptr + key[:, None].to(tl.int64) * stride_kn
        # key and value, loaded once
        c_kv = tl.load(kv_row + latent[None, :], mask=(key < end)[:, None], other=0.0)
        k_pe = tl.load(kv_row + rope[None, :], mask=(key < end)[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(c_kv), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee")
        # log2(e)
        scores = tl.where(
            (key < end)[None, :], scores * (softmax_scale * 1.4426950408889634), float("-inf")
        )
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(c_kv.dtype), c_kv, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new

    out = tl.where(begin < length, acc / l_i[:, None], 0.0)
    partial = (sequence * num_heads + head) * num_splits + split
    tl.store(out_ptr + partial[:, None] * RANK + latent[None, :], out, mask=is_head[:, None])
    tl.store(lse_ptr + partial, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=is_head)  # ln 2


def split_tiles(num_heads: int, itemsize: int, shared_bytes: int, chip: int | None) -> Tiles:
    """Lesson 6's tiles; chip: compute capability, as 90.

    On 9.0 many heads take twice the keys. Both warpgroups multiply the same 64 heads by all keys of
    a tile, in products of half the tile's keys: 76 wgmma for 64 keys, 74 for 32. On 10.0 that does
    not fit.
    """
    tiles = tiles_for(num_heads, itemsize, shared_bytes)
    return tiles._replace(block_n=64) if chip == 90 and tiles.block_h == 64 else tiles


def programs_per_sm(num_heads: int, shared_bytes: int) -> int:
    """Two where the tiles of 16 heads (KERNELS: 91 KiB) fit twice into a block's shared_bytes. At
    128 heads they take 112 to 216 KiB, so there is room for one.
    """
    return 2 if num_heads <= 16 and shared_bytes >= 2 * 91 * 1024 else 1


def mla_flash_decode(
    q: Tensor,
    kv_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """One absorbed query per sequence over its latents: q: [B, H, rank + rope], kv_cache: [B,
    capacity, rank + rope].

    Returns out: [B, H, rank] and lse: [B, H] float32, as lesson 6's mla_decode; num_splits,
    split_size and max_context_len as flash_decode. Raises ValueError.
    """
    check_latent_inputs(q, kv_cache, context_lens, kv_lora_rank)
    check_splits(num_splits, split_size, max_context_len, kv_cache)
    (num_sequences, num_heads, dim), capacity = q.shape, kv_cache.shape[1]
    shared = shared_bytes_of(q)
    tiles = tiles or split_tiles(num_heads, q.element_size(), shared, capability(q.device))
    check_powers_of_two(SMALLEST_TILE, block_h=tiles.block_h, block_n=tiles.block_n)
    head_blocks = triton.cdiv(num_heads, tiles.block_h)
    slots = sms_of(q.device) * programs_per_sm(num_heads, shared)
    num_splits = plan_splits(
        num_sequences * head_blocks,
        capacity if max_context_len is None else max_context_len,
        tiles.block_n,
        slots,
        num_splits,
        split_size,
    )
    partial_out = torch.empty(
        num_sequences, num_heads, num_splits, kv_lora_rank, dtype=torch.float32, device=q.device
    )
    partial_lse = torch.empty(
        num_sequences, num_heads, num_splits, dtype=torch.float32, device=q.device
    )
    if partial_out.numel():
        mla_split_kernel[head_blocks, num_splits, num_sequences](
            q,
            kv_cache,
            partial_out,
            partial_lse,
            context_lens,
            softmax_scale,
            num_heads,
            capacity,
            split_size or 0,
            *q.stride()[:2],
            *kv_cache.stride()[:2],
            RANK=kv_lora_rank,
            ROPE=dim - kv_lora_rank,
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return combine(partial_out, partial_lse, q.dtype)


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """As lesson 6's, in as many splits as the GPU has room for. q: [B, H, rank + rope] -> [B, H,
    rank].
    """
    if not kernel_fits(q):
        return LATENTS_06.decode(q, k_cache, v_cache, batch, softmax_scale, window)
    out, _ = mla_flash_decode(
        q,
        k_cache[: len(q), :, 0],
        batch.context_lens,
        softmax_scale,
        v_cache.shape[-1],
        max_context_len=batch.max_context_len,
    )
    return out


LATENTS_10 = LATENTS_06._replace(prefill=LESSON_09.prefill, decode=decode)
