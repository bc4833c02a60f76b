"""Top-p on a CPU: a token for each row of a batch, by looking at values.

Lesson 2's batch never reads a value, so that a GPU need not wait. It pays with passes over the
whole vocabulary for what happens rarely: a cut deep in the row, equal probabilities at the cut. A
CPU need not wait, so here a partial sort finds the cut among the likeliest tokens, and the rare
rows are looked at one by one. The arithmetic is NumPy's, whose exp and partition are the faster
ones.

Everything is computed row by row, so a row's token does not depend on its neighbours.
"""

import numpy as np
import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_cuts import lowest_kept
from lessons.l02_naive_attention.batched.batch_math import BLOCK, blocks_of
from lessons.l02_naive_attention.batched.batch_rows import SamplingBatch, is_searched
from lessons.l02_naive_attention.batched.batch_sampling import BAD_LOGITS, COLDEST, HOTTEST
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l02_naive_attention.random_streams import uniform
from lessons.l02_naive_attention.sampling import SamplingParams

LIKELY = 512  # entries among which a row's top-p nearly always ends


def searching_batch(sequences: list, device: torch.device) -> SamplingBatch:
    """A sampling batch that on a CPU finds top-p by looking at values."""
    batch = sampling_batch(sequences, device)
    if device.type == "cpu":
        batch.search, batch.shortcut = lowest_reaching, shortcut_of(batch)
    return batch


def is_plain(params: SamplingParams) -> bool:
    """Whether a row that is searched asks for a temperature and top-p alone."""
    others = params.top_k > 0 or params.min_p > 0 or params.has_penalties
    return params.temperature > 0 and not others


def shortcut_of(batch: SamplingBatch):
    """`sample_nucleus` if all rows of the batch that need a search are plain, else None."""
    searched = [params for params in batch.params if is_searched(params)]
    return sample_nucleus if searched and all(map(is_plain, searched)) else None


