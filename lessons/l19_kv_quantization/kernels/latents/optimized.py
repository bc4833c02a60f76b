"""The wrappers of kernel.py: decode over rows of codes where they are, and the write."""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l03_kv_cache.batch import Batch
from lessons.l05_gqa.optimized import LOG2_E
from lessons.l06_mla.optimized import SMALLEST_TILE, Tiles, shared_bytes_of
from lessons.l10_flash_decoding.splits import WorkItems, plan_splits, sms_of
from lessons.l12_paged_kv.kernels.arguments import check_paged_latents
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW, equal_split, listed_split
from lessons.l12_paged_kv.kernels.launch import merged, room_for
from lessons.l12_paged_kv.kernels.plan import items_of_step
from lessons.l19_kv_quantization.formats import E4M3_MAX
from lessons.l19_kv_quantization.kernels import codes
from lessons.l19_kv_quantization.kernels.latents.kernel import coded_mla_kernel, write_rows_kernel
from lessons.l19_kv_quantization.kernels.latents.naive import (
    ALIGNED,
    GROUP,
    LEAST_SCALE,
    LatentRows,
)
from lessons.l19_kv_quantization.kernels.launch import number_of, unpack_for
from lessons.toolbox.kernels.triton_ import triton

PARTS = 2  # codes in a word of 16 bits
LEAST_RANK = SMALLEST_TILE * PARTS  # a group's words are as long as a tile has to be


def coded_tiles(num_heads: int, itemsize: int, shared_bytes: int) -> Tiles:
    """How coded_mla_kernel is launched for q of `itemsize` bytes: four warps, a group each."""
    if itemsize == 4:  # for proofs: products without matrix units
        return Tiles(16, 16, 4, 1)
    return Tiles(16, 32, 4, 5 if shared_bytes > 128 * 1024 else 4)


def crowding(itemsize: int, shared_bytes: int) -> tuple[int, int | None]:
    """Programs that an SM holds at a time, and the registers that a thread may have for it (None:
    any number). A warp waits for the others of its program in each tile, so there are three.
    """
    return (3, 168) if itemsize == 2 and shared_bytes > 200 * 1024 else (1, None)


def tiles_of(num_heads: int, like: Tensor) -> Tiles:
    """`coded_tiles` on the chip of `like`, a tensor of any shape in q's dtype."""
    return coded_tiles(num_heads, like.element_size(), shared_bytes_of(like))


def programs_of(num_heads: int, like: Tensor) -> tuple[int, int]:
    """Programs that read a split of a sequence, and those that an SM holds. like: as in
    `tiles_of`.
    """
    per_sm, _ = crowding(like.element_size(), shared_bytes_of(like))
    return triton.cdiv(num_heads, tiles_of(num_heads, like).block_h), per_sm


def launched_with(format: LatentRows, q: Tensor, tiles: Tiles) -> dict:
    """The kernel's constexprs and options for rows of a format. q: [B, H, rank + rope]."""
    unpack = unpack_for("fp8", PARTS, 8, q.device)
    return {
        "RANK": format.rank,
        "ROPE": format.rope,
        "GROUP": format.group,
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
        "PARTS": PARTS,
        "UNIT": codes.UNITS.get(unpack, 1.0),
        "UNPACK": unpack,
        "NUMBER": number_of(q.dtype),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "maxnreg": crowding(q.element_size(), shared_bytes_of(q))[1],
    }


