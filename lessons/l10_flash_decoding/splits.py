"""Host arithmetic of split-KV decoding: where each split begins and ends, and how many splits to
launch. No tensors.

The kernel computes the same bounds from each sequence's own length; `split_bounds` is their
definition.

Source of the heuristic: FlashAttention, `num_splits_heuristic` (csrc/flash_attn/flash_api.cpp; Dao
et al. 2023, Flash-Decoding).
"""

from functools import cache
from itertools import pairwise

import torch

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


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)
