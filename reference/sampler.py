"""Logits to tokens for the sequences of a step: lesson 2's batched sampler, kept while they stay."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batch_sampling import SamplingBatch, read_tokens, sample_batch
from lessons.l02_naive_attention.request import sampling_batch
from reference.outputs import Logprob, Logprobs
from reference.request import EngineSequence


class Sampler:
    """Remembers the batch of the last step: in most steps the same sequences come again."""

    def __init__(self):
        self.ids: list[int] = []
        self.batch: SamplingBatch | None = None

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, sequences: list[EngineSequence]
    ) -> tuple[list[int], list[Logprobs | None]]:
        """A token for each row, and the log-probabilities that its request asks for. logits: [B, V],
        which are changed. Raises ValueError for logits that are not finite.
        """
        raw = logits.float().log_softmax(-1) if any(s.wants_logprobs for s in sequences) else None
        for row, sequence in enumerate(sequences):
            adjust(logits[row], sequence)
        ids = [sequence.row for sequence in sequences]
        if ids != self.ids:
            self.ids, self.batch = ids, sampling_batch(sequences, logits.device)
        tokens = sample_batch(logits, self.batch)
        self.batch.append(tokens)
        chosen = read_tokens(tokens)
        found = [
            top_logprobs(raw[row], token, sequence.params.logprobs or 0)
            if sequence.wants_logprobs
            else None
            for row, (token, sequence) in enumerate(zip(chosen, sequences))
        ]
        return chosen, found


def adjust(logits: Tensor, sequence: EngineSequence) -> None:
    """logit_bias and min_tokens, in place. logits: [V]."""
    if sequence.bias is not None:
        tokens, values = sequence.bias
        logits[tokens] += values.to(logits.dtype)
    if len(sequence.output) < sequence.params.min_tokens and sequence.stop_token_ids:
        logits[list(sequence.stop_token_ids)] = -torch.inf


def top_logprobs(logprobs: Tensor, token: int, count: int) -> Logprobs:
    """The `count` likeliest tokens and `token` itself. logprobs: [V]."""
    best = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist())
    found = {id: Logprob(value, rank) for rank, (id, value) in enumerate(pairs, 1)}
    if token not in found:
        value = logprobs[token]
        found[token] = Logprob(value.item(), 1 + int((logprobs > value).sum()))
    return found
