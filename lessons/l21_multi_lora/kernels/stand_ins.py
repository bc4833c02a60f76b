"""What replaces the kernels on a CPU: two batched products for all adapters, in place of two
small ones for each.

A small product is slow on a CPU because it pays for its call, for picking its rows and for putting
them back. `torch.bmm` multiplies all segments in one call, if they are equally long. So shorter
ones are padded with copies of their own first row, and what comes out for those is thrown away.
Where one segment is much longer than the others (a prompt beside decoding rows) that would be
mostly padding. Then each segment is multiplied by itself, because such products are large enough.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels.weights import SlotWeights
from lessons.l21_multi_lora.optimized import check_add_lora

MOST_PADDING = 2  # rows with padding over rows without


def add_lora(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> Tensor:
    """As naive.add_lora: out: [T, N] += the correction of each row of x: [T, K]; returns out."""
    if x.dtype in DECODE_DTYPES:
        check_add_lora(out, x, weights, batch)
    segments = batch.segments
    if not segments:
        return out
    longest = max(segment.count for segment in segments)
    padded_rows = longest * len(segments)
    if len(segments) == 1 or padded_rows > MOST_PADDING * batch.num_rows_with_adapter:
        return by_segment(out, x, weights, batch)
    return padded(out, x, weights, batch)


def padded(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> Tensor:
    """Two batched products for all adapters of the step."""
    slots, rows, is_real = batch.padded
    a, b, scaling = weights.a, weights.b, weights.scaling
    if len(slots) < len(a):  # only those that are in use
        a, b, scaling = a[slots], b[slots], scaling[slots]
    h = torch.bmm(x[rows].unflatten(0, (len(a), -1)), a.transpose(1, 2))  # [slots, longest, R]
    h *= scaling.to(h.dtype)[:, None, None]
    delta = torch.bmm(h, b).flatten(0, 1)  # [slots · longest, N]
    if is_real is not None:
        rows, delta = rows[is_real], delta[is_real]
    return out.index_add_(0, rows, delta)


def by_segment(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> Tensor:
    """Two products an adapter."""
    for slot, first, count in batch.segments:
        a, b, scaling = weights.a[slot], weights.b[slot], float(weights.scaling[slot])
        if count == len(x):  # all rows, in their order
            return out.addmm_(x @ a.T, b, alpha=scaling)
        rows = batch.order[first : first + count]
        out.index_add_(0, rows, (x[rows] @ a.T).mul_(scaling) @ b)
    return out
