"""Requests whose tokens are drawn together: what batch_sampling.py has to know of them."""

from dataclasses import replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.batched.fused import sample_fused
from lessons.l02_naive_attention.request import OnToken, Request, hand_out


def sampling_batch(requests: list[Request], device: torch.device | str) -> SamplingBatch:
    """How these requests are sampled together. It holds while they stay, and stay in this order.

    On a GPU by the kernels, which give the same tokens.
    """
    batch = SamplingBatch.of(
        [r.sampling for r in requests],
        [r.prompt for r in requests],
        [r.output for r in requests],
        device,
    )
    return by_kernels(batch) if torch.device(device).type == "cuda" else batch


def by_kernels(batch: SamplingBatch) -> SamplingBatch:
    """The same batch, sampled by the kernels. Without a GPU they run in Triton's interpreter."""
    every = list(range(len(batch.params)))
    # In one group, because a search costs the kernels little more than none.
    return replace(batch, shortcut=sample_fused, kinds=[(every, slice(0, len(every)))])


def kernel_batch(requests: list[Request], device: torch.device | str) -> SamplingBatch:
    """sampling_batch by the kernels on any device."""
    return by_kernels(sampling_batch(requests, device))


def take_batch_tokens(
    logits: Tensor, batch: SamplingBatch, requests: list[Request], on_token: OnToken | None = None
) -> None:
    """take_next_tokens for a whole batch at once. batch: sampling_batch(requests), told of every
    token since.
    """
    tokens = sample_batch(logits, batch)
    batch.append(tokens)
    hand_out(read_tokens(tokens), requests, on_token)