def sample_nucleus(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """A token for each row, as lesson 2 samples them. logits: [B, V] on the CPU; batch: rows that
    are all searched and plain, or all not searched -> [B] int64. None for what is not searched or
    not float32.
    """
    if logits.dtype != torch.float32 or not is_searched(batch.params[0]):
        return None
    width = blocks_of(logits.shape[1]) * BLOCK
    p, kept = batch.workspace.tensors(2, (len(logits), width), logits.dtype, logits.device).numpy()
    with np.errstate(all="ignore"):  # a row may hold NaN, or nothing but -inf
        highest = relative(logits.numpy(), batch.temperature, p)
        keep_likeliest(p, batch.top_p.view(-1).numpy(), kept)
        tokens = draw(kept, uniform(batch.stream, batch.drawn).numpy())
    tokens[~np.isfinite(highest)] = BAD_LOGITS
    return torch.from_numpy(tokens)


def relative(logits: np.ndarray, temperature: Tensor, p: np.ndarray) -> np.ndarray:
    """Write probabilities, the likeliest token's being 1, and 0 behind the vocabulary. logits: [B,
    V]; temperature: [B, 1, 1]; p: [B, width]. Returns the largest logits, [B].
    """
    own = p[:, : logits.shape[1]]
    highest = logits.max(axis=1, keepdims=True)
    np.subtract(logits, highest, out=own)
    np.divide(own, temperature.view(-1, 1).clamp(COLDEST, HOTTEST).float().numpy(), out=own)
    np.exp(own, out=own)
    p[:, logits.shape[1] :] = 0
    return highest[:, 0]


def keep_likeliest(p: np.ndarray, top_p: np.ndarray, kept: np.ndarray) -> None:
    """Write p, or 0 for what top-p cuts: of equal entries at the cut the last ones go. p, kept: [B,
    width] float32; top_p: [B] float64.
    """
    wanted = top_p * p.sum(axis=1)
    last, entries = reaching(p, wanted, LIKELY)
    rows = np.arange(len(p))
    count = entries.shape[1]
    place = np.minimum(last, count - 1)
    cut = entries[rows, place]
    is_tie = entries[rows, np.minimum(place + 1, count - 1)] == cut  # also if nothing stands behind
    np.greater_equal(p, cut[:, None], out=kept)
    np.multiply(kept, p, out=kept)
    for row in np.flatnonzero(is_tie | (last >= count)):
        keep_of_row(p[row], wanted[row], kept[row])


def keep_of_row(p: np.ndarray, wanted: float, kept: np.ndarray) -> None:
    """As keep_likeliest, for one row by a whole sort. p, kept: [width]."""
    (last,), (entries,) = reaching(p[None], np.array([wanted]), len(p))
    cut = entries[min(last, len(p) - 1)]
    np.multiply(p >= cut, p, out=kept)
    equal = np.flatnonzero(p == cut)
    kept[equal[last + 1 - int((entries > cut).sum()) :]] = 0


def reaching(p: np.ndarray, wanted: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The place at which the largest entries of each row weigh `wanted`, [B], `count` if they do
    not; and these entries, falling, [B, count]. p: [B, width]; wanted: [B].
    """
    count = min(count, p.shape[1])
    few = np.partition(p, -count, axis=1)[:, -count:] if count < p.shape[1] else p
    entries = np.sort(few, axis=1)[:, ::-1]
    weight = np.cumsum(entries, axis=1, dtype=np.float64)
    return (weight < wanted[:, None]).sum(axis=1), entries


def draw(kept: np.ndarray, u: np.ndarray) -> np.ndarray:
    """One token a row by inverse CDF, as batch_math.draw_tokens: first the block, then the entry in
    it. kept: [B, width]; u: [B] float64 -> [B] int64.
    """
    blocks, rows = kept.reshape(len(kept), -1, BLOCK), np.arange(len(kept))
    masses = torch.from_numpy(blocks).sum(-1, dtype=torch.float64).numpy()
    running = masses.cumsum(axis=1)
    block, mass = first_above(running, u * running[:, -1])
    mass -= running[rows, block] - masses[rows, block]
    inside = blocks[rows, block].cumsum(axis=1, dtype=np.float64)
    slot, _ = first_above(inside, mass)
    return block * BLOCK + slot


def first_above(running: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first place whose running sum exceeds the mass, and that mass. running: [B, N]; mass:
    [B].
    """
    # below the end, because the sum of a block and the sums within it round differently
    mass = np.minimum(mass, running[:, -1] * (1 - 2.0**-52))
    place = (running <= mass[:, None]).sum(axis=1)
    return np.minimum(place, running.shape[1] - 1), mass  # a row of NaN exceeds nothing


# ---------------------------------------------------------------- beside other wishes


def lowest_reaching(p: Tensor, wanted: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
    """Lesson 2's lowest_kept for a CPU, where a step may read values: NumPy's selection is
    vectorized, and a row's largest entries nearly always weigh enough. p, kept, weights (which is
    p): [B, blocks, BLOCK]; wanted: [B, 1, 1] -> [B, 1, 1].
    """
    lowest, is_found = among_largest(p, wanted)
    if bool(is_found.all()):
        return lowest
    # Row by row, because a row's token must not depend on who shares its batch.
    return torch.where(is_found, lowest, lowest_kept(p, wanted, kept, weights=weights))


def among_largest(p: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The entry with which a row's largest reach `wanted`, 0 for a wanted of inf; and whether
    LIKELY entries are enough to know it. p: [B, blocks, BLOCK], wanted: [B, 1, 1] -> [B, 1, 1]
    twice.
    """
    row = p.flatten(1).numpy()
    count = min(LIKELY, row.shape[1])
    few = np.sort(np.partition(row, -count, axis=1)[:, -count:], axis=1)
    entries = torch.from_numpy(few).flip(1)
    is_before = entries.cumsum(dim=1, dtype=torch.float64) < wanted.view(-1, 1)
    place = is_before.sum(dim=1, keepdim=True)
    entry = entries.gather(1, place.clamp(max=count - 1))[:, :, None]
    asks_nothing = wanted == torch.inf
    return entry.masked_fill(asks_nothing, 0), (place < count)[:, :, None] | asks_nothing
