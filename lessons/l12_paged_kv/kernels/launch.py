"""Launches of the two kernels: how large their tiles are, how many splits, and what each argument
is.

`launch_decode` and `launch_prefill` check nothing: optimized.py does, before it calls them with
caches that hold plain numbers. `Stored` is for lesson 19, whose caches hold codes and scales.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l05_gqa.optimized import LOG2_E
from lessons.l05_gqa.tiles import SMALLEST_TILE, has_matrix_units, warps_for
from lessons.l05_gqa.tiles import tiles_for as decode_tiles
from lessons.l09_flash_attention.tiles import Tiles, capability, tiles_for
from lessons.l10_flash_decoding.optimized import combine
from lessons.l10_flash_decoding.splits import PROGRAMS_PER_SM, WorkItems, plan_splits, sms_of
from lessons.l12_paged_kv.kernels.arguments import check_splits
from lessons.l12_paged_kv.kernels.hooks import (
    NO_WINDOW,
    causal,
    equal_split,
    in_window,
    listed_split,
    paged_row,
    plain_load,
)
from lessons.l12_paged_kv.kernels.paged import decode_kernel, prefill_kernel
from lessons.l12_paged_kv.kernels.plan import combine_ranges
from lessons.toolbox.kernels.triton_ import triton


class Stored(NamedTuple):
    """How numbers are stored in a cache: the two hooks that load them, and their scales.

    k_scale, v_scale: what the hooks read beside a row, head after head, stride_sh elements apart;
    None without scales. v_head_dim: None if it is the width of v_cache.
    """

    load: Callable = plain_load
    load_v: Callable = plain_load
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    stride_sh: int = 0
    v_head_dim: int | None = None


AS_THEY_ARE = Stored()


def sizes_of(group: int, head_dim: int, v_head_dim: int, matrix_units: bool) -> dict[str, int]:
    """The constexprs that size decode_kernel's tiles: lesson 5's, with a width for each of K and
    V.
    """
    size = decode_tiles(group, max(head_dim, v_head_dim), matrix_units)
    # Two more, because the table is loaded before K and V, and the compiler counts that load's wait
    # as stages. With 5 it keeps two tiles of each under way, as in lesson 10 with 3.
    stages = {"NUM_STAGES": size["NUM_STAGES"] + 2}
    widths = {"BLOCK_D": head_dim, "BLOCK_DV": v_head_dim}
    return (
        size | stages | {name: triton.next_power_of_2(max(dim, 16)) for name, dim in widths.items()}
    )


def keys_of_tile(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """Keys of a tile of decode_kernel. q: [B, Hq, D] and caches as in `paged_decode`."""
    group = q.shape[1] // k_cache.shape[2]
    return sizes_of(group, q.shape[2], v_cache.shape[3], has_matrix_units(q))["BLOCK_N"]


def narrower(tiles: Tiles, itemsize: int) -> Tiles:
    """Lesson 9's tiles; in float32 with half the keys, because pages' addresses take registers."""
    if itemsize < 4:
        return tiles
    return replace(tiles, block_n=max(SMALLEST_TILE, tiles.block_n // 2))


def launch_decode(
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
    stored: Stored = AS_THEY_ARE,
    items: WorkItems | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_decode` without its checks, for any way to store numbers. Returns out: [B, Hq, Dv] and
    lse: [B, Hq] float32.
    """
    (_, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    v_head_dim = stored.v_head_dim or v_cache.shape[3]
    group = num_heads // num_kv_heads
    size = sizes_of(group, head_dim, v_head_dim, has_matrix_units(q))
    if items is None:
        how = window, num_splits, split_size, max_context_len
        num_splits = splits_for(q, k_cache, block_table, size["BLOCK_N"], *how)
    partial_out, partial_lse = room_for(q, num_splits, v_head_dim, items)
    if partial_out.numel():
        decode_kernel[num_kv_heads, partial_out.shape[2], len(partial_out)](
            q,
            k_cache,
            v_cache,
            partial_out,
            partial_lse,
            None if items is None else items.items,
            context_lens,
            block_table,
            stored.k_scale,
            stored.v_scale,
            (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
            NO_WINDOW if window is None else window,
            split_size or 0,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_table.stride(0),
            stored.stride_sh,
            GROUP=group,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            PAGE_SIZE=k_cache.shape[1],
            **size,
            ROW_OF=row_of,
            LOAD=stored.load,
            LOAD_V=stored.load_v,
            SEES=causal if window is None else in_window,
            SPLIT_OF=equal_split if items is None else listed_split,
            num_warps=warps_for(group, max(head_dim, v_head_dim)),
        )
    return merged(partial_out, partial_lse, items, q.dtype)


def room_for(
    q: Tensor, num_splits: int | None, v_head_dim: int, items: WorkItems | None
) -> tuple[Tensor, Tensor]:
    """Room for what the programs of a launch find: partial_out: [B, Hq, S, Dv], partial_lse: [B,
    Hq, S]. q: [B, Hq, D]. Of a list any number of places may be a sequence's, so B is 1 there.
    """
    if items is not None:
        return empty_partials(q[:1], len(items.items), v_head_dim, torch.float32)
    # Partial results stay in float32; a single split is the result.
    dtype = q.dtype if num_splits == 1 else torch.float32
    return empty_partials(q, num_splits, v_head_dim, dtype)


def merged(
    partial_out: Tensor, partial_lse: Tensor, items: WorkItems | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What a launch has written into `room_for`'s tensors, merged: out: [B, Hq, Dv] of dtype, lse:
    [B, Hq] float32.
    """
    if items is not None:
        return combine_ranges(partial_out[0], partial_lse[0], items.starts, dtype)
    if partial_out.shape[2] == 1:
        return partial_out[:, :, 0], partial_lse[:, :, 0]
    return combine(partial_out, partial_lse, dtype)


def splits_for(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    block_n: int,
    window: int | None,
    num_splits: int | None,
    split_size: int | None,
    max_context_len: int | None,
    per_sm: int = PROGRAMS_PER_SM,
) -> int:
    """How many splits a step launches. q: [B, Hq, D] and the rest as in `paged_decode`; block_n:
    keys of a tile; per_sm: programs that an SM holds. Raises ValueError.
    """
    capacity = block_table.shape[1] * k_cache.shape[1]
    check_splits(capacity, num_splits, split_size, max_context_len)
    longest = min(x for x in (capacity, max_context_len, window) if x is not None)
    slots, programs = sms_of(q.device) * per_sm, len(q) * k_cache.shape[2]
    return plan_splits(programs, longest, block_n, slots, num_splits, split_size)


def empty_partials(
    q: Tensor, num_splits: int, v_head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Room for what S splits find. q: [B, Hq, D] -> partial_out: [B, Hq, S, Dv] of dtype,
    partial_lse: [B, Hq, S] float32.
    """
    shape = (*q.shape[:2], num_splits)
    partial_out = torch.empty(*shape, v_head_dim, dtype=dtype, device=q.device)
    return partial_out, torch.empty(*shape, dtype=torch.float32, device=q.device)


def launch_prefill(
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
    stored: Stored = AS_THEY_ARE,
) -> Tensor:
    """`paged_prefill` without its checks, for any way to store numbers. q: [T, Hq, D] -> [T, Hq,
    Dv].
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    v_head_dim = stored.v_head_dim or v_cache.shape[3]
    out = torch.empty(num_tokens, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max())
    widest = max(head_dim, v_head_dim)
    tiles = tiles or narrower(tiles_for(capability(q.device), widest, q.itemsize), q.itemsize)
    prefill_kernel[num_heads, triton.cdiv(max_seqlen_q, tiles.block_m), len(context_lens)](
        q,
        k_cache,
        v_cache,
        out,
        cu_seqlens_q,
        context_lens,
        block_table,
        stored.k_scale,
        stored.v_scale,
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        NO_WINDOW if window is None else window,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        stored.stride_sh,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=triton.next_power_of_2(max(head_dim, 16)),
        BLOCK_DV=triton.next_power_of_2(max(v_head_dim, 16)),
        ROW_OF=row_of,
        LOAD=stored.load,
        LOAD_V=stored.load_v,
        SEES=causal if window is None else in_window,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
