"""Paged attention: the wrappers of the two kernels in kernels/paged.py, and this lesson's rung.

The kernels read the block table themselves, so nothing is gathered: K and V are read once, from
wherever they are. In kernels/, arguments.py says what the wrappers accept, and launch.py how the
kernels are launched.

Source: Kwon et al. 2023, PagedAttention, section 4.1.
"""

from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l04_positions.optimized import LESSON_04
from lessons.l09_flash_attention.tiles import Tiles
from lessons.l10_flash_decoding.splits import WorkItems
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.kernels.arguments import (
    check_decode,
    check_items,
    check_places,
    check_prefill,
)
from lessons.l12_paged_kv.kernels.hooks import paged_row
from lessons.l12_paged_kv.kernels.launch import keys_of_tile, launch_decode, launch_prefill
from lessons.l12_paged_kv.kernels.plan import items_of_step


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    row_of=paged_row,
    items: WorkItems | None = None,
) -> Tensor:
    """One query per sequence over its blocks. q: [B, Hq, D]; k_cache: [num_blocks, block_size, Hkv,
    D]; v_cache: [num_blocks, block_size, Hkv, Dv] -> [B, Hq, Dv].

    block_table: [B, max_blocks] int32; entries after a sequence's last block are not read.
    context_lens: [B] int32 or int64, tokens with the query's own; 0 gives zeros. num_splits,
    split_size, max_context_len: as in lesson 10's `flash_decode`. row_of: `contiguous_row` for a
    cache in which sequence b owns block b. items: lesson 10's `work_items` of these lengths and
    this window, instead of one number of splits for all. float32 inside. Raises ValueError.
    """
    check_decode(q, k_cache, v_cache, block_table, context_lens, window)
    if items is not None:
        check_items(items, context_lens, num_splits, split_size)
    if row_of is paged_row:
        check_places(block_table, context_lens, *k_cache.shape[:2])
    how = softmax_scale, window, num_splits, split_size, max_context_len, row_of
    return launch_decode(q, k_cache, v_cache, block_table, context_lens, *how, items=items)[0]


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    tiles: Tiles | None = None,
    row_of=paged_row,
) -> Tensor:
    """The newest tokens of each sequence over all of it. q: [T, Hq, D] -> [T, Hq, Dv]; caches,
    block_table, context_lens and row_of as in `paged_decode`.

    cu_seqlens_q: [B + 1] int32, where each sequence's new tokens begin, and the end. max_seqlen_q:
    of the sequence that has most; None: read from cu_seqlens_q, for which the CPU waits. tiles:
    None takes lesson 9's for this chip. Raises ValueError.
    """
    check_prefill(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, window)
    if row_of is paged_row:
        check_places(block_table, context_lens, *k_cache.shape[:2])
    how = softmax_scale, window, max_seqlen_q, tiles, row_of
    return launch_prefill(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, *how)


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """One new token of each sequence, by the step's list of splits if it has one. q: [B, Hq, D] ->
    [B, Hq, Dv].
    """
    return paged_decode(
        q,
        k_cache,
        v_cache,
        batch.block_table,
        batch.context_lens,
        softmax_scale,
        window,
        max_context_len=batch.max_context_len,
        items=items_of_step(batch, k_cache.shape[2], keys_of_tile(q, k_cache, v_cache), window),
    )


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Any number of new tokens of each sequence. q: [T, Hq, D] -> [T, Hq, Dv]."""
    return paged_prefill(
        q,
        k_cache,
        v_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.context_lens,
        softmax_scale,
        window,
        batch.max_seqlen_q,
    )


def mixed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Prompts, and in front of them sequences that run one token. q: [T, Hq, D] -> [T, Hq, Dv]."""

    def through(kernel):
        return lambda q, part: kernel(q, k_cache, v_cache, part, softmax_scale, window)

    return apart(q, batch, through(decode), through(prefill))


LESSON_12 = LESSON_04._replace(prefill=mixed, decode=decode)
