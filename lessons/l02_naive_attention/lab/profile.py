"""What `make profile LESSON=02` runs: a step's sampling over a vocabulary of Llama 3's size, with
temperature and top-p; `top_k`, `everything` and PyTorch's version beside it.
"""

import torch

from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch, sample_batch
from lessons.l02_naive_attention.batched.fused import sample_fused
from lessons.l02_naive_attention.lab.workload import EVERYTHING, TOP_P
from lessons.l02_naive_attention.sampling import SamplingParams

ROWS, VOCAB_SIZE = 1, 128256
GENERATOR = torch.Generator().manual_seed(2)
LOGITS = 2 * torch.randn(ROWS, VOCAB_SIZE, generator=GENERATOR)
SEEN = [list(range(200))] * ROWS, [list(range(100))] * ROWS


def batch_of(params: SamplingParams) -> SamplingBatch:
    return SamplingBatch.of([params] * ROWS, *SEEN)


def optimized():
    return sample_fused(LOGITS, batch_of(TOP_P))


def top_k():
    return sample_fused(LOGITS, batch_of(SamplingParams(top_k=50)))


def everything():
    return sample_fused(LOGITS, batch_of(EVERYTHING))


def naive():
    """The same in PyTorch, bit by bit."""
    return sample_batch(LOGITS, batch_of(TOP_P))
