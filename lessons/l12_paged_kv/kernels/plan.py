"""Decode by lesson 10's list of splits by length: the list, made once a step, and the merge, which
reads each sequence's own range of partial results.

Sources: Ye et al. 2025, FlashInfer, section 3.3; FlashAttention-3,
hopper/flash_prepare_scheduler.cu and flash_fwd_combine_kernel.h.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l08_online_softmax.partials import STAGES, merge_warps, online_values
from lessons.l10_flash_decoding.optimized import BLOCK_S
from lessons.l10_flash_decoding.splits import PROGRAMS_PER_SM, WorkItems, sms_of, work_items
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def combine_ranges_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    num_places,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program per query head and sequence: lesson 10's combine_kernel over the places of the
    sequence alone. No place: 0 and −inf.
    """
    head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    out, lse = online_values(
        partial_lse_ptr + head * num_places,
        1,
        partial_out_ptr + head * num_places * HEAD_DIM,
        HEAD_DIM,
        tl.load(starts_ptr + sequence),
        tl.load(starts_ptr + sequence + 1),
        HEAD_DIM,
        BLOCK_D,
        BLOCK_S,
        NUM_STAGES,
    )
    row, column = sequence * tl.num_programs(0) + head, tl.arange(0, BLOCK_D)
    tl.store(
        out_ptr + row * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM
    )
    tl.store(lse_ptr + row, lse)


def combine_ranges(
    partial_out: Tensor, partial_lse: Tensor, starts: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The partial results of each sequence merged. partial_out: [Hq, I, D], partial_lse: [Hq, I],
    float32; starts: [B + 1] int32 -> out: [B, Hq, D] of dtype, lse: [B, Hq].
    """
    (num_heads, num_places, head_dim), num_sequences = partial_out.shape, len(starts) - 1
    out = torch.empty(num_sequences, num_heads, head_dim, dtype=dtype, device=partial_out.device)
    lse = torch.empty(num_sequences, num_heads, dtype=torch.float32, device=partial_out.device)
    combine_ranges_kernel[num_heads, num_sequences](
        partial_out,
        partial_lse,
        starts,
        out,
        lse,
        num_places,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_S=BLOCK_S,
        NUM_STAGES=STAGES,
        num_warps=merge_warps(triton.next_power_of_2(head_dim)),
    )
    return out, lse


def items_of_step(
    batch: Batch, num_kv_heads: int, block_n: int, window: int | None, per_sm: int = PROGRAMS_PER_SM
) -> WorkItems | None:
    """The list of this step's splits, or None where the same number for all is as good. Made by the
    first layer that asks, because all layers with one window share it. block_n: keys of a tile;
    per_sm: programs that an SM holds.
    """
    if batch.plans is None:
        return None
    key = num_kv_heads, block_n, window, per_sm
    if key not in batch.plans:
        slots = sms_of(batch.context_lens.device) * per_sm
        batch.plans[key] = work_items(batch.context_lens, num_kv_heads, slots, block_n, window)
    return batch.plans[key]
