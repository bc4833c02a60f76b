"""Optimized: codes are read where they are stored. A decode step multiplies them as they are, by
the kernel of kernels/decode.py; in prompts they become numbers in registers.

For prompts the kernel is lesson 12's, with the hooks of hooks.py in the place of `plain_load`. Read
`quantized_decode` beside lesson 12's `paged_decode`: the arguments are the same, and two tensors of
scales come along. `quantize_kernel` writes: one program finds the scale of a row and stores its
codes.

Sources: the formats, as vLLM's vllm/v1/attention/ops/triton_reshape_and_cache_flash.py writes them;
attention over pages: lesson 12.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l09_flash_attention.tiles import Tiles, chip_of, has_e4m3
from lessons.l10_flash_decoding.splits import WorkItems
from lessons.l12_paged_kv.kernels.arguments import (
    check_decode,
    check_items,
    check_places,
    check_prefill,
)
from lessons.l12_paged_kv.kernels.launch import Stored, launch_prefill
from lessons.l19_kv_quantization.formats import RowFormat
from lessons.l19_kv_quantization.kernels.arguments import check_codes
from lessons.l19_kv_quantization.kernels.hooks import (
    e4m3_bits_load,
    int4_any_load,
    int4_load,
    scaled_load,
)
from lessons.l19_kv_quantization.kernels.launch import launch_codes
from lessons.toolbox.kernels.triton_ import tl, triton

# ---------------------------------------------------------------- reading


def stored(
    format: RowFormat, k_codes: Tensor, v_codes: Tensor, k_scales: Tensor, v_scales: Tensor
) -> tuple[Tensor, Tensor, Stored]:
    """Codes as the kernel's hook reads them, and where it finds the scales. Shapes as in
    `quantized_decode`.
    """
    v_head_dim = v_codes.shape[-1] * 8 // format.bits
    load = scaled_load
    if format.name == "fp8" and has_e4m3(k_codes.device):
        k_codes, v_codes = (x.view(torch.float8_e4m3fn) for x in (k_codes, v_codes))
    elif format.name == "fp8":
        load = e4m3_bits_load
    elif format.name == "int8":
        k_codes, v_codes = (x.view(torch.int8) for x in (k_codes, v_codes))
    else:
        heads = k_codes.shape[-1] * 2, v_head_dim
        are_whole = all(d >= 16 and d & (d - 1) == 0 for d in heads)
        load = int4_load if are_whole else int4_any_load
    stride_sh = k_scales.stride(-2)  # from one head's scales to the next one's
    return k_codes, v_codes, Stored(load, load, k_scales, v_scales, stride_sh, v_head_dim)


def quantized_decode(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    format: RowFormat,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    items: WorkItems | None = None,
) -> Tensor:
    """One query per sequence over its blocks of codes. q: [B, Hq, D] -> [B, Hq, Dv].

    k_codes, v_codes: [num_blocks, block_size, Hkv, bytes of a row] uint8; k_scales, v_scales:
    [num_blocks, block_size, Hkv, scales of a row] in q's dtype, the slots of a head side by side in
    memory. The rest as in lesson 12's `paged_decode`. Raises ValueError.
    """
    plain = check_codes(format, q, k_codes, v_codes, k_scales, v_scales)
    check_decode(q, *plain, block_table, context_lens, window)
    if items is not None:
        check_items(items, context_lens, num_splits, split_size)
    check_places(block_table, context_lens, *k_codes.shape[:2])
    check_one_device(q=q, k_codes=k_codes, v_codes=v_codes)
    pages = k_codes, v_codes, k_scales, v_scales, block_table
    options = softmax_scale, window, num_splits, split_size, max_context_len, items
    return launch_codes(format, q, *pages, context_lens, *options)


def quantized_prefill(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    format: RowFormat,
    softmax_scale: float | None = None,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """The newest tokens of each sequence over all of it. q: [T, Hq, D] -> [T, Hq, Dv];
    cu_seqlens_q, max_seqlen_q and tiles as in lesson 12's `paged_prefill`, the rest as in
    `quantized_decode`.
    """
    plain = check_codes(format, q, k_codes, v_codes, k_scales, v_scales)
    check_prefill(q, *plain, block_table, cu_seqlens_q, context_lens, window)
    check_places(block_table, context_lens, *k_codes.shape[:2])
    check_one_device(q=q, k_codes=k_codes, v_codes=v_codes)
    *caches, how = stored(format, k_codes, v_codes, k_scales, v_scales)
    options = softmax_scale, window, max_seqlen_q, tiles
    return launch_prefill(q, *caches, block_table, cu_seqlens_q, context_lens, *options, stored=how)


# ---------------------------------------------------------------- writing


@triton.jit
def smaller(a, b):
    """The minimum of two numbers; a NaN stays one, so that tl.reduce finds it in a row."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(a, b):
    """The maximum of two numbers; a NaN stays one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    slot_mapping_ptr,
    stride_xt,
    stride_xh,
    stride_slot,
    stride_head,
    stride_ss,
    stride_sh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """One program per token and KV head: load the row, find its scale, store its codes.

    LARGEST: the code of the row's largest number.
    """
    # int64, because token · stride and head · stride may pass 2^31
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:  # −1 marks a token that is not kept
        column = tl.arange(0, BLOCK_D)
        inside = column < HEAD_DIM
        x = tl.load(x_ptr + token * stride_xt + head * stride_xh + column, mask=inside, other=0.0)
        x = x.to(tl.float32)
        scales_ptr += slot * stride_ss + head * stride_sh
        codes_ptr += slot * stride_slot + head * stride_head
        if IS_INT4:
            low = tl.reduce(tl.where(inside, x, float("inf")), 0, smaller)
            span = tl.reduce(tl.where(inside, x, float("-inf")), 0, larger) - low
            tl.store(scales_ptr + 1, low.to(scales_ptr.dtype.element_ty))
        else:
            low, span = 0.0, tl.reduce(tl.abs(x), 0, larger)
        scale = tl.div_rn(span, LARGEST).to(scales_ptr.dtype.element_ty)
        scale = tl.where(scale == 0.0, 1.0, scale).to(scales_ptr.dtype.element_ty)
        tl.store(scales_ptr, scale)
        ratio = tl.div_rn(x - low, tl.zeros_like(x) + scale.to(tl.float32))
        if IS_FLOAT:
            # A NaN stays one: plain minimum and maximum would turn it into a number.
            ratio = smaller(larger(ratio, -LARGEST), LARGEST)
            tl.store(codes_ptr + column, ratio.to(codes_ptr.dtype.element_ty), mask=inside)
        else:
            # 1.5 · 2^23 leaves no bits for fractions, so adding it rounds to the nearest even.
            whole = (ratio + 12582912.0) - 12582912.0
            whole = tl.where(whole == whole, whole, 0.0)  # because integers have no NaN
            if IS_INT4:
                codes = tl.minimum(tl.maximum(whole, 0.0), LARGEST).to(tl.int32)
                low_half, high_half = tl.split(tl.reshape(codes, (BLOCK_D // 2, 2)))
                byte = tl.arange(0, BLOCK_D // 2)
                packed = (low_half | (high_half << 4)).to(tl.uint8)
                tl.store(codes_ptr + byte, packed, mask=byte < HEAD_DIM // 2)
            else:
                codes = tl.minimum(tl.maximum(whole, -LARGEST), LARGEST).to(tl.int8)
                tl.store(codes_ptr + column, codes, mask=inside)


LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}


def writes_e4m3(device: torch.device) -> bool:
    """Whether `quantize_kernel` rounds to E4M3 as PyTorch does: from sm_90 on, and in the
    interpreter. For sm_89 Triton 3.7 first cuts float32 to float16, so a number just above the
    middle between two codes is taken for the middle, and goes to the even one.
    """
    chip = chip_of(device)
    return chip is None or chip >= 90


def quantize_rows(
    format: RowFormat, x: Tensor, codes: Tensor, scales: Tensor, slot_mapping: Tensor
) -> None:
    """x: [T, Hkv, D] into the slots slot_mapping: [T] int64 of codes: [slots, Hkv, bytes] and
    scales: [slots, Hkv, scales of a row]; −1 skips a token. Bit for bit what `format.quantize`
    gives; with fp8 only where `writes_e4m3`.
    """
    (num_tokens, num_heads, head_dim), name = x.shape, format.name
    if name == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    elif name == "int8":
        codes = codes.view(torch.int8)
    if x.numel():
        block_d = triton.next_power_of_2(max(head_dim, 16))
        quantize_kernel[num_tokens, num_heads](
            x,
            codes,
            scales,
            slot_mapping,
            *x.stride()[:2],
            *codes.stride()[:2],
            *scales.stride()[:2],
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            LARGEST=LARGEST[name],
            IS_INT4=name == "int4",
            IS_FLOAT=name == "fp8",
            num_warps=min(8, max(1, block_d // 1024)),
        )
