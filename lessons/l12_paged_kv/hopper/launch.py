"""The launch of the Gluon kernel: paged_mla_decode of lesson 12 for Hopper."""

from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l10_flash_decoding.splits import WorkItems, plan_splits, sms_of
from lessons.l12_paged_kv.hopper.gluon_mla import (
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


def tiles_of(x: Tensor, rows: int, columns: int):
    """A TMA descriptor with tiles of [rows, columns]. x: [T, D] bfloat16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tile = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for([64, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, tile, layout)


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
):
    num_sequences, num_heads, dim = q.shape
    page_size = latents.shape[1]
    capacity = block_table.shape[1] * page_size
    head_blocks = triton.cdiv(num_heads, BLOCK_H)
    if items is None:
        longest = capacity if max_context_len is None else max_context_len
        programs = num_sequences * head_blocks
        num_splits = plan_splits(programs, longest, BLOCK_N, sms_of(q.device), num_splits, split_size)
    partial_out, partial_lse = room_for(q, num_splits, kv_lora_rank, items)
    if partial_out.numel():
        half, piece = kv_lora_rank // 2, min(page_size, BLOCK_N)
        queries, rows = q.flatten(0, 1), latents.flatten(0, 1)
        with nullcontext() if q.is_cuda else on_the_machine(90):
            paged_mla_hopper_kernel[head_blocks, partial_out.shape[2], len(partial_out)](
                tiles_of(queries, BLOCK_H, half),
                tiles_of(queries, BLOCK_H, dim - kv_lora_rank),
                tiles_of(rows, piece, half),
                tiles_of(rows, piece, dim - kv_lora_rank),
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
