"""The k highest scores of a long row, exactly: a threshold found bit by bit, then the keys above it
in order.

No row is sorted. Floats that are read as integers compare as the numbers do, once the bits of
negative ones are turned round. So the k-th highest score can be found from its highest bits down:
one pass counts the scores by their first 8 bits and sees in which of 256 bins the k-th is, the next
pass counts the next 8 bits within that bin, and after four passes all 32 bits of the threshold are
known. A fifth pass writes the positions of all scores above it, and as many that equal it as are
still wanted, from the left.

The sum of a tile's flags up to a place (a cumulative sum) says where it writes, so positions come
out in ascending order and the result is the same in every run.

A row has one program, so little else hides its waiting. Tiles are large, because each ends with
barriers. The scores of the next tile are loaded before those of this one are counted.

Source of the idea: Alabi et al. 2012, Fast k-selection algorithms for graphics processing units
(radix select).
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device, check_values
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.arguments import check_whole

BLOCK = 4096  # scores of a tile
NUM_WARPS = 8


@triton.jit
def as_integers(scores):
    """Integers that compare, as unsigned ones, as the scores do: [BLOCK] float32 -> uint32.

    0 for -inf, which is never chosen; the highest of all for NaN; the same for -0.0 and 0.0.
    """
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    # All bits of a negative number are turned round, of others only the sign.
    order = bits ^ ((bits >> 31) | -2147483648)
    order = tl.where(scores == float("-inf"), 0, order)
    order = tl.where(scores != scores, -1, order)
    return order.to(tl.uint32, bitcast=True)


@triton.jit
def load_scores(row_ptr, start, length, BLOCK: tl.constexpr):
    """A tile of scores: [BLOCK] float32, -inf, which is never chosen, after the row's end."""
    key = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + key, mask=key < length, other=float("-inf"))


@triton.jit
def threshold_of(row_ptr, length, wanted, BLOCK: tl.constexpr):
    """The integer of the lowest score that is chosen, and how many of those that equal it are.

    Fewer than `wanted` keys that are there: all of them are chosen.
    """
    threshold = tl.zeros((), tl.uint32)
    digit = tl.arange(0, 256)
    scores = load_scores(row_ptr, 0, length, BLOCK)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, length, BLOCK):
            order = as_integers(scores)
            # After the last tile comes the first again, for the next pass.
            following = tl.where(start + BLOCK < length, start + BLOCK, 0)
            scores = load_scores(row_ptr, following, length, BLOCK)
            # In two shifts, because one of 32 places is not defined.
            same = (order >> shift >> 8) == (threshold >> shift >> 8)
            own = ((order >> shift) & 255).to(tl.int32)
            counts += tl.histogram(own, 256, mask=same & (order != 0))
        if step == 0:
            wanted = tl.minimum(wanted, tl.sum(counts))
        above = tl.sum(counts) - tl.cumsum(counts, axis=0)
        is_it = (above < wanted) & (above + counts >= wanted)
        found = tl.sum(tl.where(is_it, digit, 0))
        wanted -= tl.sum(tl.where(is_it, above, 0))
        threshold = threshold | (found.to(tl.uint32) << shift)
    return threshold, wanted


@triton.jit
def top_k_kernel(
    scores_ptr,
    out_ptr,
    lengths_ptr,
    width,
    k,
    stride_row,
    BLOCK: tl.constexpr,
):
    """One program per row. out: [T, k] int32, dense. lengths_ptr: None: all rows are full."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * stride_row
    out_row = out_ptr + row * k
    length = width
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + row).to(tl.int32)
    threshold, ties = threshold_of(row_ptr, length, k, BLOCK)

    step = tl.arange(0, BLOCK)
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        order = as_integers(load_scores(row_ptr, start, length, BLOCK))
        is_above = order > threshold
        is_equal = (order == threshold) & (order != 0)
        # Both are counted by one sum: a tile has fewer than 2^15 scores, so the lower half of an
        # integer has room for those above, and the upper half for the equal ones.
        flags = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(flags, axis=0) - flags
        equal_before = equal + (before >> 16)
        place = above + (before & 0xFFFF) + tl.minimum(equal_before, ties)
        is_taken = is_above | (is_equal & (equal_before < ties))
        # place < k holds for right counts; a wrong one must not write into another row.
        tl.store(out_row + place, start + step, mask=is_taken & (place < k))
        both = tl.sum(flags)
        above += both & 0xFFFF
        equal += both >> 16
    taken = above + tl.minimum(equal, ties)
    for start in range(0, k, BLOCK):
        place = start + step
        tl.store(out_row + place, -1, mask=(place >= taken) & (place < k))


def top_k(scores: Tensor, k: int, lengths: Tensor | None = None) -> Tensor:
    """As naive.py's `top_k`. scores: [T, N] float32 -> [T, k] int32, ascending, then -1.

    lengths: [T] int32 or int64, keys of each row; what follows them is not read. Raises ValueError.
    """
    check_whole(k=k)
    if scores.ndim != 2 or scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise ValueError(
            f"scores: got {scores.dtype} {tuple(scores.shape)} with strides {scores.stride()}; "
            "accepted: float32 [T, N], dense rows"
        )
    rows, width = scores.shape
    if lengths is not None:
        if (
            lengths.shape != (rows,)
            or lengths.dtype not in (torch.int32, torch.int64)
            or not lengths.is_contiguous()
        ):
            raise ValueError(
                f"lengths: got {lengths.dtype} {tuple(lengths.shape)}; accepted: int32 or int64 "
                f"[{rows}], dense"
            )
        check_one_device(scores=scores, lengths=lengths)
        check_values(0, width, lengths=lengths)
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if rows:
        top_k_kernel[rows,](
            scores,
            out,
            lengths,
            width,
            k,
            scores.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out
