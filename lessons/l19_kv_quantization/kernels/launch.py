"""How decode.py's kernel is launched: words, hooks, tiles and splits for a format and a chip."""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l05_gqa.optimized import LOG2_E
from lessons.l05_gqa.tiles import SMALLEST_TILE, has_matrix_units, warps_for
from lessons.l09_flash_attention.tiles import chip_of, has_e4m3
from lessons.l10_flash_decoding.splits import PROGRAMS_PER_SM, WorkItems
from lessons.l12_paged_kv.kernels.hooks import (
    NO_WINDOW,
    causal,
    equal_split,
    in_window,
    listed_split,
)
from lessons.l12_paged_kv.kernels.launch import merged, room_for, sizes_of, splits_for
from lessons.l12_paged_kv.kernels.plan import items_of_step
from lessons.l19_kv_quantization.formats import RowFormat
from lessons.l19_kv_quantization.kernels import codes
from lessons.l19_kv_quantization.kernels.decode import codes_decode_kernel
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import interpreting, rehearsing

IN_TRITON = {"fp8": codes.e4m3_codes, "int8": codes.int8_codes, "int4": codes.int4_codes}
IN_PTX = {"fp8": codes.e4m3_ptx, "int8": codes.int8_ptx, "int4": codes.int4_ptx}
MOST_KEYS = 128  # of a tile


def unpack_for(name: str, parts: int, bits: int, device: torch.device) -> Callable:
    """The hook that takes words of a format apart on a device. The interpreter knows no PTX, and
    the PTX knows words of 16 bits alone.
    """
    if name == "fp8" and not has_e4m3(device):
        return codes.e4m3_bits
    # a pretended GPU has a chip and interprets
    runs = chip_of(device) is not None and not (interpreting() or rehearsing())
    in_ptx = runs and parts * bits == 16
    return (IN_PTX if in_ptx else IN_TRITON)[name]


def as_words(codes: Tensor) -> Tensor:
    """codes: [num_blocks, block_size, Hkv, bytes] uint8, in words of two bytes where possible."""
    even = (*codes.stride()[:3], codes.shape[3], codes.data_ptr())
    return codes if any(x % 2 for x in even) else codes.view(torch.uint16)


def in_whole_words(*scales: Tensor) -> tuple[Tensor, ...]:
    """scales of K and V: [num_blocks, block_size, Hkv, each], the slots of a head side by side,
    such that each head's are whole words of 32 bits. Copies where they are not; a pool's are.
    """
    per_head = scales[0][:, :, 0].numel()
    places = [n for x in scales for n in (x.data_ptr(), x.stride(2) * x.itemsize)]
    if all(n % 4 == 0 for n in (*places, per_head * scales[0].itemsize)):
        return scales
    copies = []
    for x in scales:
        by_head = x.permute(2, 0, 1, 3)
        room = x.new_zeros(len(by_head), per_head + per_head % 2)
        copy = room[:, :per_head].unflatten(1, by_head.shape[1:]).copy_(by_head)
        copies.append(copy.permute(1, 2, 0, 3))
    return tuple(copies)


