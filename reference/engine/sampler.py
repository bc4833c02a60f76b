"""Logits to tokens for the sequences of a step, as each of their requests asks for them."""

import numpy as np
import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_cuts import lowest_kept
from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch
from lessons.l02_naive_attention.request import sampling_batch
from lessons.l14_continuous_batching.loop import StepSampler
from reference.engine.nucleus import LIKELY, shortcut_of
from reference.engine.outputs import Logprob, Logprobs
from reference.engine.request import EngineSequence


class Sampler:
    """Lesson 14's sampler behind what only the engine knows: structures, biases, least lengths,
    logprobs.
    """

    def __init__(self):
        self.sample = StepSampler(searching_batch)

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, sequences: list[EngineSequence]
    ) -> tuple[list[int], list[Logprobs | None]]:
        """A token for each row, and the log-probabilities that its request asks for. logits: [B,
        V], which are changed. Raises ValueError for logits that are not finite.
        """
        raw = logits.float().log_softmax(-1) if any(s.wants_logprobs for s in sequences) else None
        wanted = [s.constraint and s.constraint.row() for s in sequences]
        must_end = constrained(logits, wanted)
        for row, sequence in enumerate(sequences):
            adjust(logits, row, sequence, must_end=must_end[row])
        chosen = self.sample(logits, sequences)
        return chosen, logprobs_of(raw, chosen, sequences)


def constrained(logits: Tensor, wanted: list) -> list[bool]:
    """Forbid what structures forbid, in place, and say of each row whether only the end may follow.
    logits: [B, V]. wanted: a Row of reference.features.structured for each that has a structure.
    """
    if not any(wanted):
        return [False] * len(wanted)
    from reference.features.structured import apply_constraints  # here: few batches need it

    return apply_constraints(logits, wanted)


def searching_batch(sequences: list, device: torch.device) -> SamplingBatch:
    """A sampling batch that on a CPU finds top-p by looking at values."""
    batch = sampling_batch(sequences, device)
    if device.type == "cpu":
        batch.search, batch.shortcut = lowest_reaching, shortcut_of(batch)
    return batch


def adjust(
    logits: Tensor, row: int, sequence: EngineSequence, ahead: int = 0, must_end: bool = False
) -> None:
    """logit_bias and min_tokens of one row, in place. logits: [B, V]. ahead: drafted tokens that
    stand between the sequence's output and this row. must_end: nothing else is allowed.
    """
    if sequence.bias is not None:
        tokens, values = sequence.bias
        logits[row, tokens] += values.to(logits.dtype)
    so_far = len(sequence.output) + ahead
    is_early = so_far < sequence.params.min_tokens and not must_end
    if is_early and sequence.stop_token_ids:
        logits[row, list(sequence.stop_token_ids)] = -torch.inf


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


def logprobs_of(
    raw: Tensor | None, chosen: list[int], sequences: list[EngineSequence]
) -> list[Logprobs | None]:
    """What each request wants to know of its token. raw: [B, V], None if no request wants to
    know.
    """
    found: list[Logprobs | None] = [None] * len(sequences)
    asking = {
        row: sequence.params.logprobs or 0
        for row, sequence in enumerate(sequences)
        if sequence.wants_logprobs
    }
    # A count at a time: which of equal tokens is named may not depend on what others ask.
    for count in set(asking.values()):
        rows = [row for row in asking if asking[row] == count]
        for row, tops in zip(rows, top_logprobs(raw[rows], [chosen[row] for row in rows], count)):
            found[row] = tops
    return found


def top_logprobs(logprobs: Tensor, tokens: list[int], count: int) -> list[Logprobs]:
    """Of each row the `count` likeliest tokens, and the one of `tokens`. logprobs: [B, V]."""
    chosen = torch.tensor(tokens, device=logprobs.device)[:, None]
    best = logprobs.topk(min(count, logprobs.shape[1]))
    values = logprobs.gather(1, chosen)
    ranks = 1 + (logprobs > values).sum(1, keepdim=True)
    # One copy for all, because the CPU waits for each; float64 holds what float32 and ids hold.
    parts = [part.double() for part in (values, ranks, best.values, best.indices)]
    found = []
    for token, (value, rank, *tops) in zip(tokens, torch.cat(parts, dim=1).tolist()):
        pairs = zip(tops[: len(tops) // 2], tops[len(tops) // 2 :])
        here = {int(id): Logprob(top, place) for place, (top, id) in enumerate(pairs, 1)}
        here.setdefault(token, Logprob(value, int(rank)))
        found.append(here)
    return found
