"""Absorbed weights: a decode step reads the latents as they lie in the cache, once for all heads,
and expands nothing.

W_UK moves into the query and W_UV behind the attention (deepseek.py: absorb, project_values). What
is left is one KV head of rank + rope = 576 values, whose first 512 are also its value:
`mla_decode_kernel` loads each row once and uses it twice. Prefill stays in the expanded form,
because there absorbing costs more products than it saves (README, Where it loses).

Here one program walks over all keys of a sequence. Lesson 10 splits them: the kernel gives the
log-sum-exp that this needs.

Sources: DeepSeek-V2 (2024), section 2.1.2 (absorption); the running max and sum: Milakov &
Gimelshein 2018, section 3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.checks import check_powers_of_two
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.optimized import LESSON_03
from lessons.l06_mla.checks import check_latent_inputs
from lessons.l06_mla.deepseek import MLAttention, latent
from lessons.l06_mla.naive import LATENTS_TORCH, LatentPool
from lessons.toolbox.kernels.triton_ import tl, triton

SMALLEST_TILE = 16  # rows, columns and inner length that a tensor core's product needs at least


class AbsorbedPool(LatentPool):
    """LatentPool whose single queries come to the latents, rather than the latents to them."""

    def read(self, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        """Prompts expand all latents; a single query reads them as they lie. Shapes as above."""
        if batch.max_seqlen_q > 1:
            return super().read(mla, q, latents, batch)
        c_kv = latents[..., : self.config.mla.kv_lora_rank]
        scale = self.config.softmax_scale
        out = self.ops.decode(mla.absorb(q), latents, c_kv, batch, scale, None)
        return mla.project_values(out)


@triton.jit
def mla_decode_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    lse_ptr,
    context_lens_ptr,
    softmax_scale,
    num_heads,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kn,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per sequence and block of heads: a row of the cache is key (RANK + ROPE values)
    and value (the first RANK).
    """
    # Blocks of heads count first, because the blocks of a sequence then run side by side and find
    # its rows in the L2 cache.
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    latent, rope = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    q_row = q_ptr + sequence * stride_qb + head[:, None] * stride_qh
    q_latent = tl.load(q_row + latent[None, :], mask=is_head[:, None], other=0.0)
    q_pe = tl.load(q_row + rope[None, :], mask=is_head[:, None], other=0.0)
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    kv_ptr += sequence * stride_kb

    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    for start in range(0, length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        kv_row = kv_ptr + key[:, None].to(tl.int64) * stride_kn
        # key and value, loaded once
        c_kv = tl.load(kv_row + latent[None, :], mask=(key < length)[:, None], other=0.0)
        k_pe = tl.load(kv_row + rope[None, :], mask=(key < length)[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(c_kv), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee")
        # In powers of two, because exp2 is one instruction; log2(e) rides on the scale.
        scores = tl.where(
            (key < length)[None, :], scores * (softmax_scale * 1.4426950408889634), float("-inf")
        )
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        shrink = tl.exp2(m_i - m_new)
        weights = tl.exp2(scores - m_new[:, None])
        l_i = l_i * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(c_kv.dtype), c_kv, acc * shrink[:, None], input_precision="ieee")
        m_i = m_new
    out = tl.where(length > 0, acc / l_i[:, None], 0.0)  # an empty sequence attends to nothing
    row = sequence * num_heads + head
    tl.store(
        out_ptr + row[:, None] * RANK + latent[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_head[:, None],
    )
    tl.store(lse_ptr + row, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=is_head)


class Tiles(NamedTuple):
    """How mla_decode_kernel is launched; no result depends on it beyond rounding."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def tiles_for(num_heads: int, itemsize: int, shared_bytes: int = 227 * 1024) -> Tiles:
    """Tiles that the compiler fits into a block's shared_bytes without spills, for values of
    `itemsize` bytes (KERNELS).
    """
    if itemsize == 4:  # for proofs: four bytes a value and products without matrix units
        return Tiles(16, 16, 8, 1)
    if num_heads <= 16:  # bound by memory: few heads, more rows on their way
        return Tiles(16, 32, 4, 3 if shared_bytes > 128 * 1024 else 2)
    # the more heads, the more products a load
    return Tiles(64, 32, 8, 2) if shared_bytes > 150 * 1024 else Tiles(32, 32, 8, 2)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """One absorbed query per sequence over its latents: q: [B, H, rank + rope], kv_cache: [B,
    capacity, rank + rope].

    Returns out: [B, H, rank], weighted sums of latents, and lse: [B, H] float32, the log-sum-exp of
    a query's scaled scores. context_lens: [B] int32 or int64, the rows in use; 0 gives zeros and
    -inf. softmax_scale has no default, because it belongs to the width that was projected, which is
    not to be seen here. Slices of a cache (a split) are fine. Raises ValueError.
    """
    check_latent_inputs(q, kv_cache, context_lens, kv_lora_rank)
    (num_sequences, num_heads, dim), rank = q.shape, kv_lora_rank
    shared = (
        torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
        if q.is_cuda
        else 227 * 1024
    )
    tiles = tiles or tiles_for(num_heads, q.element_size(), shared)
    check_powers_of_two(SMALLEST_TILE, block_h=tiles.block_h, block_n=tiles.block_n)
    out = torch.empty(num_sequences, num_heads, rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_sequences, num_heads, dtype=torch.float32, device=q.device)
    if out.numel():
        mla_decode_kernel[triton.cdiv(num_heads, tiles.block_h), num_sequences](
            q,
            kv_cache,
            out,
            lse,
            context_lens,
            softmax_scale,
            num_heads,
            *q.stride()[:2],
            *kv_cache.stride()[:2],
            RANK=rank,
            ROPE=dim - rank,
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out, lse


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """The kernel above, where it fits. q: [B, H, rank + rope], absorbed; k_cache: [blocks,
    block_size, 1, rank + rope]; v_cache: its first `rank` values -> [B, H, rank].
    """
    if not kernel_fits(q):
        return LATENTS_TORCH.decode(q, k_cache, v_cache, batch, softmax_scale, window)
    rows, rank = k_cache[: len(q), :, 0], v_cache.shape[-1]
    return mla_decode(q, rows, batch.context_lens, softmax_scale, rank)[0]


def kernel_fits(q: Tensor) -> bool:
    """Whether a row of 576 values fits into the shared memory of q's device: from sm_80 on."""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0)


LATENTS_06 = LATENTS_TORCH._replace(prefill=LESSON_03.prefill, decode=decode)
ABSORBED = Rung("latents, absorbed", LATENTS_06, LATENTS_TORCH, prepare=latent, cache=AbsorbedPool)
