"""Bad input to the kernels' wrappers, refused in one line each. Lengths and the table's entries are
read on a CPU only: on a GPU that would wait for the device, so there the caller answers for them.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    MAX_GRID,
    check_one_device,
    check_values,
    values_are_free,
)
from lessons.l05_gqa.arguments import DTYPES, MAX_GROUP, MAX_HEAD_DIM, MAX_QUERY_TILE
from lessons.l05_gqa.tiles import tiles_for
from lessons.l06_mla.optimized import check_latent_inputs
from lessons.l10_flash_decoding.splits import WorkItems

MAX_PAGE_SIZE = 256  # tokens of a block


def check_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    window: int | None,
) -> None:
    """Raise ValueError unless q: [B, Hq, D] and the rest, as in `paged_decode`, fit together."""
    check_caches(q, k_cache, v_cache, window)
    check_sequences(q, block_table, context_lens, k_cache.shape[1])
    if len(q) != len(context_lens):
        raise ValueError(
            f"q, context_lens: got {len(q)} and {len(context_lens)}; accepted: one query a sequence"
        )
    group, widest = q.shape[1] // k_cache.shape[2], max(q.shape[2], v_cache.shape[3])
    size = tiles_for(group, widest, True)
    if size["BLOCK_M"] > (most := min(MAX_GROUP, MAX_QUERY_TILE // size["BLOCK_D"])):
        raise ValueError(
            f"q, k_cache: got {group} query heads a KV head; accepted: at most {most} at head size "
            f"{widest}"
        )


def check_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    window: int | None,
) -> None:
    """Raise ValueError unless q: [T, Hq, D] and the rest, as in `paged_prefill`, fit together."""
    check_caches(q, k_cache, v_cache, window)
    check_sequences(q, block_table, context_lens, k_cache.shape[1])
    if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_q.shape != (len(context_lens) + 1,):
        raise ValueError(
            f"cu_seqlens_q: got {cu_seqlens_q.dtype} {tuple(cu_seqlens_q.shape)}; accepted: int32 "
            f"({len(context_lens) + 1},)"
        )
    check_one_device(q=q, cu_seqlens_q=cu_seqlens_q)
    if not cu_seqlens_q.is_contiguous():
        raise ValueError(f"cu_seqlens_q: got stride {cu_seqlens_q.stride()}; accepted: contiguous")
    if values_are_free(cu_seqlens_q):
        starts = cu_seqlens_q.tolist()
        if starts != sorted(starts) or starts[0] != 0 or starts[-1] > len(q):
            raise ValueError(
                f"cu_seqlens_q: got {starts}; accepted: ascending from 0 to at most {len(q)}, the "
                "rows of q"
            )


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> None:
    """Raise ValueError unless q: [N, Hq, D], k_cache: [num_blocks, block_size, Hkv, D] and v_cache:
    [num_blocks, block_size, Hkv, Dv] fit, and the window.
    """
    three = q, k_cache, v_cache
    shapes = ", ".join(str(tuple(x.shape)) for x in three)
    if (
        (q.ndim, k_cache.ndim, v_cache.ndim) != (3, 4, 4)
        or k_cache.shape[:3] != v_cache.shape[:3]
        or q.shape[2] != k_cache.shape[3]
        or not k_cache.shape[2]
        or q.shape[1] % k_cache.shape[2]
    ):
        raise ValueError(
            f"q, k_cache, v_cache: got {shapes}; accepted: [N, Hq, D], [num_blocks, block_size, "
            "Hkv, D], [num_blocks, block_size, Hkv, Dv], with Hq a multiple of Hkv"
        )
    if not all(1 <= x.shape[-1] <= MAX_HEAD_DIM for x in three):
        raise ValueError(
            f"q, k_cache, v_cache: got {shapes}; accepted: head sizes from 1 to {MAX_HEAD_DIM}"
        )
    if not 1 <= k_cache.shape[1] <= MAX_PAGE_SIZE:
        raise ValueError(
            f"k_cache: got blocks of {k_cache.shape[1]} tokens; accepted: 1 to {MAX_PAGE_SIZE}"
        )
    if len({x.dtype for x in three}) > 1 or q.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise ValueError(
            f"q, k_cache, v_cache: got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}; accepted: one "
            f"of {names} for all three"
        )
    check_one_device(q=q, k_cache=k_cache, v_cache=v_cache)
    if any(x.stride(-1) != 1 for x in three):
        raise ValueError(
            "q, k_cache, v_cache: got a last dimension that is not dense; accepted: stride 1 in it"
        )
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}; accepted: None, or 1 or more keys")


def check_sequences(q: Tensor, block_table: Tensor, context_lens: Tensor, block_size: int) -> None:
    """Raise ValueError unless block_table: [B, max_blocks] int32 and context_lens: [B] fit. q: on
    whose device they must be.
    """
    if context_lens.dtype not in (torch.int32, torch.int64) or context_lens.ndim != 1:
        raise ValueError(
            f"context_lens: got {context_lens.dtype} {tuple(context_lens.shape)}; accepted: int32 "
            "or int64 [B]"
        )
    if (
        block_table.dtype != torch.int32
        or block_table.ndim != 2
        or len(block_table) != len(context_lens)
    ):
        raise ValueError(
            f"block_table: got {block_table.dtype} {tuple(block_table.shape)}; accepted: int32 "
            f"[{len(context_lens)}, max_blocks], a row for each of context_lens"
        )
    check_one_device(q=q, block_table=block_table, context_lens=context_lens)
    if block_table.stride(1) != 1 or not context_lens.is_contiguous():
        raise ValueError(
            f"block_table, context_lens: got strides {block_table.stride()} and "
            f"{context_lens.stride()}; accepted: dense rows"
        )
    if len(context_lens) > MAX_GRID:
        raise ValueError(
            f"context_lens: got {len(context_lens)} sequences; accepted: up to {MAX_GRID}"
        )


def check_places(
    block_table: Tensor, context_lens: Tensor, num_blocks: int, block_size: int
) -> None:
    """Raise ValueError unless each length fits its row of block_table: [B, max_blocks], and the
    entries that it uses name blocks of the pool. context_lens: [B]. Other entries may be anything.
    """
    if not values_are_free(block_table):
        return
    check_values(0, block_table.shape[1] * block_size, context_lens=context_lens)
    in_use = -(-context_lens // block_size)
    is_used = torch.arange(block_table.shape[1]) < in_use[:, None]
    check_values(0, num_blocks - 1, block_table=block_table[is_used])


def check_items(
    items: WorkItems, context_lens: Tensor, num_splits: int | None, split_size: int | None
) -> None:
    """Raise ValueError unless items is a list for context_lens: [B], given instead of a number or
    size of splits, and a grid of it can be launched.
    """
    if num_splits is not None or split_size is not None:
        raise ValueError(
            f"items, num_splits, split_size: got a list, {num_splits} and {split_size}; accepted: "
            "one of the three"
        )
    check_one_device(context_lens=context_lens, items=items.items, starts=items.starts)
    room, count = items.items.shape, len(context_lens)
    if (
        {x.dtype for x in items} != {torch.int32}
        or not all(x.is_contiguous() for x in items)
        or items.starts.shape != (count + 1,)
        or len(room) != 2
        or room[1] != 4
        or room[0] > MAX_GRID
    ):
        raise ValueError(
            f"items: got {tuple(room)} and {tuple(items.starts.shape)}; accepted: what work_items "
            f"gives for {count} lengths, int32 [up to {MAX_GRID}, 4] and [{count + 1}]"
        )


def check_splits(
    capacity: int,
    num_splits: int | None,
    split_size: int | None,
    max_context_len: int | None,
) -> None:
    """Raise ValueError unless at most one of num_splits and split_size is given, and a grid of them
    can be launched. capacity: tokens that a row of the block table can name.
    """
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"num_splits, split_size: got {num_splits} and {split_size}; accepted: one of the two"
        )
    if max_context_len is not None and not 0 <= max_context_len <= capacity:
        raise ValueError(
            f"max_context_len: got {max_context_len}; accepted: None, or 0 to {capacity}, what the "
            "block table can name"
        )
    if num_splits is not None and not 1 <= num_splits <= MAX_GRID:
        raise ValueError(f"num_splits: got {num_splits}; accepted: None, or 1 to {MAX_GRID}")
    least = max(1, -(-capacity // MAX_GRID))
    if split_size is not None and split_size < least:
        raise ValueError(f"split_size: got {split_size}; accepted: None, or {least} or more keys")


def check_paged_latents(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    rank: int,
    splits: tuple[int | None, int | None, int | None],
    items: WorkItems | None,
) -> None:
    """Raise ValueError unless these fit together, as in `paged_mla_decode`. splits: num_splits,
    split_size, max_context_len.
    """
    if items is not None:
        check_items(items, context_lens, *splits[:2])
    check_sequences(q, block_table, context_lens, latents.shape[1])
    check_places(block_table, context_lens, *latents.shape[:2])
    capacity = block_table.shape[1] * latents.shape[1]
    # Lesson 6's check wants a block a sequence; a view of that shape passes on dtype and width.
    as_if_contiguous = latents[:1, :1].expand(len(q), capacity, -1)
    check_latent_inputs(q, as_if_contiguous, context_lens, rank)
    check_splits(capacity, *splits)
