"""Launches the kernels of optimized.cu: `paged_decode` in CUDA C++, for reading beside
decode_kernel. On CPU tensors `lessons.toolbox.gpu` runs them.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lessons.l05_gqa.optimized import LOG2_E
from lessons.l10_flash_decoding.optimized import combine
from lessons.l12_paged_kv.kernels.arguments import check_decode
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW
from lessons.l12_paged_kv.kernels.launch import empty_partials, splits_for
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

SOURCE = Path(__file__).parents[1] / "optimized.cu"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
THREADS, HEADS, KEYS = 128, 4, 2  # as in optimized.cu
LOAD_BYTES = 16  # what a lane loads at once
DECODE = {
    (dtype, head_dim): CudaKernel(SOURCE, f"paged_decode_{name}_{head_dim}")
    for dtype, name in TYPES.items()
    for head_dim in (64, 128)
}


def paged_decode_cuda(
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
) -> Tensor:
    """As `paged_decode`, with q: [B, Hq, D], D 64 or 128 for K and V alike -> [B, Hq, D].

    Raises ValueError, and CompileError where NVRTC is missing.
    """
    check_decode(q, k_cache, v_cache, block_table, context_lens, window)
    check_rows(q, k_cache, v_cache)
    (num_sequences, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    teams = THREADS * LOAD_BYTES // (head_dim * q.element_size())
    num_splits = splits_for(
        q, k_cache, block_table, KEYS * teams, window, num_splits, split_size, max_context_len
    )
    partial_out, partial_lse = empty_partials(q, num_splits, head_dim, torch.float32)
    group = num_heads // num_kv_heads
    if partial_out.numel():
        grid = num_kv_heads * -(-group // HEADS), num_splits, num_sequences
        DECODE[q.dtype, head_dim][grid, THREADS](
            q,
            k_cache,
            v_cache,
            partial_out,
            partial_lse,
            context_lens.int(),
            block_table,
            float((head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E),
            np.int32(NO_WINDOW if window is None else min(window, NO_WINDOW)),
            np.int32(split_size or 0),
            np.int32(k_cache.shape[1]),
            np.int32(group),
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_table.stride(0),
        )
    return combine(partial_out, partial_lse, q.dtype)[0]


def check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError unless every row, [D] each, has a kernel and starts at a multiple of 16
    bytes, because a lane loads 16 bytes at once.
    """
    sizes = q.shape[-1], v_cache.shape[-1]
    if sizes not in ((64, 64), (128, 128)):
        raise ValueError(f"q, v_cache: got head sizes {sizes}; accepted: 64 or 128 for both")
    for name, x in dict(q=q, k_cache=k_cache, v_cache=v_cache).items():
        strides = [stride * x.element_size() for stride in x.stride()[:-1]]
        if any(place % LOAD_BYTES for place in (x.data_ptr(), *strides)):
            raise ValueError(
                f"{name}: got strides of {strides} bytes from address {x.data_ptr()}; accepted: "
                f"multiples of {LOAD_BYTES}"
            )
