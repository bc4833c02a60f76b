"""Optimized: FP8 attention of prompts over pages of codes, the wrapper of kernel.py.

Read `fp8_prefill` beside optimized.py's `quantized_prefill`, which makes 16-bit numbers of codes
and multiplies those.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l05_gqa.optimized import LOG2_E
from lessons.l09_flash_attention.tiles import Tiles, capability, chip_of, has_e4m3
from lessons.l12_paged_kv.kernels.arguments import check_places, check_prefill
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW, causal, in_window
from lessons.l19_kv_quantization.activations.attention.kernel import fp8_prefill_kernel
from lessons.l19_kv_quantization.activations.attention.naive import FP8
from lessons.l19_kv_quantization.kernels.arguments import check_codes
from lessons.l19_kv_quantization.kernels.launch import in_whole_words
from lessons.toolbox.kernels.triton_ import triton

PLACES = 16  # keys that change places among themselves; pages hold a multiple of it
HEAD_DIMS = 32, 64, 128, 256
INTERPRETED = Tiles(32, 32)
# Compute capability -> {largest head size: tiles}, chosen by the compiler (no spills in a loop,
# shared memory within the chip's limit); for sm_90 also by the time model. None was timed.
OLDER = {64: Tiles(64, 64, 4, 5), 256: Tiles(64, 64, 8, 4)}  # 99 KiB of shared memory
CONFIGS = {89: OLDER, 90: {128: Tiles(128, 128, 8, 5), 256: Tiles(64, 64, 8, 4)}, 120: OLDER}


def products_tiles(chip: int | None, head_dim: int) -> Tiles:
    """For a chip as in lesson 9's `tiles_for`, and the larger of a head's sizes."""
    if chip is None:
        return INTERPRETED
    table = CONFIGS[max(known for known in CONFIGS if known <= max(chip, 89))]
    return table[min(size for size in table if size >= head_dim)]


def check_products(
    q: Tensor, k_codes: Tensor, v_codes: Tensor, softmax_scale: float | None, tiles: Tiles
) -> None:
    """Raise ValueError for what `check_codes` and `check_prefill` accept and this kernel does
    not.
    """
    sizes = q.shape[2], v_codes.shape[3]
    if not set(sizes) <= set(HEAD_DIMS):
        raise ValueError(
            f"q, v_codes: got head sizes {sizes[0]} and {sizes[1]}; accepted: "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    if k_codes.shape[1] % PLACES:
        raise ValueError(
            f"k_codes: got blocks of {k_codes.shape[1]} tokens; accepted: multiples of {PLACES}"
        )
    if softmax_scale is not None and not softmax_scale > 0:
        raise ValueError(f"softmax_scale: got {softmax_scale}; accepted: None, or above 0")
    blocks = tiles.block_m, tiles.block_n
    if any(size < 32 or size & (size - 1) for size in blocks):  # 8-bit products add 32 at a time
        raise ValueError(f"tiles: got blocks of {blocks}; accepted: powers of two from 32 on")
    if not has_e4m3(q.device):
        raise ValueError(
            f"q: got a GPU of compute capability {chip_of(q.device) / 10}; accepted: 8.9 or newer, "
            "because older ones have no 8-bit floating point"
        )


def fp8_prefill(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    max_seqlen_q: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """The newest tokens of each sequence over all of it, all products in E4M3. q: [T, Hq, D] -> [T,
    Hq, Dv].

    Codes and scales of format "fp8", and the rest, as in `quantized_prefill`. Head sizes of
    HEAD_DIMS, blocks of a multiple of PLACES tokens. Raises ValueError, also on a GPU older than
    compute capability 8.9.
    """
    plain = check_codes(FP8, q, k_codes, v_codes, k_scales, v_scales)
    check_prefill(q, *plain, block_table, cu_seqlens_q, context_lens, window)
    tiles = tiles or products_tiles(capability(q.device), max(q.shape[2], v_codes.shape[3]))
    check_products(q, k_codes, v_codes, softmax_scale, tiles)
    check_places(block_table, context_lens, *k_codes.shape[:2])
    check_one_device(q=q, k_codes=k_codes, v_codes=v_codes)
    (num_tokens, num_heads, head_dim), v_head_dim = q.shape, v_codes.shape[3]
    out = torch.empty(num_tokens, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max())
    scales = in_whole_words(k_scales, v_scales)
    fp8_prefill_kernel[num_heads, triton.cdiv(max_seqlen_q, tiles.block_m), len(context_lens)](
        q,
        k_codes.view(torch.float8_e4m3fn),
        v_codes,
        out,
        cu_seqlens_q,
        context_lens,
        block_table,
        *scales,
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        NO_WINDOW if window is None else window,
        *q.stride()[:2],
        *k_codes.stride()[:3],
        *v_codes.stride()[:3],
        block_table.stride(0),
        scales[0].stride(2),
        GROUP=num_heads // k_codes.shape[2],
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        PAGE_SIZE=k_codes.shape[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SEES=causal if window is None else in_window,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
