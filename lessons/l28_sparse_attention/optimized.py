"""Decoding over chosen rows: the kernel reads a list of positions, finds each through the block
table, and touches no other row.

Read `sparse_mla_kernel` beside lesson 12's paged_mla_kernel. One line is new: which key comes next
is loaded from the list, where it was counted before. Whatever else the pages hold, NaN included, is
never read. The list is cut into splits as a context was in lesson 10, and the same kernel merges
them.

`choose_and_attend` is a whole step of DeepSeek's sparse attention: scores (index_scores.py), the
list (top_k.py), and attention over it. `sparse_decode` is the same for K and V of ordinary heads.
It needs no kernel of its own, because a list of keys is a block table with pages of one token.

Sources: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equation 2 and appendix A; lessons 10 and 12.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    MAX_ELEMENTS,
    check_one_device,
    check_powers_of_two,
    check_values,
)
from lessons.l06_mla.optimized import DTYPES, SMALLEST_TILE, Tiles, shared_bytes_of
from lessons.l10_flash_decoding.arguments import check_splits
from lessons.l10_flash_decoding.mla import programs_per_sm
from lessons.l10_flash_decoding.optimized import combine
from lessons.l10_flash_decoding.splits import plan_splits, sms_of
from lessons.l12_paged_kv.kernels.hooks import paged_row
from lessons.l12_paged_kv.kernels.latents import tiles_of
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.l28_sparse_attention.index_scores import check_queries, index_scores
from lessons.l28_sparse_attention.top_k import top_k
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def softmax_step(m_i, scores):
    """A tile of the online softmax (lesson 8): the new maximum, what old sums are worth, the
    tile's weights. m_i: [BLOCK_H], scores: [BLOCK_H, BLOCK_N].
    """
    m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    # A tile of the list may hold no key, and -inf minus -inf is NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, tl.exp2(m_i - m_safe), tl.exp2(scores - m_safe[:, None])


@triton.jit
def sparse_mla_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    lse_ptr,
    indices_ptr,
    sequences_ptr,
    block_table_ptr,
    scale_log2e,
    num_heads,
    num_keys,
    split_size,
    stride_qt,
    stride_qh,
    stride_kblock,
    stride_kn,
    stride_indices,
    stride_table,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of heads, split of the list and query: a row is key (RANK + ROPE
    values) and value (the first RANK), loaded once.
    """
    split, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    latent, rope = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    q_row = q_ptr + token * stride_qt + (head * stride_qh)[:, None]
    q_latent = tl.load(q_row + latent[None, :], mask=is_head[:, None], other=0.0)
    q_pe = tl.load(q_row + rope[None, :], mask=is_head[:, None], other=0.0)
    sequence = tl.load(sequences_ptr + token).to(tl.int64)
    table_ptr = block_table_ptr + sequence * stride_table
    list_ptr = indices_ptr + token * stride_indices

    m_i = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    begin = split * split_size
    end = tl.minimum(begin + split_size, num_keys)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        key = tl.load(list_ptr + place, mask=place < end, other=-1)
        is_key = key >= 0
        block, row = paged_row(table_ptr, sequence, key, is_key, PAGE_SIZE)
        kv_row = kv_ptr + (block * stride_kblock + row * stride_kn)[:, None]
        c_kv = tl.load(kv_row + latent[None, :], mask=is_key[:, None], other=0.0)
        k_pe = tl.load(kv_row + rope[None, :], mask=is_key[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(c_kv), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee")
        scores = tl.where(is_key[None, :], scores * scale_log2e, float("-inf"))
        m_new, alpha, p = softmax_step(m_i, scores)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(c_kv.dtype), c_kv, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new

    out = tl.where((l_i == 0.0)[:, None], 0.0, acc / l_i[:, None])
    partial = (token * num_heads + head) * tl.num_programs(1) + split
    tl.store(out_ptr + partial[:, None] * RANK + latent[None, :], out, mask=is_head[:, None])
    tl.store(lse_ptr + partial, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=is_head)  # ln 2


def sparse_mla(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    indices: Tensor,
    sequences: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As naive.py's `sparse_mla`. q: [T, H, rank + rope], latents: [num_blocks, block_size, rank +
    rope] -> [T, H, rank].

    block_table: [B, max_blocks] int32; indices: [T, K] int32, -1 anywhere: no key; sequences: [T].
    num_splits: of each list (default: enough to fill the GPU). Raises ValueError.
    """
    check_sparse_inputs(q, latents, block_table, indices, sequences, kv_lora_rank)
    check_splits(num_splits, None, None, indices)
    (tokens, num_heads, dim), num_keys = q.shape, indices.shape[1]
    tiles = tiles or tiles_of(num_heads, q)
    check_powers_of_two(SMALLEST_TILE, block_h=tiles.block_h, block_n=tiles.block_n)
    head_blocks = triton.cdiv(num_heads, tiles.block_h)
    slots = sms_of(q.device) * programs_per_sm(num_heads, shared_bytes_of(q))
    programs = tokens * head_blocks
    num_splits = plan_splits(programs, num_keys, tiles.block_n, slots, num_splits, None)
    # whole tiles, so that only the last split has one that is not full
    tiles_a_split = triton.cdiv(triton.cdiv(num_keys, tiles.block_n), num_splits)
    shape = (tokens, num_heads, num_splits)
    partial_out = torch.empty(*shape, kv_lora_rank, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(*shape, dtype=torch.float32, device=q.device)
    if partial_out.numel():
        sparse_mla_kernel[head_blocks, num_splits, tokens](
            q,
            latents,
            partial_out,
            partial_lse,
            indices,
            sequences,
            block_table,
            softmax_scale * 1.4426950408889634,
            num_heads,
            num_keys,
            tiles_a_split * tiles.block_n,
            *q.stride()[:2],
            *latents.stride()[:2],
            indices.stride(0),
            block_table.stride(0),
            RANK=kv_lora_rank,
            ROPE=dim - kv_lora_rank,
            PAGE_SIZE=latents.shape[1],
            BLOCK_H=tiles.block_h,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return combine(partial_out, partial_lse, q.dtype)[0]


def choose_and_attend(
    q: Tensor,
    latents: Tensor,
    q_index: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    index_scales: Tensor | None,
    block_table: Tensor,
    context_lens: Tensor,
    k: int,
    softmax_scale: float,
    kv_lora_rank: int = 512,
) -> tuple[Tensor, Tensor]:
    """One new token of each sequence: out: [B, H, rank], and the list of its keys: [B, k] int32.

    q: [B, H, rank + rope], absorbed; q_index: [B, Hi, Di], weights: [B, Hi]; context_lens: [B], the
    new token included. The index keys are in the same blocks as the latents. Raises ValueError.
    """
    sequences = torch.arange(len(q), dtype=torch.int32, device=q.device)
    capacity = block_table.shape[1] * latents.shape[1]
    scores = index_scores(
        q_index,
        weights,
        index_keys,
        index_scales,
        block_table,
        sequences,
        context_lens - 1,
        capacity,
    )
    indices = top_k(scores, k, context_lens)
    out = sparse_mla(q, latents, block_table, indices, sequences, softmax_scale, kv_lora_rank)
    return out, indices


# ---------------------------------------------------------------- K and V of ordinary heads


def one_token_pages(
    block_table: Tensor, indices: Tensor, sequences: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """A list of keys as a block table: [T, K] int32, the row of each key if every token were a
    page, and how many there are: [T] int32.

    indices: [T, K] with -1 at the end, as `top_k` gives it; block_table: [B, max_blocks].
    """
    keys = indices.clamp(min=0).long()
    blocks = block_table[sequences.long()].gather(1, keys // block_size)
    rows = blocks * block_size + keys % block_size
    return rows.to(torch.int32), (indices >= 0).sum(1, dtype=torch.int32)


def sparse_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    indices: Tensor,
    sequences: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """Chosen keys of grouped heads, by lesson 12's kernel. q: [T, Hq, D], k_cache: [num_blocks,
    block_size, Hkv, D], v_cache: [num_blocks, block_size, Hkv, Dv] -> [T, Hq, Dv].

    The rest as in `sparse_mla`, with -1 at the end of a list. The blocks of a cache follow each
    other in memory. Raises ValueError.
    """
    check_queries(len(q), block_table, sequences, k_cache.shape[:2])
    table, counts = one_token_pages(block_table, indices, sequences, k_cache.shape[1])
    pages = [x.view(-1, 1, *x.shape[2:]) for x in (k_cache, v_cache)]
    return paged_decode(q, *pages, table, counts, softmax_scale)


# ---------------------------------------------------------------- what is accepted


def check_sparse_inputs(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    indices: Tensor,
    sequences: Tensor,
    rank: int,
) -> None:
    """Raise ValueError unless q: [T, H, rank + rope], indices: [T, K] and the rest fit together, as
    in `sparse_mla`.
    """
    if q.ndim != 3 or latents.ndim != 3 or q.shape[2] != latents.shape[2]:
        raise ValueError(
            f"q, latents: got {tuple(q.shape)}, {tuple(latents.shape)}; accepted: [T, H, rank + "
            "rope], [num_blocks, block_size, rank + rope]"
        )
    rope = q.shape[2] - rank
    if any(x < SMALLEST_TILE or x & (x - 1) for x in (rank, rope)) or rank > 512:
        raise ValueError(
            f"kv_lora_rank: got {rank}, which leaves {rope} rotary values; accepted: powers of "
            "two, 16 to 512 and 16 or more"
        )
    if q.dtype != latents.dtype or q.dtype not in DTYPES:
        raise ValueError(f"q, latents: got {q.dtype}, {latents.dtype}; accepted: one float dtype")
    if q.stride(-1) != 1 or latents.stride(-1) != 1:
        raise ValueError("q, latents: got a last dimension that is not dense; accepted: stride 1")
    if q.shape[1] * q.stride(1) > MAX_ELEMENTS:
        raise ValueError(f"q: got heads {q.stride(1)} elements apart; accepted: within 2^31")
    if indices.ndim != 2 or indices.dtype != torch.int32 or indices.stride(1) != 1:
        raise ValueError(
            f"indices: got {indices.dtype} {tuple(indices.shape)} with strides "
            f"{indices.stride()}; accepted: int32 [T, K], dense rows"
        )
    if len(indices) != len(q) or not indices.shape[1]:
        raise ValueError(
            f"indices: got {tuple(indices.shape)}; accepted: [{len(q)}, K], a list for each query"
        )
    check_one_device(q=q, latents=latents, indices=indices, block_table=block_table)
    check_queries(len(q), block_table, sequences, latents.shape[:2])
    check_values(-1, block_table.shape[1] * latents.shape[1] - 1, indices=indices)
