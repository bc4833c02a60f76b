"""Absorbed weights: a decode step reads the latents as they are stored in the cache, once for all
heads, and expands nothing.

W_UK moves into the query and W_UV after the attention (deepseek.py: absorb, project_values). What
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

from lessons.l03_kv_cache.arguments import (
    MAX_ELEMENTS,
    check_dense,
    check_grid,
    check_one_device,
    check_powers_of_two,
    check_values,
)
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.optimized import LESSON_03
from lessons.l06_mla.deepseek import MLAttention, latent
from lessons.l06_mla.naive import LATENTS_TORCH, LatentPool
from lessons.toolbox.kernels.triton_ import tl, triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_TILE = 16  # rows, columns and inner length that a tensor core's product needs at least


class AbsorbedPool(LatentPool):
    """LatentPool whose single queries come to the latents, rather than the latents to them."""

    def read(self, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        """Prompts expand all latents; a single query reads them as they are. Shapes as above."""
        if batch.max_seqlen_q > 1:
            return super().read(mla, q, latents, batch)
        return read_absorbed(self, mla, q, latents, batch)


def read_absorbed(
    pool: LatentPool, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch
) -> Tensor:
    """One new token of each sequence over its latents, which are stored already. latents: [blocks,
    block_size, 1, rank + rope], q: [B, H, nope + rope], rotated -> [B, H, v_dim].
    """
    c_kv = latents[..., : pool.config.mla.kv_lora_rank]
    scale = pool.config.softmax_scale
    out = pool.ops.decode(mla.absorb(q), latents, c_kv, batch, scale, None)
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
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(c_kv.dtype), c_kv, acc * alpha[:, None], input_precision="ieee")
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


def shared_bytes_of(q: Tensor) -> int:
    """Shared memory that a block may have on q's device, on a CPU that of an H200. q: any shape."""
    if not q.is_cuda:
        return 227 * 1024
    return torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin


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
    tiles = tiles or tiles_for(num_heads, q.element_size(), shared_bytes_of(q))
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


def check_latent_inputs(q: Tensor, kv_cache: Tensor, context_lens: Tensor, rank: int) -> None:
    """Raise ValueError unless q: [B, H, rank + rope], kv_cache: [B, capacity, rank + rope],
    context_lens: [B] fit the kernel.
    """
    if (
        q.ndim != 3
        or kv_cache.ndim != 3
        or q.shape[::2] != kv_cache.shape[::2]
        or context_lens.shape != q.shape[:1]
    ):
        shapes = [tuple(x.shape) for x in (q, kv_cache, context_lens)]
        raise ValueError(
            f"q, kv_cache, context_lens: got {shapes}; accepted: [B, H, D], [B, capacity, D], [B]"
        )
    check_grid("q", len(q), "sequences")
    rope = q.shape[2] - rank
    # tl.arange takes powers of two, tl.dot 16 at least
    if any(n < 16 or n & (n - 1) for n in (rank, rope)) or rank > 512:
        raise ValueError(
            f"kv_lora_rank: got {rank}, which leaves q and kv_cache {rope} rotary values; "
            "accepted: powers of two, 16 to 512 and 16 or more"
        )
    if q.dtype != kv_cache.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"q, kv_cache: got {q.dtype}, {kv_cache.dtype}; accepted: both float32, float16 or "
            "bfloat16"
        )
    if context_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"context_lens: got {context_lens.dtype}; accepted: int32 or int64")
    check_one_device(q=q, kv_cache=kv_cache, context_lens=context_lens)
    if q.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        raise ValueError(
            "q, kv_cache: got a last dimension that is not dense; accepted: stride 1 in it"
        )
    if q.shape[1] * q.stride(1) > MAX_ELEMENTS:  # counted in 32 bits, because 64 would spill
        raise ValueError(
            f"q: got heads that are {q.stride(1)} elements apart; accepted: all of a token's "
            "within "
            f"{MAX_ELEMENTS}"
        )
    check_dense(context_lens=context_lens)
    check_values(0, kv_cache.shape[1], context_lens=context_lens)


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
