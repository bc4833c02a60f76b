"""Requests whose tokens are drawn together: what batch_sampling.py has to know of them."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.request import OnToken, Request, hand_out


def sampling_batch(requests: list[Request], device: torch.device | str) -> SamplingBatch:
    """How these requests are sampled together. It holds while they stay, and stay in this order."""
    return SamplingBatch.of(
        [r.sampling for r in requests],
        [r.prompt for r in requests],
        [r.output for r in requests],
        device,
    )


def take_batch_tokens(
    logits: Tensor, batch: SamplingBatch, requests: list[Request], on_token: OnToken | None = None
) -> None:
    """take_next_tokens for a whole batch at once. batch: sampling_batch(requests), told of every
    token since.
    """
    tokens = sample_batch(logits, batch)
    batch.append(tokens)
    hand_out(read_tokens(tokens), requests, on_token)
