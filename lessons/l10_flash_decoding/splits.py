"""The arithmetic of split-KV decoding: where each split begins and ends, and how many splits to
launch.

Two plans. The same number of splits for all sequences (`choose_num_splits`): the kernel computes
the bounds from each sequence's own length, and `split_bounds` is their definition. Or splits by
length (`bounds_by_length`), for a batch in which one sequence is much longer than the others: then
the programs of a launch are a list, `work_items`. Lesson 12's decode reads it.

Sources of the heuristics: FlashAttention, `num_splits_heuristic` (csrc/flash_attn/flash_api.cpp;
Dao et al. 2023, Flash-Decoding), and FlashAttention-3, `prepare_varlen_num_blocks`
(hopper/flash_prepare_scheduler.cu).
"""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.toolbox.measure.hardware import CHIPS

# as FlashAttention-2 counts them. The split kernel's buffers take 70 KiB of shared memory, of 163
# in an A100's SM, 227 in an H200's and 99 in an RTX 4090's, which holds one program only.
PROGRAMS_PER_SM = 2
ALMOST_FULL = 0.8  # share of the slots from which on splitting cannot win what the partials cost
GOOD_ENOUGH = 0.85  # of the best efficiency: fewer splits, fewer partials
# eight tiles of the combine kernel; beyond, its one program per head takes longer than it saves
MAX_SPLITS = 128


def split_bounds(
    context_len: int,
    num_splits: int,
    split_size: int = 0,
    window: int | None = None,
    block_n: int = 1,
) -> list[tuple[int, int]]:
    """[(start, end)] of each split's keys; empty splits, start = end = context_len, come last.

    num_splits: how many splits there are room for. Each has split_size keys, if so many of that
    size hold all keys: then nothing but the sequence's own length decides. Otherwise equal shares,
    in whole tiles of block_n. window: only the last `window` keys.
    """
    first = 0 if window is None else max(context_len - window, 0)
    # Whole tiles, because then only the last split of a sequence has a tile that is partly masked.
    share = cdiv(cdiv(context_len - first, num_splits), block_n) * block_n
    size = split_size if split_size * num_splits >= context_len - first else share
    edges = [min(first + split * size, context_len) for split in range(num_splits + 1)]
    return list(pairwise(edges))


@cache  # because every layer of a step asks with the same numbers
def choose_num_splits(
    num_programs: int, num_tiles: int, num_slots: int, max_splits: int = MAX_SPLITS
) -> int:
    """How many splits each of `num_programs` (sequences · KV heads) is cut into, so that the
    machine's slots are busy.

    num_tiles: tiles of keys in the longest sequence. num_slots: programs that run at the same time,
    SMs · PROGRAMS_PER_SM.
    """
    if not num_programs or num_programs >= ALMOST_FULL * num_slots:
        # because nearly all slots have work (or there is none), and every further split costs
        # partials
        return 1
    # because a split needs a tile, and one more wave wins nothing
    most = max(1, min(max_splits, num_slots, num_tiles))
    efficiency = {
        splits: wave_efficiency(num_programs * splits, num_slots)
        for splits in range(1, most + 1)
        # Because tiles are whole: 64 tiles in 11 splits are 6 each, in 12 they are 6
        # again, and one is empty.
        if splits == 1 or cdiv(num_tiles, splits) < cdiv(num_tiles, splits - 1)
    }
    enough = GOOD_ENOUGH * max(efficiency.values())
    # the fewest, because partials cost bytes
    return next(splits for splits, share in efficiency.items() if share >= enough)


def wave_efficiency(num_programs: int, num_slots: int) -> float:
    """The share of slots that have work, averaged over the waves: 264 programs on 264 slots 1.0,
    265 programs 0.502.
    """
    waves = num_programs / num_slots
    # because the last wave takes as long as a full one
    return waves / cdiv(num_programs, num_slots)


