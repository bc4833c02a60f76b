"""The launch of the Gluon kernel: lesson 12's paged_mla_decode for a Hopper GPU."""

from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l10_flash_decoding.splits import WorkItems, plan_splits, sms_of
from lessons.l12_paged_kv.kernels.arguments import check_paged_latents
from lessons.l12_paged_kv.kernels.hopper.gluon_mla import (
    BLOCK_H,
    BLOCK_N,
    NUM_WARPS,
    STAGES,
    gl,
    paged_mla_hopper_kernel,
)
from lessons.l12_paged_kv.kernels.launch import merged, room_for
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.triton_ import triton

LOG2_E = 1.4426950408889634
RANKS = (128, 256, 512)
SMALL_PAGES = (
    8,
    16,
    32,
)  # that divide a tile; eight rows are what the copy engine swizzles at once


def check_hopper(q: Tensor, latents: Tensor, rank: int, split_size: int | None) -> None:
    """Raise ValueError for what the Triton kernel takes and this one does not. Shapes as in
    `paged_mla_hopper`.
    """
    if q.dtype != torch.bfloat16 or rank not in RANKS or q.shape[2] != rank + 64:
        raise ValueError(
            f"q, kv_lora_rank: got {q.dtype} {tuple(q.shape)} and {rank}; accepted: bfloat16, rank "
            f"{', '.join(map(str, RANKS))}, and 64 rotary values"
        )
    page_size = latents.shape[1]
    if page_size not in SMALL_PAGES and page_size % BLOCK_N:
        raise ValueError(
            f"latents: got blocks of {page_size} tokens; accepted: 8, 16, 32 or a multiple of 64"
        )
    # The copy engine sees both as a matrix whose rows begin at multiples of 16 bytes.
    for name, x in (("q", q), ("latents", latents)):
        step = x.stride(1)
        if x.stride() != (x.shape[1] * step, step, 1) or step % 8 or x.data_ptr() % 16:
            raise ValueError(
                f"{name}: got strides {x.stride()} for {tuple(x.shape)}; accepted: rows at one "
                "distance, a multiple of 8 values"
            )
    if split_size is not None and split_size % BLOCK_N:
        raise ValueError(f"split_size: got {split_size}; accepted: None, or a multiple of 64 keys")
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
        raise ValueError(f"q: got {q.device}; accepted: a GPU of compute capability 9.0, a CPU")


def tiles_of(x: Tensor, rows: int, columns: int):
    """A TMA descriptor with tiles of [rows, columns]. x: [T, D] bfloat16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # of a whole tile in shared memory, which small pages fill in pieces
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_N, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def paged_mla_hopper(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    num_splits: int | None = None,
    split_size: int | None = None,
    max_context_len: int | None = None,
    items: WorkItems | None = None,
) -> Tensor:
    """`paged_mla_decode`, on a Hopper GPU or on a CPU that runs its code. q: [B, H, rank + 64];
    latents: [num_blocks, block_size, rank + 64] -> [B, H, rank].

    bfloat16, rows at one distance, block_size 8, 16, 32 or a multiple of 64. split_size and the
    list's bounds are multiples of 64 keys. Raises ValueError.
    """
    check_paged_latents(
        q,
        latents,
        block_table,
        context_lens,
        kv_lora_rank,
        (num_splits, split_size, max_context_len),
        items,
    )
    check_hopper(q, latents, kv_lora_rank, split_size)
    num_sequences, num_heads, dim = q.shape
    head_blocks, page_size = triton.cdiv(num_heads, BLOCK_H), latents.shape[1]
    if items is None:
        longest = block_table.shape[1] * page_size if max_context_len is None else max_context_len
        slots, programs = sms_of(q.device), num_sequences * head_blocks
        num_splits = plan_splits(programs, longest, BLOCK_N, slots, num_splits, split_size)
    partial_out, partial_lse = room_for(q, num_splits, kv_lora_rank, items)
    if partial_out.numel():
        half, rope, piece = kv_lora_rank // 2, dim - kv_lora_rank, min(page_size, BLOCK_N)
        queries, rows = q.flatten(0, 1), latents.flatten(0, 1)
        with nullcontext() if q.is_cuda else on_the_machine(90):
            paged_mla_hopper_kernel[head_blocks, partial_out.shape[2], len(partial_out)](
                tiles_of(queries, BLOCK_H, half),
                tiles_of(queries, BLOCK_H, rope),
                tiles_of(rows, piece, half),
                tiles_of(rows, piece, rope),
                partial_out,
                partial_lse,
                context_lens if items is None else items.items,
                context_lens,
                block_table,
                softmax_scale * LOG2_E,
                num_heads,
                split_size or 0,
                block_table.stride(0),
                len(rows),
                PAGE_SIZE=page_size,
                LISTED=items is not None,
                STAGES=STAGES,
                BLOCK_N=BLOCK_N,
                num_warps=NUM_WARPS,
            )
    return merged(partial_out, partial_lse, items, q.dtype)[0]