def coded_mla_decode(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    format: LatentRows,
    softmax_scale: float,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    tiles: Tiles | None = None,
    items: WorkItems | None = None,
) -> Tensor:
    """One absorbed query per sequence over its blocks of rows. q: [B, H, rank + rope]; rows:
    [num_blocks, block_size, row_bytes] uint8 -> [B, H, rank].

    format: of rows, whose dtype is q's. The rest as in lesson 12's `paged_mla_decode`. Raises
    ValueError.
    """
    check_rows(q, rows, format)
    splits = num_splits, split_size, max_context_len
    # rows have the shape of latents but for the width, and lesson 12's check reads no value
    as_latents = q.new_empty(q.shape[2]).expand(*rows.shape[:2], -1)
    check_paged_latents(q, as_latents, block_table, context_lens, format.rank, splits, items)
    num_sequences, num_heads, _ = q.shape
    tiles = tiles or tiles_of(num_heads, q)
    per_sm, _ = crowding(q.element_size(), shared_bytes_of(q))
    head_blocks = triton.cdiv(num_heads, tiles.block_h)
    if items is None:
        longest = block_table.shape[1] * rows.shape[1]
        longest = longest if max_context_len is None else max_context_len
        slots, programs = sms_of(q.device) * per_sm, num_sequences * head_blocks
        num_splits = plan_splits(programs, longest, tiles.block_n, slots, num_splits, split_size)
    partial_out, partial_lse = room_for(q, num_splits, format.rank, items)
    if partial_out.numel():
        coded, scales, rotary = format.parts(rows)
        coded_mla_kernel[head_blocks, partial_out.shape[2], len(partial_out)](
            q,
            coded.view(torch.uint16),
            scales,
            rotary,
            partial_out,
            partial_lse,
            None if items is None else items.items,
            context_lens,
            block_table,
            softmax_scale * LOG2_E,
            num_heads,
            NO_WINDOW,
            split_size or 0,
            *q.stride()[:2],
            *(stride // ALIGNED for stride in rows.stride()[:2]),
            block_table.stride(0),
            PAGE_SIZE=rows.shape[1],
            SPLIT_OF=equal_split if items is None else listed_split,
            **launched_with(format, q, tiles),
        )
    return merged(partial_out, partial_lse, items, q.dtype)[0]


def write_rows(format: LatentRows, x: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """x: [T, rank + rope] into the slots slot_mapping: [T] int64 of rows: [slots, row_bytes] uint8;
    −1 skips a token. Bit for bit what `format.quantize` gives, where lesson 19's `writes_e4m3`.
    """
    if x.numel():
        coded, scales, rotary = format.parts(rows)
        write_rows_kernel[(len(x),)](
            x,
            coded,
            scales,
            rotary,
            slot_mapping,
            x.stride(0),
            rows.stride(0) // ALIGNED,
            RANK=format.rank,
            ROPE=format.rope,
            GROUP=format.group,
            BLOCK_R=triton.next_power_of_2(format.rope),
            LARGEST=E4M3_MAX,
            LEAST=LEAST_SCALE,
            num_warps=1,
        )


def fits(format: LatentRows) -> bool:
    """Whether the kernel can read rows of this format: a group's words, and its share of the rotary
    values, are at least a tile's.
    """
    sizes = format.rank // PARTS, format.rope // format.groups
    return min(sizes) >= SMALLEST_TILE and all(n & (n - 1) == 0 for n in (format.rank, format.rope))


def check_rows(q: Tensor, rows: Tensor, format: LatentRows) -> None:
    """Raise ValueError unless rows, as in `coded_mla_decode`, are rows of the format, and it is
    q's: [B, H, rank + rope].
    """
    if not fits(format) or format.dtype != q.dtype:
        raise ValueError(
            f"format: got {format.rank} + {format.rope} values of {format.dtype}; accepted: a rank "
            f"of {LEAST_RANK} or more, {SMALLEST_TILE} rotary values for each group of {GROUP}, of "
            f"{q.dtype}, q's dtype"
        )
    if rows.dtype != torch.uint8 or rows.ndim != 3 or rows.shape[2] != format.row_bytes:
        raise ValueError(
            f"rows: got {rows.dtype} {tuple(rows.shape)}; accepted: uint8 [num_blocks, block_size, "
            f"{format.row_bytes}]"
        )
    steps = (*rows.stride()[:2], rows.data_ptr())
    if rows.stride(2) != 1 or any(step % ALIGNED for step in steps):
        raise ValueError(
            f"rows: got strides {rows.stride()}; accepted: dense rows that begin at multiples of "
            f"{ALIGNED} bytes"
        )
    check_one_device(q=q, rows=rows)


# ---------------------------------------------------------------- the rung


def decode(
    format: LatentRows,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """One new token of each sequence, as an entry of lesson 3's table. q: [B, H, rank + rope],
    absorbed; k_cache: [num_blocks, block_size, 1, row_bytes] -> [B, H, rank]. v_cache is not read.
    """
    num_heads = q.shape[1]
    blocks, per_sm = programs_of(num_heads, q)
    block_n = tiles_of(num_heads, q).block_n
    return coded_mla_decode(
        q,
        k_cache[:, :, 0],
        batch.block_table,
        batch.context_lens,
        format,
        softmax_scale,
        max_context_len=batch.max_context_len,
        items=items_of_step(batch, blocks, block_n, None, per_sm),
    )
