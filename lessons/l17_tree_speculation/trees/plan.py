"""Splits by length for trees: lesson 10's list of splits, and a place for what each new token finds
in each split of its sequence.

A decode step has one result for a split and query head. A tree has one for each of its nodes, and
trees have different numbers of them. So places are counted token after token: first those of the
first token, one for each split of its sequence, then those of the next. Lesson 12's merge then
takes a new token for a sequence.

Source: Ye et al. 2025, FlashInfer, section 3.3.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l10_flash_decoding.splits import (
    PROGRAMS_PER_SM,
    WorkItems,
    pays_by_length,
    sms_of,
    work_items,
)


def places_by_token(bounds: list[list[tuple[int, int]]], new: list[int]) -> list[range]:
    """The places of each new token, in order: as many as its sequence has splits. bounds: as
    lesson 10's `bounds_by_length` gives them; new: new tokens of each sequence.
    """
    places, first = [], 0
    for cut, count in zip(bounds, new):
        for _ in range(count):
            places.append(range(first, first + len(cut)))
            first += len(cut)
    return places


def reach_of(window: int | None, max_seqlen_q: int) -> int | None:
    """Keys from the last one back to the first that any of max_seqlen_q new tokens sees: the
    root's window begins so many keys before that of the last token.
    """
    return None if window is None else window + max_seqlen_q - 1


def tree_items(
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    num_tokens: int,
    num_programs: int,
    num_slots: int,
    block_n: int,
    reach: int | None,
) -> WorkItems:
    """The list of a launch. Items end with the number of the split in its sequence; starts:
    [T + 1], the places of each token are from its number up to the next.

    context_lens: [B], cu_seqlens_q: [B + 1] int32, on any device; num_tokens: T, of which those
    after the last sequence are padding and have no place; num_programs: that read a split; the
    rest as in `work_items`. The host reads no value, so a CUDA graph can hold it.
    """
    items, starts = work_items(context_lens, num_programs, num_slots, block_n, reach)
    owner = items[:, 0].clamp(min=0).long()
    numbered = torch.cat([items[:, :3], (items[:, 3] - starts[owner])[:, None]], dim=1)
    token = torch.arange(num_tokens, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], token, right=True)
    is_padding = sequence == len(context_lens)
    splits = starts.diff()[sequence.clamp(max=len(context_lens) - 1)].masked_fill(is_padding, 0)
    return WorkItems(numbered, torch.cat([starts[:1], splits.cumsum(0)]).int())


def items_of_step(
    batch: Batch, num_programs: int, block_n: int, window: int | None
) -> WorkItems | None:
    """The list of this step's trees, made by the first layer that asks; None if all sequences are
    cut into the same number of splits. num_programs: that read a split.
    """
    if batch.plans is None:
        return None
    reach = reach_of(window, batch.max_seqlen_q)
    key = "trees", num_programs, block_n, reach
    if key not in batch.plans:
        slots = sms_of(batch.context_lens.device) * PROGRAMS_PER_SM
        where = batch.context_lens, batch.cu_seqlens_q, int(batch.tree.shape[0])
        batch.plans[key] = tree_items(*where, num_programs, slots, block_n, reach)
    return batch.plans[key]


def pays(context_lens: list[int], num_programs: int, device: torch.device) -> bool:
    """Whether lengths differ so much that trees after them are worth a list."""
    return pays_by_length(context_lens, num_programs, sms_of(device) * PROGRAMS_PER_SM)