def plan_splits(
    num_programs: int,
    longest: int,
    block_n: int,
    num_slots: int,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> int:
    """How many splits to launch: num_splits if given, as many of split_size as the longest sequence
    needs, or by the machine.
    """
    if split_size is not None:
        return max(1, cdiv(longest, split_size))
    return num_splits or choose_num_splits(num_programs, cdiv(longest, block_n), num_slots)


# ---------------------------------------------------------------- splits by length


class WorkItems(NamedTuple):
    """The programs of a launch, for each KV head: I items of B sequences."""

    items: Tensor  # [I, 4] int32: sequence (−1: idle), first key, key after the last, place
    starts: Tensor  # [B + 1] int32: sequence b's partial results are at places starts[b] up to b+1


def pays_by_length(context_lens: list[int], num_kv_heads: int, num_slots: int) -> bool:
    """Whether lengths differ so much that splits by length are worth their merge. context_lens: of
    the B sequences; num_slots: programs that run at the same time.

    They are not if the mean is almost the longest: then equal splits are balanced. Nor if no
    sequence is longer than a slot's share: then none is cut.
    """
    shares = ALMOST_FULL * min(len(context_lens), num_slots / num_kv_heads)
    return sum(context_lens) < max(context_lens, default=0) * shares


def bounds_by_length(
    context_lens: list[int],
    num_kv_heads: int,
    num_slots: int,
    block_n: int = 1,
    window: int | None = None,
) -> list[list[tuple[int, int]]]:
    """[(start, end)] of each sequence's splits, none of them empty. No split is longer than an
    equal share of all tiles of keys, so a long sequence is cut and a short one is not.
    """
    first = [0 if window is None else max(n - window, 0) // block_n * block_n for n in context_lens]
    tiles = [cdiv(n - start, block_n) for n, start in zip(context_lens, first)]
    share = max(1, cdiv(sum(tiles), shares_of(num_kv_heads, num_slots)))
    bounds = []
    for n, start, count in zip(context_lens, first, tiles):
        cut = split_bounds(n, max(1, cdiv(count, share)), 0, n - start, block_n)
        bounds.append([(begin, end) for begin, end in cut if begin < end])
    return bounds


def shares_of(num_kv_heads: int, num_slots: int) -> int:
    """Into how many shares the tiles of a KV head are cut: almost as many as it has slots, because
    sequences that are a little longer than a share need no merge then.
    """
    return max(1, int(ALMOST_FULL * num_slots / num_kv_heads))


def work_items(
    context_lens: Tensor, num_kv_heads: int, num_slots: int, block_n: int, window: int | None = None
) -> WorkItems:
    """`bounds_by_length` as a list for a launch, the longest first. context_lens: [B], B at least
    1, on any device. The list is made there and the host reads no value, so a CUDA graph can hold
    it. It has room for the most items that B lengths can give; what is left of it is idle.
    """
    length = context_lens.long()
    num_sequences, device = len(length), length.device
    # Tiles begin at multiples of block_n, so that none cuts a page of that size in two.
    first = torch.zeros_like(length) if window is None else (length - window).clamp(min=0)
    first = first // block_n * block_n
    tiles, shares = cdiv(length - first, block_n), shares_of(num_kv_heads, num_slots)
    share = cdiv(tiles.sum(), shares).clamp(min=1)
    # Twice: 64 tiles in 12 splits are 6 each, and 11 splits hold them. 0 splits hold no key.
    size = cdiv(tiles, cdiv(tiles, share).clamp(min=1)).clamp(min=1)
    splits = cdiv(tiles, size)
    starts = torch.cat([splits.new_zeros(1), splits.cumsum(0)])

    # Enough, because t tiles are less than t / share + 1 splits, and all tiles are `shares` shares.
    place = torch.arange(num_sequences + shares, device=device)
    sequence = torch.searchsorted(starts[1:], place, right=True)
    is_idle = sequence == num_sequences
    owner = sequence.clamp(max=num_sequences - 1)
    begin = first[owner] + (place - starts[owner]) * size[owner] * block_n
    end = torch.minimum(begin + size[owner] * block_n, length[owner])
    items = torch.stack([owner.masked_fill(is_idle, -1), begin, end, place], dim=1)
    # The longest first, because what starts last should end soon; idle items last.
    order = (end - begin).masked_fill(is_idle, -1).argsort(descending=True)
    return WorkItems(items[order].int(), starts.int())


# ---------------------------------------------------------------- the machine


@cache
def sms_of(device: torch.device | str) -> int:
    """Streaming multiprocessors. On a CPU those of an H200, so that the interpreter splits as it
    would.
    """
    device = torch.device(device)
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else CHIPS["h200"].sm_count
    )


def cdiv(x, y):
    """x / y, rounded up: ints, or tensors of them."""
    return -(-x // y)