def sizes_for(group: int, dims: tuple[int, int], parts: int, matrix_units: bool) -> dict[str, int]:
    """The constexprs that size the kernel's tiles. dims: head sizes of K and of V.

    Twice the keys of lesson 12's tile, because a code has half of the bytes or fewer.
    """
    size = sizes_of(group, *dims, matrix_units)
    block_n = min(MOST_KEYS, 2 * size["BLOCK_N"]) if matrix_units else size["BLOCK_N"]
    widths = {
        name: max(SMALLEST_TILE, triton.next_power_of_2(dim // parts))
        for name, dim in zip(("BLOCK_K", "BLOCK_V"), dims)
    }
    if max(widths.values()) == SMALLEST_TILE:
        block_n = min(64, block_n)  # because all warps then hold the same words of a tile
    return {name: size[name] for name in ("BLOCK_M", "NUM_STAGES")} | {"BLOCK_N": block_n} | widths


def number_of(dtype: torch.dtype):
    """Triton's type of the products, for a model's dtype."""
    return tl.float32 if dtype == torch.float32 else tl.float16


def crowding(bits: int, group: int, widest: int, matrix_units: bool) -> tuple[int, int | None]:
    """Programs that an SM holds at a time, and the registers that a thread may have for it (None:
    any number). A tile of 4-bit codes has so few bytes that two programs leave the memory idle.
    """
    few = bits == 4 and matrix_units and group <= SMALLEST_TILE and 64 < widest <= 128
    return (2 * PROGRAMS_PER_SM, 128) if few else (PROGRAMS_PER_SM, None)


def launched_with(
    format: RowFormat, q: Tensor, group: int, dims: tuple[int, int], parts: int
) -> tuple[dict, int]:
    """The kernel's constexprs and options for q: [B, Hq, D], and how many programs an SM holds."""
    matrix_units = has_matrix_units(q)
    per_sm, registers = crowding(format.bits, group, max(dims), matrix_units)
    unpack = unpack_for(format.name, parts, format.bits, q.device)
    constexprs = sizes_for(group, dims, parts, matrix_units) | {
        "PARTS": parts,
        "PER_ROW": format.scales_per_row,
        "UNIT": codes.UNITS.get(unpack, 1.0),
        "UNPACK": unpack,
        "NUMBER": number_of(q.dtype),
        "num_warps": warps_for(group, max(dims)),
        "maxnreg": registers,
    }
    return constexprs, per_sm


def words_and_tiles(
    format: RowFormat, q: Tensor, k_codes: Tensor, v_codes: Tensor
) -> tuple[tuple[Tensor, Tensor], dict, int]:
    """Codes of K and V in the same words, and `launched_with` for them. q: [B, Hq, D]; codes as in
    `quantized_decode`.
    """
    words = as_words(k_codes), as_words(v_codes)
    if words[0].dtype != words[1].dtype:
        words = k_codes, v_codes
    dims = q.shape[2], v_codes.shape[3] * 8 // format.bits
    parts = words[0].itemsize * 8 // format.bits
    return words, *launched_with(format, q, q.shape[1] // k_codes.shape[2], dims, parts)


def items_for(
    batch: Batch,
    format: RowFormat,
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    window: int | None,
) -> WorkItems | None:
    """Lesson 12's `items_of_step` for this kernel's tiles. q: [B, Hq, D]; codes as in
    `quantized_decode`.
    """
    _, constexprs, per_sm = words_and_tiles(format, q, k_codes, v_codes)
    return items_of_step(batch, k_codes.shape[2], constexprs["BLOCK_N"], window, per_sm)


def launch_codes(
    format: RowFormat,
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    items: WorkItems | None = None,
) -> Tensor:
    """`quantized_decode` without its checks. q: [B, Hq, D] -> [B, Hq, Dv]."""
    (_, num_heads, head_dim), num_kv_heads = q.shape, k_codes.shape[2]
    v_head_dim, group = v_codes.shape[3] * 8 // format.bits, num_heads // num_kv_heads
    words, constexprs, per_sm = words_and_tiles(format, q, k_codes, v_codes)
    scales = in_whole_words(k_scales, v_scales)
    if items is None:
        how = window, num_splits, split_size, max_context_len
        num_splits = splits_for(q, k_codes, block_table, constexprs["BLOCK_N"], *how, per_sm=per_sm)
    partial_out, partial_lse = room_for(q, num_splits, v_head_dim, items)
    if partial_out.numel():
        codes_decode_kernel[num_kv_heads, partial_out.shape[2], len(partial_out)](
            q,
            *words,
            partial_out,
            partial_lse,
            None if items is None else items.items,
            context_lens,
            block_table,
            *scales,
            (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
            NO_WINDOW if window is None else window,
            split_size or 0,
            *q.stride()[:2],
            *words[0].stride()[:3],
            *words[1].stride()[:3],
            block_table.stride(0),
            scales[0].stride(2),
            GROUP=group,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            PAGE_SIZE=k_codes.shape[1],
            SEES=causal if window is None else in_window,
            SPLIT_OF=equal_split if items is None else listed_split,
            **constexprs,
        )
    return merged(partial_out, partial_lse, items, q.dtype)[0]
