"""Logits to tokens for the sequences of a step, as each of their requests asks for them.

A step whose requests are all greedy takes the likeliest token of each row. One that draws asks
lesson 2's sampler for a batch, by way of lesson 14's; it is imported with the first such request.
On a GPU that sampler is its kernels, on a CPU its PyTorch operations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference.engine.outputs import Logprob, Logprobs
from reference.engine.request import EngineSequence


class Emitted(NamedTuple):
    """What a sequence gets from a step: a token, or with drafts several, and what its request wants
    to know of each.
    """

    tokens: list[int]
    logprobs: list[Logprobs | None]


class Sampler:
    """A token for each row. What only the engine knows comes first: structures, biases, least
    lengths, log-probabilities. new_batch: makes the sampling batch of sequences on a device, as
    lesson 2's `kernel_batch`; None: as suits the device.
    """

    def __init__(self, new_batch: Callable | None = None):
        self.new_batch = new_batch
        self.draw = None  # lesson 14's StepSampler, once a request is not greedy

    @torch.inference_mode()
    def __call__(self, logits: Tensor, sequences: list[EngineSequence]) -> list[Emitted]:
        """A token for each row, and the log-probabilities that its request asks for. logits: [B,
        V], which are changed. Raises ValueError for logits that are not finite.
        """
        raw = logits.float().log_softmax(-1) if any(s.wants_logprobs for s in sequences) else None
        wanted = [s.constraint and s.constraint.row() for s in sequences]
        must_end = constrained(logits, wanted)
        for row, sequence in enumerate(sequences):
            adjust(logits, row, sequence, must_end=must_end[row])
        chosen = self.choose(logits, sequences)
        found = logprobs_of(raw, chosen, sequences)
        return [Emitted([token], [logprobs]) for token, logprobs in zip(chosen, found)]

    def choose(self, logits: Tensor, sequences: list[EngineSequence]) -> list[int]:
        """A token for each row. It does not depend on the other rows, so neither way of sampling
        shows in the tokens. logits: [B, V].
        """
        if all(sequence.is_greedy for sequence in sequences):
            return likeliest(logits)
        if self.draw is None:
            from lessons.l14_continuous_batching.loop import StepSampler
            from reference.engine.nucleus import searching_batch

            self.draw = StepSampler(self.new_batch or searching_batch)
        return self.draw(logits, sequences)


def likeliest(logits: Tensor) -> list[int]:
    """The token with the largest logit of each row, the first of equal ones. logits: [B, V]. Raises
    ValueError for a row whose largest logit is not finite.
    """
    if logits.device.type == "cpu":  # by NumPy, because PyTorch's argmax takes ten times as long
        wide = logits if logits.dtype == torch.float64 else logits.float()
        tokens = torch.from_numpy(wide.numpy().argmax(axis=1))
    else:
        tokens = logits.argmax(dim=-1)
    is_finite = logits.gather(1, tokens[:, None])[:, 0].isfinite()
    ids = torch.where(is_finite, tokens, -1).tolist()  # one copy, for which the CPU waits
    if -1 in ids:
        row = ids.index(-1)
        raise ValueError(f"logits: the largest of row {row} is not finite; accepted: finite")
    return ids


def constrained(logits: Tensor, wanted: list) -> list[bool]:
    """Forbid what structures forbid, in place, and say of each row whether only the end may follow.
    logits: [B, V]. wanted: a Row of reference.features.structured for each that has a structure.
    """
    if not any(wanted):
        return [False] * len(wanted)
    from reference.features.structured import apply_constraints  # here: few batches need it

    return apply_constraints(logits, wanted)


def adjust(
    logits: Tensor,
    row: int,
    sequence: EngineSequence,
    ahead: Sequence[int] = (),
    must_end: bool = False,
) -> None:
    """What a request asks of the logits of one row, in place: logit_bias, allowed_token_ids,
    bad_words, min_tokens. logits: [B, V]. ahead: drafted tokens between the sequence's output and
    this row. must_end: nothing else is allowed.
    """
    if sequence.bias is not None:
        tokens, values = sequence.bias
        logits[row, tokens] += values.to(logits.dtype)
    so_far = len(sequence.output) + len(ahead)
    is_early = so_far < sequence.params.min_tokens and not must_end
    barred = list(sequence.late_token_ids) if is_early else []
    if sequence.bans is not None:
        sequence.bans.apply(logits[row], [*sequence.output, *ahead], barred)
    elif barred:
        logits[row, barred] = -torch.inf


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
    """Of each row the one of `tokens`, and the `count` likeliest, all for -1. logprobs: [B, V]."""
    chosen = torch.tensor(tokens, device=logprobs.device)[:, None]
    vocab_size = logprobs.shape[1]
    best = logprobs.topk(vocab_size if count == -1 else min(count, vocab_size))
    values = logprobs.gather(1, chosen)
    ranks = 1 + (logprobs > values).sum(1, keepdim=True)
    # One copy for all, because the CPU waits for each; float64 holds what float32 and ids hold.
    parts = [part.double() for part in (values, ranks, best.values, best.indices)]
    found = []
    for token, (value, rank, *tops) in zip(tokens, torch.cat(parts, dim=1).tolist()):
        pairs = zip(tops[: len(tops) // 2], tops[len(tops) // 2 :])
        here = {token: Logprob(value, int(rank))}  # the first of them, as in vLLM
        for place, (top, id) in enumerate(pairs, 1):
            here[int(id)] = Logprob(top, place)
        found.append(here)
    return found
